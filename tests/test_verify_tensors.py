"""Tensors without memory of their own within reach of a step: they are left aside by name, and nothing fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt.kernels.errors import ConfigError
from graphrt.testing.capture_watch import CaptureWatch
from graphrt.testing.verify import verify


class Wrapper(torch.Tensor):
    """A subclass around another tensor, as of sharded or quantized weights."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))


def freed() -> torch.Tensor:
    tensor = torch.randn(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def partly_freed() -> torch.Tensor:
    tensor = torch.ones(8, 4)
    view = tensor[4:]
    tensor.untyped_storage().resize_(16)
    return view


def quantized() -> torch.Tensor:
    return torch.quantize_per_channel(
        torch.randn(4, 4), torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64), 0, torch.qint8
    )


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "meta": lambda: torch.empty(4, device="meta"),
    "lazy": torch.nn.parameter.UninitializedParameter,
    "wrapper": lambda: Wrapper(torch.ones(4)),
    "freed": freed,
    "quantized": quantized,
    "packed": lambda: torch.empty(4, dtype=torch.uint4),
    "partly freed": partly_freed,
}


@pytest.mark.parametrize("kind", KINDS)
def test_such_tensors_are_left_aside_by_name(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some kinds are prototypes
        kept = {"one": KINDS[kind]()}

    def step(x: torch.Tensor) -> torch.Tensor:
        assert kept
        return x * 2

    report = verify(step, lambda case: {"x": torch.randn(8 - case, 4)}, cases=3)
    assert report.ok, str(report)
    assert "kept['one']" in report.not_checked["host values"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"permute": [["x"]]}, "permute: expected names of inputs"),
        ({"pad": ""}, "pad: expected Mapping"),
        ({"pad": {"x": 1.5}}, "expected a value of torch.uint8, got 1.5"),
        ({"dims": {"out": ("row",)}}, r"dims\['out'\]: expected 2 names, one per dimension"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verify(lambda x: x + 1, lambda case: {"x": torch.ones(3 - case, 2, dtype=torch.uint8)}, cases=2, **options)


def test_an_oracle_that_fails_is_the_only_finding() -> None:
    """Its case is padded all the same, and what stands behind it does not count."""

    def oracle(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 6:
            raise RuntimeError("no six rows")
        return x * 2

    def inputs(case: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(8 - case, 4, generator=torch.Generator().manual_seed(case))}

    (finding,) = verify(lambda x: x * 2, inputs, cases=4, eager=oracle).findings
    assert (finding.check, finding.case) == ("eager", "2")
    assert "no six rows" in finding.text


def test_an_oracle_that_names_other_results() -> None:
    (finding,) = verify(
        lambda x: {"a": x * 2}, lambda case: {"x": torch.randn(8 - case, 4)}, cases=3, eager=lambda x: {"b": x * 2}
    ).findings
    assert finding.text == "the oracle gives b"
    assert "the step gives a; return both by the same names" in str(finding)


class Slots:
    """Writes rows where `slots` says; pad rows go to `spare`."""

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self.x, self.slots = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
        self.buffers = {"x": self.x, "slots": self.slots}
        self.all = torch.zeros(17, 4)
        self.state = {"kept": self.all[:16]}

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        rows = len(inputs["x"])
        self.x.zero_()
        self.x[:rows] = inputs["x"]
        self.slots.fill_(self.spare)
        self.slots[:rows] = inputs["slots"]

    def run(self) -> torch.Tensor:
        self.all[self.slots] = self.x
        return self.x * 2

    def eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.all[inputs["slots"]] = inputs["x"]
        return inputs["x"] * 2


@pytest.mark.parametrize("spare", [0, 16])
def test_pad_rows_that_write_zeros_to_somebody_else(spare: int) -> None:
    """Where the state holds zeros at first, only the state of another case shows it: the slots are to blame."""

    def inputs(case: int) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(case)
        rows = (8, 3, 5, 8)[case]
        slots = 1 + torch.randperm(15, generator=rng)[:rows]
        slots[0] = slots[0] if case else 0
        return {"x": torch.randn(rows, 4, generator=rng), "slots": slots}

    report = verify(Slots(spare), inputs)
    assert report.ok == (spare == 16), str(report)
    if spare == 0:
        assert report.blamed == ("slots",)


@pytest.mark.parametrize("step", [lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda x: x * float(x.max())])
def test_a_fault_names_the_line_of_the_step(step) -> None:
    """Not one of the kit, through which verify runs it."""
    with CaptureWatch() as watch:
        verify(step, lambda case: {"x": torch.ones(8 - case, 4)}, cases=2)
    line = f"test_verify_tensors.py:{step.__code__.co_firstlineno}"
    assert watch.faults
    assert {fault.where for fault in watch.faults} == {line}
