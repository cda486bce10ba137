"""verify: what it finds and reports, what it restores, what it costs, and what it lists as not checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.testing.verify import verify
from tests.support.verify_examples import COUNTS, WEIGHT, Copies, rows, silu

COMPLEX = torch.randn(6, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(4))


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex64) @ COMPLEX


RIGHT: dict[str, Callable[..., Any]] = {
    "tensor": silu,
    "tuple": lambda x: (silu(x), x.sum(-1)),
    "dict": lambda x: {"a": silu(x), "b": x.argmax(-1)},
    "nested": lambda x: (x, None, {"y": (2 * x, [3 * x])}),
    "bf16": lambda x: silu(x).to(torch.bfloat16),
    "complex": lambda x: spectrum(x),
    "conjugate": lambda x: torch.complex(x, silu(x)).conj(),
    "bool": lambda x: silu(x) > 0,
    "in place": lambda x: x.mul_(2),
    "random": lambda x: x + torch.rand(x.shape[0], 1)[:1],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_step_has_no_findings(name: str) -> None:
    report = verify(RIGHT[name], rows)
    assert report.ok, str(report)
    report.raise_if_any()
    assert str(report).startswith(f"verify {RIGHT[name].__qualname__}: ok; {report.replays} replays")


@pytest.mark.parametrize("module", [torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(6)], ids=["linear", "batch norm"])
def test_a_module_is_verified_and_its_statistics_are_restored(module: torch.nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    report = verify(module, lambda case: {"input": rows(case)["x"]})
    assert report.ok == isinstance(module, torch.nn.Linear), "batch statistics include pad rows"
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_module_with_fused_kernels_has_no_findings() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    report = verify(layer, lambda n: {"src": torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(n))})
    assert report.ok, str(report)


def exact(x: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.complex128) @ COMPLEX.to(torch.complex128)).to(torch.complex64)


WRONG_COMPLEX: dict[str, Callable[..., Any]] = {
    "imaginary part": lambda x: spectrum(x) + 0.01j,
    "pad rows": lambda x: spectrum(x) * x.abs().sum(),
}


@pytest.mark.parametrize("name", WRONG_COMPLEX)
def test_complex_results_are_compared_with_a_tolerance(name: str) -> None:
    report = verify(spectrum, rows, eager=exact)
    assert report.ok, str(report)
    assert not verify(spectrum, rows, eager=exact, tolerance=0.0).ok
    finding = verify(WRONG_COMPLEX[name], rows, eager=exact).findings[0]
    assert finding.check == "padding"
    assert isinstance(finding.difference.got, complex)


def test_a_correct_step_costs_three_eager_runs_per_case() -> None:
    """One run learns what the step writes, one is exact and one is padded. Two are repeated."""
    report = verify(silu, rows)
    assert report.eager_runs <= 3 * len(COUNTS) + 2
    assert report.replays == 3 * 3 * len(COUNTS), "three captures, every case after three fills"
    assert 0 < report.check_seconds <= report.seconds


def test_the_first_differing_element_is_named() -> None:
    def step(x: torch.Tensor, factor: float) -> torch.Tensor:
        heads = silu(x).view(-1, 2, 3)
        heads[:, 1, 2] *= factor
        return heads

    report = verify(step, lambda case: rows(case, factor=float(case + 1)))
    (finding,) = report.findings
    assert (finding.check, finding.case, finding.captured, finding.blamed) == ("graph", "1", "0", ("factor",))
    assert finding.difference.at == (0, 1, 2)
    assert finding.difference.got * 2 == pytest.approx(finding.difference.expected)
    assert (finding.difference.count, finding.difference.total) == (2, 12)
    assert "out[0, 1, 2]: got" in str(report)
    assert finding.repeats > 5
    assert f"the same in {finding.repeats} more replays" in str(report)
    with pytest.raises(AssertionError, match=r"factor was 1\.0 when case 0 was captured, and is 2\.0 now"):
        report.raise_if_any()


@pytest.mark.parametrize("value", [(1, 2, 3, 4), (True, False, True, False), ("a", "b", "a", "b")])
def test_numbers_flags_and_strings_that_change_are_blamed(value: tuple[Any, ...]) -> None:
    def step(x: torch.Tensor, mode: Any) -> torch.Tensor:
        return x * ord(mode) if isinstance(mode, str) else x * (1 + mode)

    report = verify(step, lambda case: rows(case, mode=value[case]))
    assert report.blamed == ("mode",)
    assert report.checked["scalars"] == "mode changed after capture"


def test_inputs_that_are_equal_in_every_case_are_listed_as_not_checked() -> None:
    report = verify(lambda x, w: x * w, lambda case: rows(case, w=WEIGHT[0]))
    assert report.ok
    assert report.not_checked["inputs"].endswith("froze them: w")
    assert "inputs" not in verify(silu, rows).not_checked


def test_an_oracle_and_tolerances() -> None:
    near = lambda x: silu(x) * (1 + 1e-3)  # noqa: E731
    assert not verify(silu, rows, eager=near).ok
    assert verify(silu, rows, eager=near, tolerance=1e-2).ok
    assert not verify(lambda x: x.double().softmax(-1).float(), rows, eager=lambda x: x.softmax(-1), tolerance=0.0).ok


def test_pad_values() -> None:
    """The mean over all rows is right only if pad rows hold 0."""

    def step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return x.sum(0) / count

    def inputs(case: int) -> dict[str, Any]:
        return rows(case, count=torch.tensor(float(COUNTS[case])))

    assert verify(step, inputs).blamed == ("x",)
    assert verify(step, inputs, pad={"x": 0}).ok
    assert verify(step, inputs, pad={"x": 1}).blamed == ("x",)


def test_a_write_beyond_a_buffer_is_blamed() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.as_strided(x, (x.numel() + 1,), (1,), x.storage_offset())[-1:].fill_(1)
        return silu(x)

    report = verify(step, lambda case: {"x": torch.ones(4, 6)}, eager=silu)
    assert {finding.check for finding in report.findings} == {"canary"}
    assert report.blamed == ("x",)


def test_a_step_that_reads_a_value_on_the_host_cannot_be_captured() -> None:
    (finding,) = verify(lambda x: x * int(x[0, 0] > -9), rows).findings
    assert finding.check == "capture"
    assert "reads a tensor on the host during capture" in finding.text
    assert "test_verify.py" in finding.text
    assert "int(x[0, 0] > -9)" in finding.text


# -- subjects


class Total(Copies):
    """Adds its rows to a sum in the state, in every case or only in cases of five rows."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.buffers["x"].fill_(7)
        self.always, self.first = always, True
        self.total = torch.full((6,), 3.0)
        self.state = {"total": self.total}

    def refresh(self, inputs: dict[str, Any]) -> None:
        super().refresh(inputs)
        self.first = len(inputs["x"]) == 5

    def run(self) -> torch.Tensor:
        if self.always or self.first:
            self.total += self.buffers["x"].sum(0)
        return silu(self.buffers["x"])


