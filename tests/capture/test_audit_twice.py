"""audit_twice(): certain findings, dropped stale words, and findings by comparison."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest

from graphrt.capture.inspect import audit as audit_module
from graphrt.capture.inspect.audit import Allowed, Audit, FindingKind, audit, audit_twice
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.view import GraphView, Node
from graphrt.kernels.errors import ConfigError
from tests.support.audit_examples import (
    BASE,
    GONE,
    LEAK,
    STAGING,
    WEIGHT,
    FakeDriver,
    X,
    copy,
    dst,
    graph,
    kernel,
    op,
    src,
    words,
)  # fmt: skip

FIRST = Region("pool of the graph", Owner.POOL, BASE + 0x100000, 1 << 16)
SECOND = Region("pool of the graph", Owner.POOL, BASE + 0x200000, 1 << 16)
COMMON = (X, WEIGHT, LEAK, GONE, STAGING)
NUMBER = 0x20_0000_0020


def foreign(region: Region) -> Region:
    return Region("block of torch's allocator", Owner.ALLOCATOR, region.address, region.nbytes)


def run(first: GraphView, second: GraphView, **options) -> Audit:
    """The memory maps of two captures in one process: the other capture's pool is foreign memory."""
    captures = iter([first, second])
    maps = {
        id(first): MemoryMap([FIRST, *COMMON]),
        id(second): MemoryMap([SECOND, foreign(FIRST), *COMMON]),
    }
    return audit_twice(lambda: next(captures), lambda view: maps[id(view)], driver=FakeDriver(), **options)


def both(first: bytes, second: bytes, pointers: Iterable[tuple[int, ...] | None] = ()) -> Audit:
    pointers = list(pointers)
    return run(graph(kernel(first, pointers=pointers)), graph(kernel(second, pointers=pointers)))


def test_memory_allocated_in_every_capture_is_valid() -> None:
    first = words(FIRST.address + 64, X.address, WEIGHT.address + 8, NUMBER)
    second = words(SECOND.address + 64, X.address, WEIGHT.address + 8, NUMBER)
    report = both(first, second)
    assert report.ok
    assert (report.counts[Owner.POOL], report.counts[Owner.STATIC], report.counts[Owner.WEIGHT]) == (1, 1, 1)


@pytest.mark.parametrize("region", [LEAK, GONE, STAGING])
def test_the_same_invalid_address_in_both_is_certain(region: Region) -> None:
    alone = audit(graph(kernel(words(region.address))), MemoryMap(COMMON), driver=FakeDriver())
    (decided,) = both(words(region.address), words(region.address)).findings
    assert [finding.certain for finding in alone.findings] == [False]
    assert decided.certain
    assert decided.kind is alone.findings[0].kind
    (other,) = both(words(GONE.address), words(LEAK.address)).findings
    assert (other.kind, other.certain) == (FindingKind.FOREIGN, True), "two foreign allocations"
    view = graph(kernel(words(region.address)))
    report = run(view, graph(*view.nodes), allowed=[Allowed("on purpose", node="k*")])
    assert (report.ok, report.allowances[0][1]) == (True, 1)


@pytest.mark.parametrize("earlier", [0, NUMBER, BASE - 4096, 2**64 - 1])
def test_a_stale_word_in_padding_is_dropped(earlier: int) -> None:
    assert both(words(X.address, earlier), words(X.address, LEAK.address)).ok


def test_certainty_of_words_that_may_be_stale() -> None:
    """A known pointer is certain. A word opposite a valid address is not, nor is the unused end of a long list."""
    (known,) = both(words(0), words(LEAK.address), pointers=[(0,)]).findings
    (opposite,) = both(words(FIRST.address), words(LEAK.address)).findings
    assert (known.certain, opposite.certain) == (True, False)
    for length, certain in ((8, True), (80, False)):
        argument = words(*[X.address] * (length - 1), LEAK.address)
        (finding,) = both(argument, argument).findings
        assert finding.certain is certain


def test_memory_of_the_first_capture_is_hidden_state() -> None:
    (kept,) = both(words(FIRST.address + 8), words(FIRST.address + 8)).findings
    assert (kept.kind, kept.certain, kept.address) == (FindingKind.HIDDEN_STATE, True, FIRST.address + 8)
    (other,) = both(words(FIRST.address + 8), words(FIRST.address + 16)).findings
    assert other.kind is FindingKind.HIDDEN_STATE
    assert both(words(NUMBER), words(FIRST.address)).ok, "a stale word"
    (operand,) = run(graph(op(src(FIRST.address))), graph(op(src(FIRST.address)))).findings
    assert (operand.kind, operand.certain, operand.where) == (FindingKind.HIDDEN_STATE, True, "operand src")


