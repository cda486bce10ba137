"""verify itself: what it reports, what it restores, what it costs, and what it says of checks that did not run."""

from __future__ import annotations

import functools
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrt.kernels.errors import ConfigError, ReplayError
from graphrt.testing import verify_flight
from graphrt.testing.canary import GUARD_BYTES, Canaries
from graphrt.testing.poison import poisoned
from graphrt.testing.verify import verify
from graphrt.testing.verify_host import HostValues, assigned, caches, slots, written_tensors
from graphrt.testing.verify_memory import UnwrittenMemory, fill_inactive, inactive_blocks
from graphrt.testing.verify_report import differing, first_difference, region

NAN = math.nan
WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
COUNTS = (5, 2, 4, 5)


def rows(case: int, **more: Any) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(case)
    return {"x": torch.randn(COUNTS[case], 6, generator=rng), **more}


def silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x @ WEIGHT)


class Copies:
    """A subject that copies its inputs into buffers and clears the tails."""

    def __init__(self) -> None:
        self.buffers = {"x": torch.zeros(5, 6)}

    def refresh(self, inputs: dict[str, Any]) -> None:
        count = len(inputs["x"])
        self.buffers["x"][:count] = inputs["x"]
        self.buffers["x"][count:] = 0

    def run(self) -> Any:
        return silu(self.buffers["x"])


# -- plain functions


@pytest.mark.parametrize(
    "step",
    [
        silu,
        lambda x: (silu(x), x.sum(-1)),
        lambda x: {"a": silu(x), "b": x.argmax(-1)},
        lambda x: silu(x).to(torch.bfloat16),
        lambda x: torch.view_as_complex(silu(x).view(-1, 3, 2)),
        lambda x: silu(x) > 0,
        lambda x: x.mul_(2),
        torch.nn.Linear(6, 3),
        lambda x: x + torch.rand(x.shape[0], 1)[:1],  # the same random numbers in every run
    ],
    ids=["tensor", "tuple", "dict", "bf16", "complex", "bool", "in place", "module", "random"],
)
def test_a_right_step_is_silent(step: Any) -> None:
    if isinstance(step, torch.nn.Linear):
        module = step
        step = lambda x: module(x)  # noqa: E731
    report = verify(step, rows)
    assert report.ok, str(report)
    report.raise_if_any()
    assert str(report).startswith(f"verify {step.__qualname__}: ok; {report.replays} replays")


def test_what_it_costs_when_all_is_well() -> None:
    """Per case one exact and one padded run, and one more where the host may remember; replays are cheap."""
    report = verify(silu, rows)
    assert report.eager_runs <= 2 * len(COUNTS) + 3
    assert report.replays == 3 * 3 * len(COUNTS), "captured at three cases, every case over three histories"
    assert 0 < report.check_seconds <= report.seconds


def test_the_first_differing_element_is_named() -> None:
    def step(x: torch.Tensor, factor: float) -> torch.Tensor:
        heads = silu(x).view(-1, 2, 3)
        heads[:, 1, 2] *= factor
        return heads

    report = verify(step, lambda case: rows(case, factor=float(case + 1)), dims={"out": ("token", "head", "dim")})
    (finding,) = report.findings
    assert (finding.check, finding.case, finding.captured, finding.blamed) == ("graph", "1", "0", ("factor",))
    assert finding.difference.at == (0, 1, 2)
    assert finding.difference.got * 2 == pytest.approx(finding.difference.expected)
    assert "out[token 0, head 1, dim 2]: got" in str(report)
    assert (finding.difference.count, finding.difference.total) == (2, 12)
    with pytest.raises(AssertionError, match=r"factor was 1\.0 when case 0 was captured, and is 2\.0 now"):
        report.raise_if_any()


@pytest.mark.parametrize("value", [(1, 2, 3, 4), (True, False, True, False), ("a", "b", "a", "b")])
def test_numbers_flags_and_texts_are_probed(value: tuple[Any, ...]) -> None:
    def step(x: torch.Tensor, mode: Any) -> torch.Tensor:
        return x * (hash(mode) % 7 + 1) if isinstance(mode, str) else x * (1 + mode)

    report = verify(step, lambda case: rows(case, mode=value[case]))
    assert report.ok is (isinstance(value[0], str) and hash("a") % 7 == hash("b") % 7)
    assert report.blamed in ((), ("mode",))
    assert report.checked["scalars"] == "mode changed after capture"


def test_a_number_that_the_step_ignores_or_that_stays_is_fine() -> None:
    assert verify(lambda x, tag: silu(x), lambda case: rows(case, tag=case)).ok
    report = verify(lambda x, factor: silu(x) * factor, lambda case: rows(case, factor=3.0))
    assert report.ok
    assert "no number of make_inputs changes" in report.not_checked["scalars"]


def test_an_oracle_of_the_caller_and_tolerances() -> None:
    near = lambda x: silu(x) * (1 + 1e-3)  # noqa: E731
    assert not verify(silu, rows, eager=near).ok
    assert verify(silu, rows, eager=near, tolerance=1e-2).ok
    assert not verify(lambda x: x.double().softmax(-1).float(), rows, eager=lambda x: x.softmax(-1), tolerance=0.0).ok


