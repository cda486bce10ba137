"""verify itself: what it reports, what it restores, what it costs, and what it says of checks that did not run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from graphrt.testing.verify import verify
from tests.verify_examples import COUNTS, WEIGHT, Copies, rows, silu

NAN = math.nan


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
    """Per case one run that shows what it writes, an exact and a padded one; and two repetitions."""
    report = verify(silu, rows)
    assert report.eager_runs <= 3 * len(COUNTS) + 2
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
        return x * ord(mode) if isinstance(mode, str) else x * (1 + mode)

    report = verify(step, lambda case: rows(case, mode=value[case]))
    assert report.blamed == ("mode",)
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


def test_a_step_that_returns_nothing_has_its_results_in_buffers() -> None:
    class Writes(Copies):
        rows = 5

        def __init__(self, planted: bool) -> None:
            super().__init__()
            self.planted = planted
            self.buffers["out"] = torch.zeros(5, 6)

        def refresh(self, inputs: dict[str, Any]) -> None:
            super().refresh(inputs)
            self.rows = len(inputs["x"]) if self.planted else 5

        def run(self) -> None:
            self.buffers["out"].copy_(silu(self.buffers["x"]))
            self.buffers["out"][self.rows :] = 0

    assert verify(Writes(False), rows).ok
    report = verify(Writes(True), rows)
    assert report.blamed[0] == "self.rows", str(report)
    assert report.findings[0].difference.output == "out"


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
