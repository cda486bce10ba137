"""The audit of artificial graphs whose findings are known."""

from __future__ import annotations

import ast
import re
import struct
import time

import numpy as np
import pytest

from graphrt.capture.inspect.audit import Allowed, FindingKind, audit
from graphrt.capture.inspect.memory import MemoryMap, Owner, Region
from graphrt.capture.inspect.scan import HIGHEST, LOWEST, scan
from graphrt.capture.inspect.view import Argument, Edge, GraphView, Node, NodeKind, Operand
from graphrt.kernels.errors import CaptureError, ConfigError
from scripts.compile_check import KERNELS
from tests.support.audit_examples import (
    BASE,
    GONE,
    IDLE,
    LEAK,
    POOL,
    REGIONS,
    STAGING,
    WEIGHT,
    FakeDriver,
    X,
    copy,
    dst,
    graph,
    kernel,
    op,
    realistic,
    src,
    words,
)

MEMORY = MemoryMap(REGIONS)
LIBRARY = Region("workspace", Owner.LIBRARY, BASE + 0x10_0000_0000, 1 << 20)
PINNED = Region("pinned memory", Owner.HOST, BASE + 0x20_0000_0000, 4096)
NOWHERE = BASE + 0x30_0000_0000
DRIVER = FakeDriver(LIBRARY, PINNED)


def run(*nodes: Node, memory: MemoryMap = MEMORY, edges: tuple[Edge, ...] = (), **options):
    return audit(graph(*nodes, edges=edges), memory, **({"driver": DRIVER} | options))


def kinds(report) -> list[FindingKind]:
    return [finding.kind for finding in report.findings]


# -- the scan


@pytest.mark.parametrize("length", [8, 9, 64, 333])
def test_a_pointer_is_found_at_every_byte_offset(length: int) -> None:
    for offset in range(length - 7):
        blob = bytearray(length)
        blob[offset : offset + 8] = words(LEAK.address + 5)
        (finding,) = run(kernel(bytes(3), bytes(blob))).findings
        assert (finding.where, finding.address) == (f"argument 1, byte {offset}", LEAK.address + 5)
        assert (finding.kind, finding.owner, finding.certain) == (FindingKind.FOREIGN, Owner.ALLOCATOR, False)


def test_the_scan_equals_a_search_of_every_offset() -> None:
    """Words do not span two arguments."""
    rng = np.random.default_rng(3)
    blobs = [rng.integers(0, 256, rng.integers(0, 40), dtype=np.uint8) for _ in range(60)]
    for blob in blobs:
        blob[rng.random(len(blob)) < 0.5] = 0
    view = graph(*(kernel(*(blob.tobytes() for blob in blobs[i : i + 3])) for i in range(0, 60, 3)))
    expected = [
        (place, index, offset, word)
        for place, node in view.walk()
        for index, argument in enumerate(node.arguments)
        for offset in range(len(argument.data) - 7)
        if LOWEST <= (word := struct.unpack_from("<Q", argument.data, offset)[0]) <= HIGHEST
    ]
    found = scan(view)
    refs = [found.argument_at(int(at)) for at in found.at]
    values = found.value.tolist()
    assert [(ref.place, ref.index, o, v) for (ref, o), v in zip(refs, values, strict=True)] == expected
    assert len(expected) > 20
    assert found.looked_at == sum(max(len(blob) - 7, 0) for blob in blobs)


def test_owners_of_valid_memory() -> None:
    """Numbers have none."""
    numbers = struct.pack("<6d", 1.0, -1.0, 0.1, float("nan"), float("inf"), 1e-300)
    sizes = struct.pack("<8i", 4096, 128, 0, 1, -1, 2**31 - 1, 32530, 7)
    shapes = words(0x20_0000_0020, 0xFFFF_FFC0_0000_0000, 0xFFFFFFC0000000, 1 << 47, 2**64 - 1)  # of cuBLASLt
    report = run(kernel(numbers, sizes, shapes, words(NOWHERE)))
    assert report.ok
    assert sum(report.counts.values()) == 0
    stays = (X, WEIGHT, POOL, IDLE, LIBRARY)
    report = run(kernel(*(words(r.address, r.end - 1) for r in stays)))
    assert report.ok
    counted = {owner: count for owner, count in report.counts.items() if count}
    assert counted == {Owner.STATIC: 2, Owner.WEIGHT: 2, Owner.POOL: 4, Owner.LIBRARY: 2}