def test_a_registered_address_that_differs_is_reported() -> None:
    (word,) = both(words(X.address), words(X.address + 64)).findings
    assert (word.kind, word.region, word.certain) == (FindingKind.CHANGED, "x", True)
    assert "byte 0 of 'x' and then byte 64 of 'x'" in word.text
    (operand,) = run(graph(op(src(X.address))), graph(op(src(WEIGHT.address)))).findings
    assert "byte 0 of 'x' and then byte 0 of 'layer.weight'" in operand.text
    assert both(words(NUMBER), words(X.address)).ok, "a stale word"


def test_a_known_number_or_length_that_differs_is_reported() -> None:
    first, second = words(X.address) + struct.pack("<i", 3), words(X.address) + struct.pack("<i", 4)
    (finding,) = both(first, second, pointers=[(0,)]).findings
    assert (finding.kind, finding.where) == (FindingKind.CHANGED, "argument 0")
    assert "bytes 000000000000000003000000 and then 000000000000000004000000" in finding.text
    assert both(first, second).ok, "any byte of a struct may be uninitialized padding"
    (scalar,) = run(
        graph(op(src(X.address), scalars=(("other", "3"),))), graph(op(src(X.address), scalars=(("other", "4"),)))
    ).findings
    assert "captures, 3 and then 4" in scalar.text
    (finding,) = run(*(graph(copy(src(X.address, n), dst(X.address + 2048, n))) for n in (416, 432))).findings
    assert (finding.kind, finding.where, finding.certain) == (FindingKind.CHANGED, "operand src", True)
    assert "the length differs between captures, 416 and then 432 bytes" in finding.text


def test_a_four_byte_argument_is_compared_without_a_signature() -> None:
    """Four bytes are not an address. One byte may be a functor without members, which is not initialized."""
    (finding,) = both(struct.pack("<i", 10), struct.pack("<i", 17)).findings
    assert (finding.kind, finding.where) == (FindingKind.CHANGED, "argument 0")
    assert both(b"\x01", b"\x02").ok
    assert both(struct.pack("<if", 0, 1.5), struct.pack("<if", 0, 2.5)).ok, "a struct"


def test_different_nodes_are_reported() -> None:
    a, b = kernel(words(X.address), name="a"), kernel(words(X.address), name="b")
    (renamed,) = run(graph(a, a), graph(a, b)).findings
    assert (renamed.kind, renamed.place) == (FindingKind.CHANGED, (1,))
    assert "the captures differ, 'a' in the first and 'b' in the second" in renamed.text
    (missing,) = run(graph(a, b), graph(a)).findings
    assert (missing.node, missing.place) == ("b", ())
    (further,) = run(graph(a), graph(a, b)).findings
    assert (further.node, further.place) == ("b", (1,))
    wider = Node(a.kind, a.name, grid=(2, 1, 1), block=a.block, arguments=a.arguments)
    (grid,) = run(graph(a), graph(wider)).findings
    assert "with grid (1, 1, 1) and then (2, 1, 1)" in grid.text


def test_different_captures_are_still_audited() -> None:
    first = graph(kernel(words(X.address), name="prepare"), kernel(words(FIRST.address)))
    report = run(first, graph(kernel(words(FIRST.address, LEAK.address))))
    kinds = [(finding.kind, finding.address) for finding in report.findings]
    assert kinds == [
        (FindingKind.CHANGED, 0), (FindingKind.HIDDEN_STATE, FIRST.address), (FindingKind.FOREIGN, LEAK.address)
    ]  # fmt: skip


def test_two_captures_need_two_pools_and_functions() -> None:
    view, memory = graph(kernel(words(FIRST.address))), MemoryMap([FIRST])
    with pytest.raises(ConfigError, match="capture: both calls captured into one pool"):
        audit_twice(lambda: view, lambda view: memory, driver=FakeDriver())
    with pytest.raises(ConfigError, match="capture: expected a callable"):
        audit_twice(graph(), lambda view: memory)
    with pytest.raises(ConfigError, match="memory: expected a callable"):
        audit_twice(graph, memory)
    with pytest.raises(ConfigError, match="waits: expected a list of name patterns"):
        audit_twice(lambda: pytest.fail("captured"), lambda view: memory, waits="x")


def test_the_first_graph_is_kept_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[str] = []

    class Graph:
        def __init__(self) -> None:
            alive.append("made")

        def __del__(self) -> None:
            alive.append("dropped")

    def memory(held: Graph) -> MemoryMap:
        assert "dropped" not in alive
        return MemoryMap([X])

    views = iter([graph(kernel(words(NUMBER))), graph(kernel(words(NUMBER)))])
    monkeypatch.setattr(audit_module, "inspect_graph", lambda held: next(views))
    assert audit_twice(Graph, memory, driver=FakeDriver()).ok
    assert alive == ["made", "made", "dropped", "dropped"]