def test_buffers_state_and_attributes_are_restored() -> None:
    subject = Total(always=True)
    subject.first = False
    report = verify(subject, rows)
    assert report.ok, str(report)
    assert report.checked["state"] == "total after each run"
    assert torch.equal(subject.total, torch.full((6,), 3.0))
    assert torch.equal(subject.buffers["x"], torch.full((5, 6), 7.0))
    assert subject.first is False


def test_a_graph_that_does_not_update_the_state_is_found() -> None:
    report = verify(Total(always=False), rows)
    assert {finding.difference.output for finding in report.findings} == {"state total"}
    assert report.blamed == ("self.first",)


def test_an_old_result_is_not_taken_for_a_new_one() -> None:
    class Returns(Copies):
        """Its capture returns the result of the last eager run."""

        def capture(self, inputs: dict[str, Any]) -> Any:
            return lambda: self.result

        def run(self) -> torch.Tensor:
            self.result = silu(self.buffers["x"])
            return self.result

    report = verify(Returns(), rows)
    assert not report.ok
    assert "the subject's own capture" in report.checked["graph"]


def test_a_buffer_without_a_name_is_found() -> None:
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


class Results(Copies):
    """Returns None: its results are in a buffer."""

    rows = 5

    def __init__(self, injected: bool) -> None:
        super().__init__()
        self.injected = injected
        self.buffers["out"] = torch.zeros(5, 6)

    def refresh(self, inputs: dict[str, Any]) -> None:
        super().refresh(inputs)
        self.rows = len(inputs["x"]) if self.injected else 5

    def run(self) -> None:
        self.buffers["out"].copy_(silu(self.buffers["x"]))
        self.buffers["out"][self.rows :] = 0


def test_a_step_that_returns_none_has_its_results_in_buffers() -> None:
    assert verify(Results(False), rows).ok
    report = verify(Results(True), rows)
    assert report.blamed[0] == "self.rows", str(report)
    assert report.findings[0].difference.output == "out"