@pytest.mark.parametrize(
    ("address", "kind", "owner", "region"),
    [
        (LEAK.address, FindingKind.FOREIGN, Owner.ALLOCATOR, LEAK.name),
        (LEAK.end - 1, FindingKind.FOREIGN, Owner.ALLOCATOR, LEAK.name),
        (GONE.address, FindingKind.FREED, Owner.ALLOCATOR, GONE.name),
        (STAGING.address + 8, FindingKind.HOST_MEMORY, Owner.HOST, "staging"),
        (PINNED.address, FindingKind.HOST_MEMORY, Owner.HOST, "pinned memory"),
    ],
)
def test_owners_of_invalid_memory(address: int, kind: FindingKind, owner: Owner, region: str) -> None:
    (finding,) = run(kernel(words(X.address, address))).findings
    assert (finding.kind, finding.owner, finding.region, finding.address) == (kind, owner, region, address)
    assert (finding.place, finding.node, finding.where) == ((0,), "kernel", "argument 0, byte 8")
    assert not finding.certain
    (exact,) = run(kernel(words(X.address, address), pointers=[(0, 8)])).findings
    assert exact.certain
    assert exact.text == finding.text


# -- arguments that say where their pointers are


def test_only_known_pointers_are_checked_and_named() -> None:
    node = Node(NodeKind.KERNEL, "k", arguments=(Argument(0, words(LEAK.address), "x_ptr", (0,)),))
    assert [finding.where for finding in run(node).findings] == ["argument 0 'x_ptr', byte 0"]
    blob = words(LEAK.address, X.address, 0)
    assert run(kernel(blob, pointers=[(8, 16)])).ok, "the first word is a number, and null is not an address"
    assert run(kernel(blob, pointers=[()])).ok
    (finding,) = run(kernel(blob, pointers=[(0,)])).findings
    assert finding.certain


@pytest.mark.parametrize("address", [NOWHERE, 5, LOWEST - 1, HIGHEST + 1, 2**64 - 1])
def test_a_known_pointer_to_no_memory_is_a_finding(address: int) -> None:
    (finding,) = run(kernel(words(address), pointers=[(0,)])).findings
    assert (finding.kind, finding.owner, finding.region) == (FindingKind.UNMAPPED, None, "")
    assert finding.address == address
    assert finding.certain


# -- operands


def test_one_byte_past_a_buffer_is_a_finding() -> None:
    report = run(copy(src(X.address, X.nbytes), dst(POOL.address)))
    assert report.ok
    assert (report.counts[Owner.STATIC], report.counts[Owner.POOL]) == (1, 1)
    (finding,) = run(copy(src(X.address, X.nbytes + 1), dst(POOL.address))).findings
    assert (finding.kind, finding.address, finding.where) == (FindingKind.OVERRUN, X.end, "operand src")
    assert "byte 4096 is past the end of static 'x' with 4096 bytes" in finding.text
    assert finding.certain
    memory = MemoryMap([X, Region("block", Owner.ALLOCATOR, X.address, 8192)])
    (by_pointer,) = run(kernel(words(X.end)), memory=memory).findings
    (by_operand,) = run(copy(src(X.address, X.nbytes + 1), dst(X.address)), memory=memory).findings
    for finding in (by_pointer, by_operand):  # past a view in a larger block
        assert (finding.kind, finding.address) == (FindingKind.OVERRUN, X.end)
        assert "'x'" in finding.text
    (other,) = run(kernel(words(X.end)), memory=MemoryMap([X, Region("next", Owner.ALLOCATOR, X.end, 8192)])).findings
    assert other.kind is FindingKind.FOREIGN, "another allocation, which starts where x ends"


