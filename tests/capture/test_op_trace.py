"""The op trace behaves as a CUDA graph: it freezes scalars and addresses, and rejects host reads."""

from __future__ import annotations

import pytest
import torch

from graphrt.capture.graph import GraphReport
from graphrt.capture.op_trace import OpTraceRecorder
from graphrt.kernels import library
from graphrt.kernels.errors import CaptureError
from graphrt.kernels.ops.norm import add_rms_norm
from tests.support.capture_rig import KEY, op_trace_of


def test_scalars_and_addresses_are_frozen_and_values_in_tensors_are_not() -> None:
    state, factor, calls = {"x": torch.ones(1), "scale": 2.0}, torch.tensor(3.0), []
    captured = state["x"]

    def step() -> torch.Tensor:
        calls.append(1)
        return state["x"] * state["scale"] * factor + 1

    op_trace = op_trace_of(step)
    state.update(x=torch.full((1,), 10.0), scale=5.0)
    for x, by in ((1.0, 3.0), (-4.0, 7.0), (1.0, 3.0)):
        captured.fill_(x)
        factor.fill_(by)
        op_trace.launch()
        assert op_trace.output.item() == x * 2.0 * by + 1
    assert calls == [1], "a launch does not run Python"


def test_later_changes_of_data_and_shape_are_ignored() -> None:
    x = torch.ones(1, 4)
    captured = x.view(4)
    op_trace = op_trace_of(lambda: x.sum(1))
    x.squeeze_(0)
    x.data = torch.full((2, 3), 10.0)
    captured.fill_(3.0)
    op_trace.launch()
    assert op_trace.output.tolist() == [12.0], "the memory and the shape of the capture"


def test_in_place_and_out_variants_write_the_same_memory_again() -> None:
    x, counter, out = torch.ones(3), torch.zeros(1), torch.zeros(3)

    def step() -> torch.Tensor:
        counter.add_(1)
        torch.mul(x, 3, out=out)
        return out.clone()

    op_trace = op_trace_of(step)
    assert counter.item() == 1, "a capture on a CPU runs the step once"
    x.fill_(2)
    op_trace.launch()
    op_trace.launch()
    assert counter.item() == 3
    assert out.tolist() == op_trace.output.tolist() == [6.0, 6.0, 6.0]


def test_empty_memory_keeps_its_last_contents() -> None:
    x = torch.ones(2)

    def step() -> torch.Tensor:
        out = torch.empty(2)
        out[:1] = x[:1]
        return out

    op_trace = op_trace_of(step)
    op_trace.output.fill_(7.0)
    op_trace.launch()
    assert op_trace.output.tolist() == [1.0, 7.0], "a graph does not initialize empty() memory either"


READS = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "int": lambda x: int(x),
    "float": lambda x: float(x),
    "bool": lambda x: bool(x > 0),
    "mask-index": lambda x: x.expand(3)[x.expand(3) > 0],
    "nonzero": lambda x: torch.nonzero(x),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", READS)
def test_host_reads_raise_and_the_recorder_stays_usable(name: str) -> None:
    """Also after an op that failed."""
    x, recorder = torch.ones(()), OpTraceRecorder()

    def step() -> torch.Tensor:
        with pytest.raises(RuntimeError):
            torch.add(torch.ones(2), torch.ones(3))
        y = x + 1
        READS[name](y)
        return y

    with pytest.raises(CaptureError, match=r"decode\[1\].*on the host"):
        recorder.capture(step, KEY, lambda: None)
    op_trace = recorder.capture(lambda: x + 1, KEY, lambda: None)
    op_trace.launch()
    assert op_trace.output.item() == 2.0