def test_pads_may_be_said_to_hold_a_value() -> None:
    """The mean over all rows is right where pad rows hold 0 and the count is known."""

    def step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return x.sum(0) / count

    def inputs(case: int) -> dict[str, Any]:
        return rows(case, count=torch.tensor(float(COUNTS[case])))

    assert verify(step, inputs).blamed == ("x",)
    assert verify(step, inputs, pad={"x": 0}).ok
    assert not verify(step, inputs, pad={"x": 1}).ok


def test_rows_in_reverse_order() -> None:
    report = verify(silu, rows, permute=["x"])
    assert report.ok
    assert "0 reversed" in report.checked["graph"]
    ranked = verify(lambda x: x * torch.arange(len(x))[:, None], rows, permute=["x"])
    assert [finding.check for finding in ranked.findings] == ["permute"]


def test_what_a_function_keeps_is_found() -> None:
    kept = {"sum": torch.zeros(6)}

    def step(x: torch.Tensor) -> torch.Tensor:
        kept["sum"] += x[0]
        return x + kept["sum"]

    report = verify(step, lambda case: {"x": torch.full((3, 6), case + 1.0)})
    assert report.blamed == ("kept['sum']",)
    assert "name it in state" in str(report)


ARGUMENTS = {
    "cases": ({"cases": 0}, "cases: expected at least one"),
    "captures": ({"captures": [9]}, r"captures: expected some of the cases \['0', '1', '2', '3'\]"),
    "pad": ({"pad": {"y": 0}}, "pad: expected names of inputs"),
    "permute": ({"permute": ["y"]}, "permute: expected names of inputs"),
    "names": ({"make_inputs": lambda case: {"y": torch.ones(2)}}, "make_inputs: expected the arguments of silu"),
    "dtype": (
        {"make_inputs": lambda case: {"x": torch.ones(2, 6, dtype=(torch.float32, torch.int64)[case % 2])}},
        "x: expected one dtype",
    ),
    "step": ({"step": 3}, "step: expected a function, or an object with buffers, refresh and run, got one without"),
    "output": ({"step": lambda x: [1]}, ""),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit(name: str) -> None:
    options, text = ARGUMENTS[name]
    options = dict(options)
    step, make_inputs = options.pop("step", silu), options.pop("make_inputs", rows)
    if not text:
        report = verify(step, make_inputs, **options)
        assert "expected a tensor, got int" in str(report)
        return
    with pytest.raises(ConfigError, match=text):
        verify(step, make_inputs, **options)


def test_names_that_differ_between_cases() -> None:
    with pytest.raises(ConfigError, match="expected the names"):
        verify(lambda **inputs: inputs["x"], lambda case: {"x": torch.ones(2), **({"y": 1} if case else {})})


# -- objects


def test_buffers_and_state_are_as_before_afterwards() -> None:
    class Counts(Copies):
        def __init__(self) -> None:
            super().__init__()
            self.buffers["x"].fill_(7)
            self.total = torch.full((6,), 3.0)
            self.state = {"total": self.total}

        def run(self) -> torch.Tensor:
            self.total += self.buffers["x"].sum(0)
            return self.total + 0

    subject = Counts()
    report = verify(subject, rows)
    assert report.ok, str(report)
    assert report.checked["state"] == "total after each run"
    assert torch.equal(subject.total, torch.full((6,), 3.0))
    assert torch.equal(subject.buffers["x"], torch.full((5, 6), 7.0))


def test_a_graph_that_leaves_the_state_alone_is_noticed() -> None:
    class Forgets(Copies):
        first = True

        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(6)
            self.state = {"total": self.total}

        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(inputs)
            self.first = len(inputs["x"]) == 5

        def run(self) -> torch.Tensor:
            if self.first:
                self.total += self.buffers["x"].sum(0)
            return silu(self.buffers["x"])

    report = verify(Forgets(), rows)
    assert {f.difference.output for f in report.findings} == {"state total"}
    assert report.blamed == ("self.first",)


def test_an_old_result_does_not_pass_for_a_new_one() -> None:
    """The step writes its result in one case only: the graph's output holds poison in the others."""

    class Sometimes(Copies):
        def capture(self, inputs: dict[str, Any]) -> Any:
            return lambda: self.result

        def run(self) -> torch.Tensor:
            self.result = silu(self.buffers["x"])
            return self.result

    report = verify(Sometimes(), rows)
    assert not report.ok
    assert "the subject's own capture" in report.checked["graph"]


def test_a_buffer_that_nobody_named_is_found() -> None:
    class Unnamed(Copies):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(5, 1)

        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(inputs)
            self.scale[: len(inputs["x"])] = inputs["x"].sum(-1, keepdim=True)

        def run(self) -> torch.Tensor:
            return silu(self.buffers["x"]) * self.scale.sum()

    report = verify(Unnamed(), rows)
    assert report.blamed == ("self.scale",)
    assert "self.scale" in report.checked["unnamed"]
    assert "self.scale[2:5] holds case" in str(report)


def test_what_was_not_possible_is_said() -> None:
    report = verify(Copies(), rows)
    assert report.ok
    assert set(report.not_checked) >= {"padding", "state", "unowned", "memory pool", "in flight", "canary", "permute"}
    assert not set(report.not_checked) & set(report.checked)
    assert all(f"  {name}: {why}" in str(report) for name, why in report.not_checked.items())


def test_errors_of_the_callers_code_are_findings() -> None:
    class Broken(Copies):
        where = ""

        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(inputs)
            if self.where == "refresh" and len(inputs["x"]) == 2:
                raise ValueError("two rows")

        def run(self) -> torch.Tensor:
            if self.where == "run":
                raise ValueError("no run")
            return silu(self.buffers["x"])

        def eager(self, inputs: dict[str, Any]) -> torch.Tensor:
            if self.where == "oracle":
                raise ValueError("no oracle")
            return silu(inputs["x"])

    for where, check, text in (("refresh", "refresh", "two rows"), ("run", "eager", "no run"),
                               ("oracle", "eager", "no oracle")):  # fmt: skip
        subject = Broken()
        subject.where = where
        report = verify(subject, rows)
        assert report.findings[0].check == check
        assert text in report.findings[0].text


def test_a_step_that_cannot_be_captured() -> None:
    report = verify(lambda x: x * int(x[0, 0] > -9), rows)
    assert {finding.check for finding in report.findings} == {"capture"}
    assert "host read" in str(report)


def test_two_graphs_of_the_same_thing_are_the_same_finding() -> None:
    report = verify(lambda x, factor: x * factor, lambda case: rows(case, factor=case))
    (finding,) = report.findings
    assert finding.repeats > 5
    assert f"the same in {finding.repeats} more replays" in str(report)


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
    with UnwrittenMemory(zero=True):
        assert torch.equal(torch.empty(1000), torch.zeros(1000))


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
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SNAPSHOT)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(driver, "cuMemsetD8Async", lambda *arguments: (calls.append(arguments), status)[1])
    assert inactive_blocks(device) == [(0x1200, 0x300), (0x1600, 0x40)]
    assert fill_inactive(device) == 0x340
    assert calls == ["wait", (0x1200, 0xFF, 0x300, 5), (0x1600, 0xFF, 0x40, 5), "wait"]
    status[0] = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ReplayError, match="pool: expected a block of 768 bytes at 0x1200 to take poison"):
        fill_inactive(device)


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

    subject = Staged()
    from graphrt.testing.verify_context import Verification
    from graphrt.testing.verify_eager import EagerChecks
    from graphrt.testing.verify_graph import GraphChecks
    from graphrt.testing.verify_subject import Target

    verification = Verification(Target(subject, None), {str(n): rows(n) for n in range(4)}, {}, None)
    with torch.inference_mode():
        eagerly, graphs = EagerChecks(verification), GraphChecks(verification)
        eagerly.prepare()
        eagerly.check(permuted=False)
        graph = graphs._capture(verification.cases["0"])
        order = list(verification.cases.values())
        found = verify_flight.flight_findings(
            verification.runs, graph, order, verification.reference, verification.written
        )
    assert not verification.findings
    assert [finding.blamed for finding in found] == [("x",), ("x",)]
    assert "the device is late" in found[0].text
    assert "keep a slot per launch in flight" in found[0].because
    assert "other streams are late" in found[1].text
    assert slept
    assert all(re.search(r"x.* does not hold this case's values", finding.because) for finding in found)


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.alone
def test_it_is_quick_on_a_gpu() -> None:
    """A step of the shape of a 1B model over 8 mixes: at most 2 s beside the captures."""
    device, width, layers = torch.device("cuda", 0), 2048, 16
    weights = [torch.randn(width, 4 * width, device=device, dtype=torch.bfloat16) / 64 for _ in range(layers)]
    backs = [torch.randn(4 * width, width, device=device, dtype=torch.bfloat16) / 64 for _ in range(layers)]
    head = torch.randn(width, 128_000, device=device, dtype=torch.bfloat16) / 64

    def step(x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(weights, backs, strict=True):
            x = x + torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (width,)) @ up) @ down
        return x @ head

    def inputs(case: int) -> dict[str, Any]:
        return {"x": torch.randn(32, width, device=device, dtype=torch.bfloat16)}

    verify(step, inputs, cases=2)  # loads kernels
    report = verify(step, inputs, cases=8, captures=[0])
    assert report.ok, str(report)
    assert report.check_seconds <= 2, str(report)


@pytest.mark.gpu
def test_a_plain_step_on_a_gpu() -> None:
    weight = WEIGHT.cuda()

    def on_gpu(case: int, **more: Any) -> dict[str, Any]:
        return {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in rows(case, **more).items()}

    report = verify(lambda x: torch.nn.functional.silu(x @ weight), on_gpu)
    assert report.ok, str(report)
    assert {"memory pool", "in flight"} <= set(report.checked)
    assert verify(lambda x, factor: x * factor, lambda case: on_gpu(case, factor=case)).blamed == ("factor",)