def test_checks_that_did_not_run_are_listed() -> None:
    report = verify(Copies(), rows)
    assert report.ok
    assert set(report.not_checked) >= {"padding", "state", "unowned", "memory pool", "in flight", "canary"}
    assert not set(report.not_checked) & set(report.checked)
    assert all(f"  {name}: {why}" in str(report) for name, why in report.not_checked.items())


@pytest.mark.parametrize(("where", "check"), [("refresh", "refresh"), ("run", "eager"), ("eager", "eager")])
def test_exceptions_of_the_callers_code_are_findings(where: str, check: str) -> None:
    subject = Copies()
    setattr(subject, where, lambda *inputs: int(f"no {where}"))
    finding = verify(subject, rows).findings[0]
    assert finding.check == check
    assert f"no {where}" in finding.text
    assert "test_verify.py" in finding.text


def set_memory(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer.set_(torch.cat([x, torch.zeros(5 - len(x), 6)]))


def set_shape(buffer: torch.Tensor, x: torch.Tensor) -> None:
    buffer.resize_(len(x), 6).copy_(x)


@pytest.mark.parametrize("change", [set_memory, set_shape])
def test_a_replaced_buffer_is_blamed(change: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    subject = Copies()
    subject.refresh = lambda inputs: change(subject.buffers["x"], inputs["x"])  # type: ignore[method-assign]
    (finding,) = verify(subject, rows).findings
    assert finding.check == "replaced"
    assert finding.blamed == ("x",)
    assert "use copy_()" in str(finding)


# -- what an oracle gives


@pytest.mark.parametrize(("step", "padding"), [(lambda x: (x * 2)[:2], True), (lambda x: (x * 2)[:0], False)])
def test_rows_that_the_oracle_omits_are_listed_as_not_checked(step: Any, padding: bool) -> None:
    report = verify(lambda x: torch.cat([x[:2] * 2, x[2:] * 99]), lambda case: {"x": torch.ones(3)}, eager=step)
    assert report.ok
    assert ("padding" in report.checked) is padding
    assert ("padding" in report.not_checked) is not padding
    if padding:
        assert report.not_checked["oracle"].startswith("it returns 2 of 3 rows of out in case ")


def test_an_oracle_may_update_the_state_alone() -> None:
    sums = torch.ones(6)

    def step(x: torch.Tensor) -> torch.Tensor:
        sums.add_(x.sum(0))
        return sums * 2

    def oracle(x: torch.Tensor) -> None:
        sums.add_(x.sum(0))

    report = verify(step, rows, eager=oracle, pad={"x": 0}, state={"sums": sums})
    assert report.ok, report
    assert "does not return out" in report.not_checked["outputs"]
    wrong = verify(step, rows, eager=lambda x: nothing(sums.mul_(1.5)), pad={"x": 0}, state={"sums": sums}).findings[0]
    assert (wrong.check, wrong.difference.output) == ("padding", "state sums")


def nothing(*args: Any) -> None:
    """Return nothing, whatever was computed."""


def test_an_oracle_that_raises_or_uses_other_names_is_a_finding() -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 2:
            raise ValueError("two rows")
        return silu(x)

    report = verify(silu, rows, eager=raises)
    (finding,) = report.findings
    assert (finding.check, finding.case, "two rows" in finding.text) == ("eager", "1", True)
    assert "exact results of 3 cases" in report.checked["padding"]
    (finding,) = verify(lambda x: {"a": x * 2}, rows, eager=lambda x: {"b": x * 2}).findings
    assert finding.text == "the oracle returns b"
    assert "the step returns a; use the same names in both" in str(finding)


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.alone
def test_verify_takes_at_most_two_seconds_besides_captures_on_a_gpu() -> None:
    """A step of the shape of a 1B model, over 8 cases."""
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
    weight, phases = WEIGHT.cuda(), COMPLEX.cuda()

    def on_gpu(case: int, **more: Any) -> dict[str, Any]:
        return {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in rows(case, **more).items()}

    report = verify(lambda x: torch.nn.functional.silu(x @ weight), on_gpu)
    assert report.ok, str(report)
    assert {"memory pool", "in flight"} <= set(report.checked)
    assert verify(lambda x, factor: x * factor, lambda case: on_gpu(case, factor=case)).blamed == ("factor",)
    assert verify(lambda x: x.to(torch.complex64) @ phases, on_gpu).ok
