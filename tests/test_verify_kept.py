"""Tensors that a step made before verify began, and uses again: named where results come from them, else silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphrt.step import Step
from graphrt.testing.verify import verify
from graphrt.testing.verify_report import VerifyReport
from graphrt.testing.verify_runtime import verify_runtime
from tests.support.toy import ToyModel, make_rig

CPU = torch.device("cpu")


class ByShape(ToyModel):
    """As rotary embeddings are kept: a pair of tables for each number of tokens."""

    tables: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def make(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        angles = step.positions.float()[:, None]
        return angles.cos(), angles.sin()

    def forward(self, step: Step) -> torch.Tensor:
        tables = self.__dict__.setdefault("tables", {})
        if len(step.positions) not in tables:
            tables[len(step.positions)] = self.make(step)
        cos, sin = tables[len(step.positions)]
        return super().forward(step) * (cos + sin)[step.logits_indices]


class ByShapeAlone(ByShape):
    """What depends on the shape alone may be kept."""

    def make(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(len(step.positions), dtype=torch.float32)[:, None]
        return at.cos(), at.sin()


class Lazy(ToyModel):
    """Weights that are drawn when they are first needed."""

    def forward(self, step: Step) -> torch.Tensor:
        if not hasattr(self, "shift"):
            self.shift = torch.randn(1)
        return super().forward(step) + self.shift


class Optional(ToyModel):
    """A weight that is no Parameter, and that a model may do without."""

    scale: torch.Tensor | None = None

    def forward(self, step: Step) -> torch.Tensor:
        out = super().forward(step)
        return out if self.scale is None else out * self.scale


class Once(ToyModel):
    """One mask for all steps, of the first one's lengths."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.mask: torch.Tensor | None = None

    def forward(self, step: Step) -> torch.Tensor:
        if self.mask is None:
            self.mask = step.positions.float().mean()
        return super().forward(step) + self.mask


class OnceByAttribute(ToyModel):
    """The same, by whether there is such an attribute."""

    def forward(self, step: Step) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.mask = [step.positions.float().mean()]
        return super().forward(step) + self.mask[0]


def verified(kind: type[ToyModel]) -> VerifyReport:
    model = kind(CPU, torch.float32)
    if isinstance(model, Optional):
        model.scale = torch.full((), 0.5)
    return verify_runtime(make_rig(CPU, model=model, fill=0.0).manager, count=5)


@pytest.mark.parametrize(
    ("kind", "name"), [(ByShape, "model.tables"), (Once, "model.mask"), (OnceByAttribute, "model.mask")]
)
def test_what_a_model_keeps_of_other_inputs_is_named(kind: type[ToyModel], name: str) -> None:
    report = verified(kind)
    assert {finding.blamed for finding in report.findings} == {(name,)}, str(report)
    assert f"{name} was made in an earlier run" in str(report)


@pytest.mark.parametrize("kind", [ByShapeAlone, Lazy, Optional])
def test_what_depends_on_no_input_may_be_kept(kind: type[ToyModel]) -> None:
    report = verified(kind)
    assert report.ok, str(report)


KEPT: dict[int, torch.Tensor] = {}
WEIGHTS = {"w": torch.full((8,), 0.5)}


def by_shape(x: torch.Tensor) -> torch.Tensor:
    if len(x) not in KEPT:
        KEPT[len(x)] = x.mean()
    return x * WEIGHTS["w"][: len(x)] - KEPT[len(x)]


def afresh(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHTS["w"][: len(x)] - x.mean()


@pytest.mark.parametrize(("step", "names"), [(by_shape, {("KEPT",)}), (afresh, set())])
def test_a_function_that_ran_before(step: Callable[[torch.Tensor], torch.Tensor], names: set[tuple[str, ...]]) -> None:
    KEPT.clear()
    for n in range(1, 9):
        step(torch.arange(n, dtype=torch.float32))
    before = {n: value.clone() for n, value in KEPT.items()}
    report = verify(step, lambda case: {"x": torch.linspace(case, 9.0, 8)})
    assert {finding.blamed for finding in report.findings} == names, str(report)
    assert list(KEPT) == list(before), "the caller's are as before"
    assert all(torch.equal(KEPT[n], value) for n, value in before.items())


class Holder:
    """Thirty weights that are no Parameters."""

    def __init__(self) -> None:
        for at in range(30):
            setattr(self, f"w{at}", torch.ones(1))


HOLDER = Holder()


def holding(x: torch.Tensor) -> torch.Tensor:
    return x * HOLDER.w0 + HOLDER.w29


def test_those_that_are_too_many_to_try_are_named_as_not_checked() -> None:
    report = verify(holding, lambda case: {"x": torch.linspace(case, 9.0, 8)})
    assert report.ok, str(report)
    assert "HOLDER.w12, HOLDER.w13" in report.not_checked["earlier tensors"], str(report)
    assert "earlier tensors" not in verify(afresh, lambda case: {"x": torch.linspace(case, 9.0, 8)}).not_checked
