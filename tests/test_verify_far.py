"""Places of a step that a scale of the first batch may be kept in: `verify` looks in all, and names them."""

from __future__ import annotations

import array
import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.capture.recorder import make_recorder
from graphrt.kernels.errors import CaptureError
from graphrt.testing.verify import verify
from graphrt.testing.verify_subject import named_outputs

Step = Callable[[torch.Tensor], torch.Tensor]
CONTEXT = {"scale": 1.0}
KEPT: dict[str, torch.Tensor] = {}
WEIGHT = torch.ones(16)


def case(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn((8, 3, 5, 8)[number], 16, generator=torch.Generator().manual_seed(number))}


def scale_of(kept: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The bug: the scale of the first batch serves all."""
    if "scale" not in kept:
        kept["scale"] = x[0].abs().max().clone()
    return kept["scale"]


def hook() -> Step:
    kept: dict[str, torch.Tensor] = {}
    module = torch.nn.Linear(16, 16)
    module.register_forward_hook(lambda module, args, out: out * scale_of(kept, args[0]))
    return lambda x: module(x)


def attribute_of_a_tensor() -> Step:
    weight = torch.ones(16)

    def step(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(weight, "folded"):
            weight.folded = weight * x[0].abs().max()  # type: ignore[attr-defined]
        return x * weight.folded  # type: ignore[attr-defined, no-any-return]

    return step


def class_in_a_closure() -> Step:
    class Cache:
        scale: torch.Tensor | None = None

    def step(x: torch.Tensor) -> torch.Tensor:
        if Cache.scale is None:
            Cache.scale = x[0].abs().max().clone()
        return x * Cache.scale

    return step


def default_of_a_static_method() -> Step:
    class Module(torch.nn.Module):
        @staticmethod
        def scale(x: torch.Tensor, kept: dict[str, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006  the bug
            return scale_of(kept, x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale(x)

    return Module()


def property_of_a_class() -> Step:
    class Module(torch.nn.Module):
        @property
        def kept(self) -> dict[str, torch.Tensor]:
            return KEPT

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale_of(self.kept, x)

    return Module()


class Scaled:
    """Made anew in each step, by a method that a global is behind."""

    def __init__(self, x: torch.Tensor) -> None:
        self.out = x * scale_of(KEPT, x)


def object_of_a_global_class() -> Step:
    return lambda x: Scaled(x).out


def private_slot() -> Step:
    class Slotted:
        __slots__ = ("__scale",)

        def __init__(self) -> None:
            self.__scale: torch.Tensor | None = None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if self.__scale is None:
                self.__scale = x[0].abs().max().clone()
            return x * self.__scale

    return Slotted()


def variable_of_a_context() -> Step:
    kept: contextvars.ContextVar[torch.Tensor | None] = contextvars.ContextVar("kept", default=None)

    def step(x: torch.Tensor) -> torch.Tensor:
        if kept.get() is None:
            kept.set(x[0].abs().max().clone())
        return x * kept.get()  # type: ignore[operator]

    return step


def below_many_objects() -> Step:
    class Box:
        inner: Any = None

    outer = box = Box()
    for _ in range(12):
        box.inner = Box()
        box = box.inner
    box.kept = {}  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> torch.Tensor:
        box = outer
        while box.inner is not None:
            box = box.inner
        return x * scale_of(box.kept, x)  # type: ignore[attr-defined]

    return step


def beside_a_large_dict() -> Step:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vocabulary = {f"token {at}": at for at in range(60_000)}
            self.kept: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale_of(self.kept, x)

    return Module()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (hook, "kept['scale']"),
        (attribute_of_a_tensor, "weight.folded"),
        (class_in_a_closure, "Cache.scale"),
        (default_of_a_static_method, "step.scale(kept)['scale']"),
        (property_of_a_class, "KEPT['scale']"),
        (object_of_a_global_class, "KEPT['scale']"),
        (private_slot, "step._Slotted__scale"),
        (variable_of_a_context, "kept"),
        (below_many_objects, f"outer{'.inner' * 12}.kept['scale']"),
        (beside_a_large_dict, "step.kept['scale']"),
    ],
)
def test_where_a_step_may_keep_a_value(make: Callable[[], Step], name: str) -> None:
    KEPT.clear()
    report = verify(make(), case)
    assert {finding.blamed for finding in report.findings} == {(name,)}, str(report)


def test_tensors_and_dicts_of_make_inputs_may_be_used_again() -> None:
    """Each case has its own contents, though make_inputs gives the same tensor and the same dict each time."""
    given: dict[str, Any] = {"x": torch.zeros(8, 16), "s": 0}

    def make(number: int) -> dict[str, Any]:
        given["x"].copy_(torch.randn(8, 16, generator=torch.Generator().manual_seed(number)))
        given["s"] = number + 1
        return given

    kept: dict[str, torch.Tensor] = {}
    report = verify(lambda x, s: x * scale_of(kept, x) * s, make)
    assert {"kept['scale']", "s"} <= {name for finding in report.findings for name in finding.blamed}, str(report)


def test_inputs_that_show_nothing_are_named() -> None:
    report = verify(lambda x, temperature, w: x * w, lambda n: {**case(n), "temperature": 0.5 * n, "w": WEIGHT})
    assert report.ok
    assert "depends on temperature" in report.not_checked["scalars"]
    assert report.not_checked["inputs"].endswith("froze them: w")
    assert "inputs" not in verify(lambda x: 2 * x, case).not_checked


@torch.library.custom_op("graphrt_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * CONTEXT["scale"]


@torch.library.custom_op("graphrt_tests::by_largest", mutates_args=())
def by_largest(x: torch.Tensor) -> torch.Tensor:
    return x * x.max().item()


class ByContext:
    """A number that an op reads from a context of the forward pass, as attention ops of engines do."""

    def __init__(self) -> None:
        self.buffers = {"x": torch.zeros(8, 16)}

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        CONTEXT["scale"] = float(len(inputs["x"]))
        self.buffers["x"].zero_()
        self.buffers["x"][: len(inputs["x"])] = inputs["x"]

    def run(self) -> torch.Tensor:
        return scaled(self.buffers["x"])


class ByArray(ByContext):
    """The number stands in an array of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = array.array("d", [1.0])

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        super().refresh(inputs)
        self.scales[0] = float(len(inputs["x"]))

    def run(self) -> torch.Tensor:
        return self.buffers["x"] * self.scales[0]


def test_arrays_of_python_are_compared() -> None:
    report = verify(ByArray(), case)
    assert {finding.blamed for finding in report.findings} == {("self.scales",)}, str(report)


def test_what_a_custom_op_reads_is_frozen_as_in_a_graph() -> None:
    report = verify(ByContext(), case)
    assert {finding.blamed for finding in report.findings} == {("CONTEXT['scale']",)}, str(report)
    (finding,) = verify(by_largest, case).findings
    assert finding.check == "capture"
    assert "aten.item" in finding.text


def suppressed(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        assert x.max().item() < 1e9
    return 2 * x


@pytest.mark.parametrize("read", [suppressed, lambda x: x * len(str(x)), lambda x: x * len(f"{x.max():.3f}")])
def test_host_reads_that_a_step_swallows_or_prints_end_a_capture(read: Step) -> None:
    recorder, x = make_recorder(torch.device("cpu")), torch.ones(4)
    with pytest.raises(CaptureError, match="reads a tensor on the host"):
        recorder.capture(lambda: read(x), BatchDescriptor.decode(1), lambda: None)


def test_fused_kernels_that_torch_takes_where_nobody_watches_are_no_difference() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    report = verify(layer, lambda n: {"src": torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(n))})
    assert report.ok, str(report)


class InPlace(ByContext):
    """Refresh and oracle write to their inputs, which are copies."""

    def refresh(self, inputs: dict[str, torch.Tensor]) -> None:
        x = inputs.pop("x")
        super().refresh({"x": x.mul_(2)})

    def run(self) -> torch.Tensor:
        return 3 * self.buffers["x"]

    def eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["x"].mul_(6)


def test_refresh_and_oracle_may_write_to_their_inputs() -> None:
    report = verify(InPlace(), case)
    assert report.ok, str(report)


def test_results_in_each_other_and_conjugated_ones() -> None:
    report = verify(lambda x: (x, None, {"y": (2 * x, [3 * x])}, torch.complex(x, x).conj()), case)
    assert report.ok, str(report)
    names = named_outputs((WEIGHT, None, {"y": (WEIGHT, [WEIGHT])}))
    assert list(names) == ["out[0]", "out[2].y[0]", "out[2].y[1][0]"]
    assert list(named_outputs({"logits": WEIGHT, "state": None, "pair": (WEIGHT, WEIGHT)})) == [
        "logits", "pair[0]", "pair[1]",
    ]  # fmt: skip


def test_statistics_that_an_op_writes_without_a_version_are_put_back() -> None:
    norm = torch.nn.BatchNorm1d(16)
    before = norm.running_mean.clone()  # type: ignore[operator, union-attr]
    verify(norm, lambda n: {"input": case(n)["x"]})
    assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]


@triton.jit
def _twice_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < count), mask=at < count)


def test_a_triton_kernel_that_a_step_launches_goes_on_the_tape() -> None:
    """Its interpreter reads values on the host, which no graph would see."""

    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _twice_kernel[(1,)](x, out, x.numel(), BLOCK=128)
        return out + 1

    x = torch.ones(4, 16)
    tape = make_recorder(torch.device("cpu")).capture(lambda: step(x), BatchDescriptor.decode(1), lambda: None)
    x.fill_(5.0)
    tape.launch()
    assert tape.output.unique().tolist() == [11.0]
    report = verify(step, case)
    assert report.ok, str(report)
