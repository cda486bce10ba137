"""The parts of verify: canaries, comparisons, host values, memory that nobody wrote, launches in flight."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.kernels.errors import ReplayError
from graphrt.testing import verify_flight
from graphrt.testing.canary import GUARD_BYTES, Canaries
from graphrt.testing.poison import poisoned
from graphrt.testing.verify import verify
from graphrt.testing.verify_context import Verification
from graphrt.testing.verify_eager import EagerChecks
from graphrt.testing.verify_graph import GraphChecks
from graphrt.testing.verify_host import HostValues, assigned, caches, written_tensors
from graphrt.testing.verify_memory import UnwrittenInGraph, UnwrittenMemory, fill_inactive, inactive_blocks, zeroed
from graphrt.testing.verify_report import differing, first_difference, region, same_bits
from graphrt.testing.verify_runs import changed
from graphrt.testing.verify_slots import slots
from graphrt.testing.verify_subject import Target
from graphrt.testing.verify_values import same
from tests.verify_examples import Copies, rows, silu

NAN = math.nan


@dataclasses.dataclass
class Node:
    """Of a list that leads back to its beginning."""

    value: torch.Tensor
    next: Node | None = None


def test_values_that_lead_back_to_themselves_are_compared() -> None:
    def ring(*values: float) -> list[Any]:
        nodes = [Node(torch.tensor([value])) for value in values]
        for node, behind in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            node.next = behind
        found: list[Any] = [nodes[0], {}]
        found[1]["self"] = found
        return found

    assert same(ring(1.0, NAN), ring(1.0, NAN))
    assert not same(ring(1.0, 2.0), ring(1.0, 3.0))
    assert not same(ring(1.0), ring(1.0, 1.0, 2.0))


# -- canaries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_canaries(dtype: torch.dtype) -> None:
    canaries = Canaries()
    buffer = canaries.full("b", (3, 5), dtype, "cpu", 1)
    assert buffer.shape == (3, 5)
    assert buffer.dtype == dtype
    assert bool((buffer == 1).all())
    buffer.zero_()
    assert canaries.broken() == []
    whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
    whole[GUARD_BYTES - 1] ^= 1
    whole[-1] ^= 1
    front, back = canaries.broken()
    assert (front.name, front.behind, back.behind) == ("b", False, True)
    assert 1 <= front.offset <= 8
    assert "before its beginning" in str(front)
    canaries.repair()
    assert canaries.broken() == []


def test_guards_read_as_poison() -> None:
    buffer = Canaries().full("b", (4,), torch.float32, "cpu")
    beyond = torch.as_strided(buffer, (8,), (1,))
    assert poisoned(beyond).tolist() == [False] * 4 + [True] * 4


def test_a_write_beyond_a_plain_buffer_is_named() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.as_strided(x, (x.numel() + 1,), (1,), x.storage_offset())[-1:].fill_(1)
        return silu(x)

    report = verify(step, lambda case: {"x": torch.ones(4, 6)}, eager=silu)
    assert {finding.check for finding in report.findings} == {"canary"}
    assert report.blamed == ("x",)
    assert "0 bytes behind its end" in str(report)


# -- comparisons and parts


DIFFERENT = {
    "equal": ([1.0, 2.0], [1.0, 2.0], 0.0, [False, False]),
    "nan": ([NAN, NAN], [NAN, 1.0], 0.0, [False, True]),
    "zeros": ([0.0, 1.0], [-0.0, 1.0], 0.0, [True, False]),
    "near": ([1.0, 2.0], [1.001, 2.1], 0.01, [False, True]),
    "infinities": ([math.inf, math.inf], [math.inf, -math.inf], 0.01, [False, True]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differing(name: str) -> None:
    have, want, tolerance, expected = DIFFERENT[name]
    assert differing(torch.tensor(have), torch.tensor(want), tolerance).tolist() == expected


NANS = {
    torch.float32: (torch.int32, 0x7FC00000, 0x7FC00001),
    torch.bfloat16: (torch.int16, 0x7FC0, 0x7FC1),
    torch.float8_e4m3fn: (torch.uint8, 0x7F, 0xFF),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int32, torch.uint16, torch.bool],
)
def test_what_a_run_changed(dtype: torch.dtype) -> None:
    """Values that are others, by flat index; of NaN whatever its bits, it is one value."""
    before = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]]).to(dtype)
    after = before.clone()
    after[0, 2] = after[1, 1] = 1
    expected = {2: 1.0, 5: 1.0}
    if dtype.is_floating_point:
        kind, nan, other_nan = NANS[dtype]
        after.view(kind)[0, 0], before.view(kind)[0, 0] = nan, other_nan  # no change
        after[0, 1] = after[1, 3] = NAN
        expected |= {1: NAN, 7: NAN}
    indices, values = changed(before, after)
    assert indices.tolist() == sorted(expected)
    assert values.tolist() == pytest.approx([expected[at] for at in sorted(expected)], nan_ok=True)
    assert changed(before.t(), after.t())[0].numel() == len(expected)
    assert changed(before[:0], after[:0])[0].numel() == 0


def test_same_bits() -> None:
    """Whatever the dtypes, in one comparison: a NaN is itself, and -0 is not 0."""
    floats = [torch.tensor([0.0, NAN, 2.0], dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    others = [
        torch.tensor([True]),
        torch.tensor(7),
        torch.empty(0),
        torch.tensor([1 + 2j]),
        torch.arange(6).view(2, 3).t(),
    ]
    assert same_bits([], [])
    assert same_bits([*floats, *others], [t.clone() for t in (*floats, *others)])
    assert same_bits([others[3].conj()], [torch.tensor([1 - 2j])])
    for index, tensor in enumerate(floats):
        wrong = [t.clone() for t in floats]
        wrong[index][0] = -0.0
        assert not same_bits(floats, wrong), tensor.dtype
    assert not same_bits([torch.zeros(4)], [torch.zeros(2, 2)])
    assert not same_bits([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)])


def test_the_first_difference_counts_what_counts() -> None:
    have, want = torch.zeros(2, 3), torch.zeros(2, 3)
    have[0, 2], have[1, 0] = 1, 2
    assert first_difference("a", have, want).at == (0, 2)
    counted = torch.tensor([[False] * 3, [True] * 3])
    found = first_difference("a", have, want, counted=counted)
    assert (found.at, found.got, found.expected, found.count, found.total) == ((1, 0), 2.0, 0.0, 1, 3)
    assert first_difference("a", have[:, 1], want[:, 1]) is None
    assert str(first_difference("a", torch.tensor(1), torch.tensor(2))) == "a: got 1, expected 2 (1 of 1 differ)"


REGIONS = {
    "p": [1] * 8,
    "p[5:8]": [0] * 5 + [1] * 3,
    "p[2]": [0, 0, 1, 0, 0, 0, 0, 0],
    "p[1:4]": [0, 1, 0, 1, 0, 0, 0, 0],
}


@pytest.mark.parametrize("text", REGIONS)
def test_regions(text: str) -> None:
    assert region("p", torch.tensor(REGIONS[text]).bool()) == text


def test_regions_of_tables() -> None:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[2:4, 3:] = True
    assert region("t", mask) == "t[2:4, 3:6]"
    mask[2:4] = True
    assert region("t", mask) == "t[2:4]"


# -- host values


class Host:
    shared = 5

    def __init__(self) -> None:
        self.number, self.numbers, self.nested = 1, [1, 2], {"a": {"b": 2.0}}
        self.tensor = torch.ones(2)
        self.module = torch.nn.Linear(2, 2)
        self.me = self

    def method(self) -> int:
        return LIMIT + self.number


LIMIT = 11


def test_values_are_found_by_path() -> None:
    found = {slot.path: slot.value for slot in slots(Host(), "self")}
    assert found["self.number"] == 1
    assert found["self.numbers"] == [1, 2]
    assert found["self.nested['a']['b']"] == 2.0
    assert found["self.shared"] == 5
    assert found["LIMIT"] == 11
    assert "self.module.weight" in found
    assert isinstance(found["self.tensor"], torch.Tensor)


def test_changes_are_noticed_and_can_be_taken_back() -> None:
    host = Host()
    taken = HostValues.take(host, "self")
    assert taken.changed(host, "self", entries=True) == []
    host.number, host.numbers, host.tensor = 2, [1], torch.zeros(2)
    host.nested["a"]["b"], host.nested["c"] = 3.0, 4
    host.later = 1
    changes = {change.path: change for change in taken.changed(host, "self", entries=True)}
    assert set(changes) == {
        "self.number",
        "self.numbers",
        "self.tensor",
        "self.nested['a']['b']",
        "self.nested",
        "self.",
    }
    assert changes["self.tensor"].is_tensor
    assert changes["self.nested"].name == "self.nested['c']"
    with assigned(host, "self", {path: change.old for path, change in changes.items()}):
        assert (host.number, host.numbers, host.nested) == (1, [1, 2], {"a": {"b": 2.0}})
        assert torch.equal(host.tensor, torch.ones(2))
        assert not hasattr(host, "later")
    assert (host.number, host.numbers, host.later, host.nested["c"]) == (2, [1], 1, 4)


def test_closures_partials_and_caches() -> None:
    factor = 2

    @functools.lru_cache
    def cached(n: int) -> int:
        return n * factor

    def step(x: int) -> int:
        return cached(x)

    found = {slot.path for slot in slots(functools.partial(step, x=3), "step")}
    assert {"step['x']", "factor", "cached"} & found >= {"cached"}
    assert caches(step, "step") == []
    step(3)
    ((path, function),) = caches(step, "step")
    assert (path, function) == ("cached", cached)


def test_tensors_that_were_written_in_place() -> None:
    host = Host()
    assert written_tensors(host, "self", lambda: None) == {}
    assert set(written_tensors(host, "self", lambda: host.tensor.add_(1))) == {"self.tensor"}


# -- memory that nobody wrote


def test_memory_of_torch_empty() -> None:
    with UnwrittenMemory() as memory:
        a, b = torch.empty(3), torch.zeros(3)
        c = a.new_empty(2, 2)
    assert memory.count == 2
    memory.fill(0xFF)
    assert a.isnan().all()
    assert c.isnan().all()
    assert torch.equal(b, torch.zeros(3))
    with zeroed(torch.device("cpu")):
        assert torch.equal(torch.empty(1000), torch.zeros(1000))


def test_memory_of_torch_empty_is_filled_within_the_graph() -> None:
    """Where an intermediate was, which the graph wrote before: poison of the block would be gone by then."""
    memory = UnwrittenInGraph(torch.device("cpu"))
    x, recorder, key = torch.ones(4), OpTraceRecorder(), BatchDescriptor.decode(1)

    def step() -> torch.Tensor:
        with memory:
            unwritten = torch.empty(4)
            torch.empty(0)
            return unwritten + x

    with torch.inference_mode(), recorder.session():
        graph = recorder.capture(step, key, lambda: None)
        assert memory.count == 1
        for byte in (0, 0xFF, 0):
            memory.fill(byte)
            graph.launch()
            assert bool(graph.output.isnan().all()) is (byte == 0xFF)


SNAPSHOT = [
    {"device": 0, "address": 0x1000, "blocks": [
        {"size": 0x200, "state": "active_allocated"}, {"size": 0x300, "state": "inactive"},
        {"size": 0x100, "state": "active_pending_free"}, {"size": 0x40, "state": "inactive"},
    ]},
    {"device": 1, "address": 0x9000, "blocks": [{"size": 0x200, "state": "inactive"}]},
]  # fmt: skip


def test_inactive_blocks_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    device, calls = torch.device("cuda", 0), []
    status = [driver.CUresult.CUDA_SUCCESS]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: SNAPSHOT)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(driver, "cuMemsetD8Async", lambda *arguments: (calls.append(arguments), status)[1])
    assert inactive_blocks(device) == [(0x1200, 0x300), (0x1600, 0x40)]
    assert fill_inactive(device) == 0x340
    assert calls == ["wait", (0x1200, 0xFF, 0x300, 5), (0x1600, 0xFF, 0x40, 5), "wait"]
    status[0] = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ReplayError, match="pool: expected a block of 768 bytes at 0x1200 to take poison"):
        fill_inactive(device)


def _captured(verification: Verification) -> tuple[Any, ...]:
    """What flight_findings takes of a verification: its reference is made, and case 0 is captured."""
    eagerly, graphs = EagerChecks(verification), GraphChecks(verification)
    eagerly.prepare()
    eagerly.check()
    graph = graphs._capture(verification.cases["0"])
    order = list(verification.cases.values())
    return verification.runs, graph, order, verification.reference, verification.written


def test_launches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device nothing is late: a subject that is wrong when it is not waited for stands for it."""
    slept: list[int] = []
    waiting = [True]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waiting.__setitem__(0, not waiting[0]))
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(verify_flight, "one_seed", lambda device: torch.no_grad())

    class Staged(Copies):
        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(inputs if waiting[0] else rows(3))

    verification = Verification(Target(Staged(), None), {str(n): rows(n) for n in range(4)}, {}, None)
    with torch.inference_mode():
        arguments = _captured(verification)
        found = verify_flight.flight_findings(*arguments)
        again = verify_flight.flight_findings(*arguments, known={"0", "1", "2"})
        assert verify_flight.flight_findings(*arguments, known=verification.cases) == []
    assert again == [], "case 3 is right in flight too"
    assert not verification.findings
    assert [finding.blamed for finding in found] == [("x",), ("x",)]
    assert "the device is late" in found[0].text
    assert "keep a slot per launch in flight" in found[0].because
    assert "other streams are late" in found[1].text
    assert slept
    assert all(re.search(r"x.* does not hold this case's values", finding.because) for finding in found)