SYMMETRIC = torch.eye(4) * 2
MASK, COUNTS = torch.tensor([True, False, True, False]), torch.tensor([1, 0, 2, 1])
SYNCHRONIZING = {
    "repeat_interleave": lambda x: torch.repeat_interleave(x, COUNTS, 0),
    "repeat_interleave ": lambda x: torch.repeat_interleave(COUNTS),
    "index_put_": lambda x: x.index_put_((MASK,), torch.tensor(1.0)),
    "index_put_ ": lambda x: x.__setitem__(MASK, x[:2]),
    "index_put_  ": lambda x: x.__setitem__(MASK, x.sum()),  # a number on the device; only a Python number is a fill
    "index_put_   ": lambda x: x.__setitem__((slice(None), MASK.to(torch.uint8)), x[:, :2]),
    "index_put_    ": lambda x: (x.__setitem__(MASK, 0.0), x.index_put_((MASK,), x[:2])),  # after a fill
    "index_put": lambda x: x.index_put((MASK,), x[:2]),
    "index.Tensor": lambda x: x[:, MASK],
    "index.Tensor ": lambda x: x[MASK.to(torch.uint8)],
    "masked_select": lambda x: x.masked_select(MASK),
    "where": lambda x: torch.where(MASK),
    "combinations": lambda x: torch.combinations(x[0]),
    "linalg_inv": lambda x: torch.linalg.inv(x),
    "inverse": lambda x: x.inverse(),
    "linalg_cholesky": lambda x: torch.linalg.cholesky(x),
    "linalg_cholesky_ex": lambda x: torch.linalg.cholesky_ex(x, check_errors=True),
    "linalg_solve": lambda x: torch.linalg.solve(x, x),
    "linalg_eigh": lambda x: torch.linalg.eigh(x),
    "linalg_svd": lambda x: torch.linalg.svd(x),
    "linalg_pinv": lambda x: torch.linalg.pinv(x),
    "linalg_lu_factor": lambda x: torch.linalg.lu_factor(x),
    "linalg_matrix_power": lambda x: torch.linalg.matrix_power(x, -1),
    "linalg_norm": lambda x: torch.linalg.norm(x, 2),
    "linalg_matrix_norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "one_hot": lambda x: torch.nn.functional.one_hot(COUNTS),  # the largest value gives the number of classes
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal ": lambda x: torch.normal(0.0, x.abs()),
    "histc": lambda x: torch.histc(x),
    "linspace": lambda x: torch.linspace(x[0, 0], x[0, 1], 4),
    "logspace": lambda x: torch.logspace(0.0, x[0, 1], 4),
}


@pytest.mark.parametrize("name", SYNCHRONIZING)
def test_operations_that_synchronize_on_cuda_raise_with_their_name(name) -> None:
    x = SYMMETRIC.clone()
    with pytest.raises(
        CaptureError,
        match=rf"decode\[1\]: aten.{name.strip()}\b.*reads values on the host or has a data-dependent shape",
    ):
        op_trace_of(lambda: (SYNCHRONIZING[name](x), x + 1)[1])


def _filled(x: torch.Tensor) -> torch.Tensor:
    x[MASK] = 7.0
    x[:, MASK] = 3
    return x + 0


CAPTURED = {
    "views": lambda x: (x.t()[1:].reshape(-1, 2) + 0)[:, 0],
    "a linear layer on a vector, with its squeeze in place": lambda x: torch.nn.functional.linear(x[0], SYMMETRIC),
    "a number by a mask": _filled,
    "output_size": lambda x: torch.repeat_interleave(x, COUNTS, 0, output_size=4),
    "output_size ": lambda x: torch.repeat_interleave(COUNTS, output_size=4),
    "repeats as a Python number": lambda x: torch.repeat_interleave(x, 2, 0),
    "rows": lambda x: x.index_put_((COUNTS,), x[0] + 1),
    "index": lambda x: x[COUNTS] * 1,
    "all results": lambda x: sum(x.max(-1)),
    "masked_fill": lambda x: x.masked_fill_(MASK, 0.0),
    "masked_scatter": lambda x: x.masked_scatter_(MASK, x + 1),
    "where": lambda x: torch.where(MASK, x, 0.0),
    "inv_ex": lambda x: torch.linalg.inv_ex(x)[0],
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x)[0],
    "norm": lambda x: torch.linalg.norm(x, 2, dim=-1),
    "norm of a vector": lambda x: torch.linalg.norm(x[0], 2),
    "norm of all": lambda x: torch.linalg.norm(x),
    "power": lambda x: torch.linalg.matrix_power(x, 2),
    "given number of classes": lambda x: torch.nn.functional.one_hot(COUNTS, 4) * x[0],
    "given range": lambda x: torch.histc(x, 4, 0.0, 9.0),
    "linspace of numbers": lambda x: torch.linspace(0.0, 1.0, 4) * x,
}