def test_an_operand_in_several_blocks() -> None:
    assert run(op(dst(POOL.end - 100, 200))).ok, "the pool was split into blocks after the operand was freed"
    adjacent = MemoryMap([X, Region("y", Owner.STATIC, X.end, 64)])
    assert run(op(src(X.address, X.nbytes + 64)), memory=adjacent).ok
    (finding,) = run(op(src(LEAK.address, 4096))).findings
    assert finding.kind is FindingKind.FOREIGN
    (finding,) = run(op(dst(X.address, X.nbytes + 65)), memory=adjacent).findings
    assert "'y'" in finding.text
    (finding,) = run(op(src(LIBRARY.address, LIBRARY.nbytes + 1))).findings
    assert (finding.kind, finding.address) == (FindingKind.UNMAPPED, LIBRARY.end)
    assert run(op(src(LIBRARY.address, LIBRARY.nbytes))).ok
    assert run(op(src(0, 64), dst(NOWHERE, 0))).ok, "an unknown address, and no bytes"


def test_host_memory() -> None:
    (read,) = run(copy(src(STAGING.address, host=True), dst(X.address))).findings
    (unknown,) = run(copy(src(NOWHERE, host=True), dst(X.address))).findings
    (written,) = run(copy(src(X.address), dst(PINNED.address, host=True))).findings
    assert {f.kind for f in (read, unknown, written)} == {FindingKind.HOST_MEMORY}
    assert (read.region, unknown.region, written.region) == ("staging", "", "pinned memory")
    assert run(copy(src(X.address), dst(STAGING.address, host=True))).ok, "a registered buffer for results"


# -- nodes as a whole


def test_host_functions_and_early_launches_are_findings() -> None:
    (finding,) = run(Node(NodeKind.HOST, "host function")).findings
    assert (finding.kind, finding.place, finding.where) == (FindingKind.HOST_FUNCTION, (0,), "")
    nodes = (kernel(name="norm"), kernel(name="rope_1"), kernel(name="gemm"))
    edges = (Edge(0, 1, programmatic=True), Edge(1, 2))
    (finding,) = run(*nodes, edges=edges, waits=["norm"]).findings
    assert (finding.kind, finding.node) == (FindingKind.EARLY_START, "rope_1")
    assert "'norm' has finished" in finding.text
    assert run(*nodes, edges=edges, waits=["gemm", "rope_*"]).ok
    of_cublas = [kernel(name="norm"), kernel(name="nvjet_tst_64x8_64x16_4x1_v_bz_TNT")]
    assert run(*of_cublas, edges=[Edge(0, 1, True)]).ok


def kernels_that_wait() -> list[str]:
    """Names of graphrt's Triton and CUDA kernels that wait for the previous kernel."""
    sources = [path.read_text() for path in sorted(KERNELS.rglob("*.py"))]
    waiting = [ast.parse(source) for source in sources if "gdc_wait()" in source]
    functions = [n for module in waiting for n in ast.walk(module) if isinstance(n, ast.FunctionDef)]
    names = [f.name for f in functions if f.decorator_list and "gdc_wait()" in ast.unparse(f)]
    native = [path.read_text() for path in sorted(KERNELS.rglob("*.cu"))]
    kernels = r"__global__[^{]*?(\w+)\((?:const __grid_constant__ )?Params"
    return names + [name for s in native if "wait_for_earlier_kernels()" in s for name in re.findall(kernels, s)]


@pytest.mark.parametrize("name", kernels_that_wait())
def test_graphrt_kernels_that_wait_are_known(name: str) -> None:
    assert run(kernel(name="norm"), kernel(name=name), edges=(Edge(0, 1, programmatic=True),)).ok


def test_loads_before_the_wait_must_be_from_weights() -> None:
    """A product loads its weight, the scale and the zeros early: the first three words of its argument."""

    def product(*early: int) -> list[tuple[FindingKind, str, str]]:
        nodes = (kernel(name="norm"), kernel(words(*early, X.address, POOL.address), name="linear"))
        findings = run(*nodes, edges=(Edge(0, 1, programmatic=True),)).findings
        assert run(*nodes, edges=(Edge(0, 1),)).ok, "ordered after the earlier kernel"
        return [(finding.kind, finding.where, finding.region) for finding in findings]

    assert product(WEIGHT.address, 0, 0) == []
    assert product(WEIGHT.address, WEIGHT.address + 64, WEIGHT.end - 1) == []
    early, where = FindingKind.EARLY_START, "argument 0, byte "
    assert product(POOL.address, 0, 0) == [(early, where + "0", POOL.name)], "computed in the step"
    assert product(WEIGHT.address, X.address, 0) == [(early, where + "8", X.name)]
    assert product(WEIGHT.address, 0, X.address) == [(early, where + "16", X.name)]