def test_launches_in_flight_draw_what_each_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with dropout is right however many launches queue behind each other."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=1))

    class Drops(Copies):
        def run(self) -> torch.Tensor:
            return torch.nn.functional.dropout(self.buffers["x"], 0.5, training=True)

    verification = Verification(Target(Drops(), None), {str(n): rows(n) for n in range(3)}, {}, None)
    with torch.inference_mode():
        arguments = _captured(verification)
        assert verify_flight.flight_findings(*arguments) == []


def test_a_replay_that_is_not_repeatable_is_blamed_on_tensors_that_moved() -> None:
    """A graph of the caller's that reads memory which somebody else got: each launch finds something else there."""

    class Freed(Copies):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(5, 1)
            self.launches = 0

        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(inputs)
            self.before, self.table = self.table, torch.ones(5, 1)  # alive until the next, as by an allocator

        def run(self) -> torch.Tensor:
            return silu(self.buffers["x"]) * self.table

        def capture(self, inputs: dict[str, Any]) -> Any:
            def launch() -> torch.Tensor:
                self.launches += 1
                return silu(self.buffers["x"]) * self.launches

            return launch

    report = verify(Freed(), rows)
    assert {finding.check for finding in report.findings} == {"determinism"}
    assert "self.table" in report.blamed
    assert "the graph has the old addresses of" in str(report)