@pytest.mark.parametrize("name", CAPTURED)
def test_related_operations_that_do_not_synchronize_are_captured(name) -> None:
    x, ran = SYMMETRIC.clone(), []
    op_trace = op_trace_of(lambda: (ran.append(1), CAPTURED[name](x))[1])
    for value in (5.0, 9.0):
        x.copy_(torch.eye(4) * value)
        expected = CAPTURED[name](x.clone())
        op_trace.launch()
        torch.testing.assert_close(op_trace.output, expected)
    assert ran == [1]


def test_prepare_runs_before_the_step_and_its_errors_are_raised_unchanged() -> None:
    order = []

    def step() -> torch.Tensor:
        order.append("step")
        raise ZeroDivisionError("from the model")

    with pytest.raises(ZeroDivisionError, match="from the model"):
        OpTraceRecorder().capture(step, KEY, lambda: order.append("prepare"))
    assert order == ["prepare", "step"]


def test_an_op_that_writes_an_argument_and_returns_new_memory() -> None:
    residual, x, weight = torch.zeros(1, 4), torch.ones(1, 4), torch.full((4,), 3.0)
    op_trace = op_trace_of(lambda: add_rms_norm(residual, x, weight, 0.0) + 1)
    residual.zero_()
    x.copy_(torch.tensor([[2.0, -2.0, 2.0, -2.0]]))
    op_trace.launch()
    assert residual.tolist() == x.tolist()
    assert op_trace.output.tolist() == [[4.0, -2.0, 4.0, -2.0]]


def test_a_launch_interprets_the_kernels_that_the_capture_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    op = library.define_op(
        "op_trace_test_probe(Tensor x, Tensor(a!) out) -> ()",
        triton_impl=lambda x, out: ran.append("triton"),
        reference=lambda x, out: ran.append("reference"),
    )
    monkeypatch.setattr(library, "INTERPRETER_AVAILABLE", True)
    x, out = torch.ones(1), torch.ones(1)

    def step() -> torch.Tensor:
        with library.interpreted():
            op(x, out)
        op(x, out)
        return out

    op_trace = op_trace_of(step)
    op_trace.launch()
    assert ran == ["triton", "reference"] * 2


def test_a_report_has_the_number_of_ops_and_the_memory_of_their_results() -> None:
    x = torch.ones(4)
    op_trace = op_trace_of(lambda: (x + 1).mul_(2) + x)
    assert (op_trace.report.nodes, op_trace.report.pool_bytes, op_trace.report.driver_bytes) == (3, 2 * 16, 0)
    assert op_trace.report.descriptor == KEY
    assert 0 < op_trace.report.seconds < 60
    assert GraphReport(KEY, 1.0, 30, 12, 5).nbytes == 42
    assert op_trace_of(lambda: x[1:]).report.nodes == 0, "a view allocates nothing"


def test_a_closed_op_trace_runs_nothing() -> None:
    """Gradients are off in capture and launch."""
    x, counter = torch.nn.Parameter(torch.ones(2)), torch.zeros(1)

    def step() -> torch.Tensor:
        counter.add_(1)
        return x + counter

    op_trace = op_trace_of(step)
    assert not op_trace.output.requires_grad
    x.data.fill_(3)
    op_trace.launch()
    assert op_trace.output.tolist() == [5.0, 5.0]
    assert counter.item() == 2
    op_trace.close()
    op_trace.launch()
    assert counter.item() == 2
    assert op_trace.output.numel() == 0