def test_bodies_are_audited() -> None:
    body = GraphView((kernel(words(X.address)), kernel(words(GONE.address), name="late")), (Edge(0, 1, True),))
    report = run(kernel(words(X.address)), Node(NodeKind.CONDITIONAL, "while", bodies=(graph(), body)))
    assert [(f.place, f.kind) for f in report.findings] == [
        ((1, 1, 1), FindingKind.FREED), ((1, 1, 1), FindingKind.EARLY_START)
    ]  # fmt: skip
    assert report.nodes == 4


def test_allocations_of_the_graph_count_as_its_pool() -> None:
    allocation = Node(NodeKind.ALLOC, "alloc", operands=(Operand("memory", NOWHERE, 256),))
    free = Node(NodeKind.FREE, "free", operands=(Operand("memory", NOWHERE, 256),))
    used = kernel(words(NOWHERE + 8), pointers=[(0,)])
    other = Node(
        NodeKind.FREE, "free", operands=(Operand("memory", NOWHERE + 4096, 256),)
    )  # allocated by another graph
    assert run(allocation, used, op(dst(NOWHERE, 256)), free, other).ok
    assert kinds(run(allocation, op(dst(NOWHERE, 257)))) == [FindingKind.UNMAPPED]


def test_registered_memory_in_a_freed_block_is_a_finding() -> None:
    output = Region("logits", Owner.STATIC, IDLE.address + 512, 1024)
    report = run(kernel(words(X.address)), op(dst(output.address)), memory=MemoryMap([output, *REGIONS]))
    (finding,) = report.findings
    assert (finding.kind, finding.region, finding.place) == (FindingKind.FREED, "logits", (1,))
    gone = MemoryMap([Region("x", Owner.STATIC, X.address, X.nbytes, live=False)])
    assert kinds(run(op(src(X.address)), memory=gone)) == [FindingKind.FREED]
    (unused,) = run(memory=MemoryMap([output, *REGIONS])).findings
    assert (unused.place, unused.node) == ((), "")
    held = Region("logits", Owner.STATIC, POOL.address, 1024)
    assert run(op(dst(held.address)), memory=MemoryMap([held, *REGIONS])).ok


# -- the driver


def test_the_driver_is_asked_once_per_unknown_address_and_about_aligned_words_only() -> None:
    driver = FakeDriver(LIBRARY)
    nodes = [kernel(words(X.address, LIBRARY.address + 8 * i, NOWHERE)) for i in range(50)]
    assert run(*nodes, driver=driver).counts[Owner.LIBRARY] == 50
    assert len(driver.asked) == len(set(driver.asked))
    assert X.address not in driver.asked
    inside = [address for address in driver.asked if LIBRARY.address <= address < LIBRARY.end]
    assert inside == [LIBRARY.address], "one answer covers the whole range"

    def asked(argument: Argument, memory: MemoryMap = MEMORY) -> set[int]:
        driver = FakeDriver(PINNED)
        run(Node(NodeKind.KERNEL, "k", arguments=(argument,)), memory=memory, driver=driver)
        return {address for address in driver.asked if address in (PINNED.address, NOWHERE)}

    packed = bytes(4) + words(PINNED.address, NOWHERE)
    assert asked(Argument(8, packed)) == set()
    assert asked(Argument(12, packed)) == {PINNED.address, NOWHERE}
    assert asked(Argument(8, packed, pointers=(4,))) == {PINNED.address}, "known pointers are looked up at any offset"
    named = MemoryMap([Region("staging", Owner.HOST, PINNED.address, 8)])
    report = audit(graph(Node(NodeKind.KERNEL, "k", arguments=(Argument(8, packed),))), named, driver=FakeDriver())
    assert kinds(report) == [FindingKind.HOST_MEMORY], "regions of the map are found at any byte"


# -- allowances and the report


def test_allowances_and_wrong_arguments() -> None:
    nodes = (
        copy(src(STAGING.address, host=True), dst(X.address)), kernel(words(GONE.address)), kernel(words(LEAK.address))
    )  # fmt: skip
    allowed = (
        Allowed("an event guards it", region="stag*"),
        Allowed("of the bench", node="kernel", kind=FindingKind.FREED),
        Allowed("was there once", region="old"),
        Allowed("of another kernel", node="gemm*"),
    )
    report = run(*nodes, allowed=allowed)
    assert [f.region for f in report.findings] == [LEAK.name]
    assert report.allowances == ((allowed[0], 1), (allowed[1], 1), (allowed[2], 0), (allowed[3], 0))
    for line in (
        "allowed 1 times: region 'stag*' (an event guards it)",
        "allowed 1 times: node 'kernel', kind 'freed block' (of the bench)",
        "allowed, but not found: region 'old' (was there once)",
    ):
        assert line in str(report)
    for options, text in (
        ({"reason": "", "region": "x"}, "reason: empty"),
        ({"reason": "because"}, "allowed: the exception would allow every finding"),
        ({"reason": "because", "region": 3}, "region: expected str, got 3"),
    ):
        with pytest.raises(ConfigError, match=text):
            Allowed(**options)
    for allowed, text in ((["x"], "expected Allowed, got 'x'"), (5, "expected a list or tuple of Allowed, got 5")):
        with pytest.raises(ConfigError, match=f"allowed: {text}"):
            run(allowed=allowed)
    for waits in ("x", 5, [1]):
        with pytest.raises(ConfigError, match="waits: expected a list of name patterns"):
            run(waits=waits)


def test_the_report_groups_nodes_that_share_a_buffer() -> None:
    nodes = [kernel(words(LEAK.address), name=f"k{i}") for i in range(12)]
    other = kernel(words(LEAK.address + 512))
    lines = str(run(*nodes, other, Node(NodeKind.OTHER, "odd", remark="driver too old"))).splitlines()
    assert lines[0] == "audit of 14 nodes: 13 findings; 13 words, addresses by owner: 13 allocator"
    assert lines[1].startswith('  foreign allocation (may be a number): node 0 k0: argument 0, byte 0: "block of torch')
    assert lines[2] == "    and at 11 more: node 1, 2, 3, 4, 5, 6, 7, 8, ..."
    assert lines[3].startswith(
        '  foreign allocation (may be a number): node 12 kernel: argument 0, byte 0: "block of torch'
    )
    assert lines[4:] == ["  not read: node 13 odd: driver too old"]
    assert str(run(*nodes[:9])).endswith("and at 8 more: node 1, 2, 3, 4, 5, 6, 7, 8")
    lines = str(run(*(kernel(words(NOWHERE + 8 * i), pointers=[(0,)]) for i in range(33)))).splitlines()
    assert len(lines) == 1 + 20 + 1, "findings without a name are grouped by address"
    assert lines[-1] == "  and 13 more kinds or buffers: see .findings"
    run(kernel(words(X.address))).raise_if_any()
    report = run(kernel(words(LEAK.address)), copy(src(GONE.address), dst(X.address)))
    certain = r"audit: expected no findings, got 2; first finding: node 1 memcpy: operand src"
    with pytest.raises(CaptureError, match=certain):
        report.raise_if_any()


# -- size


def test_a_graph_of_600_nodes() -> None:
    view, regions = realistic()
    regions[1234] = foreign = Region("foreign", Owner.ALLOCATOR, regions[1234].address, regions[1234].nbytes)
    start = time.perf_counter()
    report = audit(view, MemoryMap(regions), driver=FakeDriver())
    assert time.perf_counter() - start < 5, "a few milliseconds on a free core"
    injected = {
        place
        for place, node in view.walk()
        for argument in node.arguments
        for offset in range(0, len(argument.data) - 7, 8)
        if foreign.address <= struct.unpack_from("<Q", argument.data, offset)[0] < foreign.end
    }
    assert {f.place for f in report.findings} == injected != set()
