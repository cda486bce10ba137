"""Arguments of verify and parts of a Subject: each wrong one raises a ConfigError that names it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify import verify
from tests.support.verify_examples import Copies, rows, silu

SPARSE = torch.eye(3).to_sparse()

ARGUMENTS = {
    "cases": ({"cases": 0}, "cases: expected an int >= 1, got 0"),
    "no sequence": ({"cases": 1.5}, "cases: expected a list or tuple of case numbers, got 1.5"),
    "no case": ({"cases": []}, "cases: the list is empty"),
    "captures": ({"captures": [9]}, r"captures: \['9'\] are not among the cases \['0', '1', '2', '3'\]"),
    "make_inputs": ({"make_inputs": 4}, "make_inputs: expected a callable, got 4"),
    "tolerance": ({"tolerance": float("nan")}, "tolerance: expected a finite number >= 0, got nan"),
    "no result": ({"step": lambda x: None}, "step: returns no tensor, and changes no buffer or state"),
    "names of one case": (
        {
            "step": lambda **inputs: inputs["x"],
            "make_inputs": lambda case: {"x": torch.ones(2)} | ({"y": 1} if case else {}),
        },
        "make_inputs: expected the names",
    ),
    "dtype": (
        {"make_inputs": lambda case: {"x": torch.ones(2, 6, dtype=(torch.float32, torch.int64)[case % 2])}},
        "x: dtype, device or number of dimensions differ between cases",
    ),
    "state": ({"state": [torch.zeros(2)]}, "state: expected Mapping"),
    "state's value": ({"state": {"kv": 3}}, r"state\['kv'\]: expected Tensor, got 3"),
    "shared state": ({"state": {"kv": torch.zeros(1).expand(5)}}, r"state\['kv'\]: elements may share memory"),
    "sparse state": ({"state": {"kv": SPARSE}}, r"state\['kv'\]: sparse, nested and quantized tensors are not"),
    "sparse input": ({"make_inputs": lambda case: {"x": SPARSE}}, "x: sparse, nested and quantized tensors are not"),
    "meta input": ({"make_inputs": lambda case: {"x": torch.ones(2, device="meta")}}, "x: the tensor is on the meta"),
    "bits": (
        {"make_inputs": lambda case: {"x": torch.ones(2, dtype=torch.uint8).view(torch.bits8)}},
        "x: torch cannot compare values of torch.bits8",
    ),
    "pads": ({"pad": [1]}, "pad: expected Mapping"),
    "pad": ({"pad": {"y": 0}}, r"pad: unknown inputs \['y'\]"),
    "pad's value": ({"pad": {"x": "0"}}, r"pad\['x'\]: torch.float32 cannot hold '0'"),
    "large pad": ({"pad": {"x": 1e300}}, r"pad\['x'\]: torch.float32 cannot hold 1e\+300"),
    "int pad": (
        {"pad": {"x": float("nan")}, "make_inputs": lambda case: {"x": torch.ones(2, dtype=torch.int32)}},
        r"pad\['x'\]: torch.int32 cannot hold nan",
    ),
    "pad of a number": (
        {"pad": {"y": 1}, "step": lambda x, y: x * y, "make_inputs": lambda case: rows(case, y=2)},
        "pad: y is not a tensor",
    ),
    "step": ({"step": 3}, "step: 3 is not callable and has no attribute buffers"),
    "pad of a subject": ({"step": Copies(), "pad": {"x": 0}}, "pad: only plain functions take it"),
    "state of a subject": ({"step": Copies(), "state": {"x": torch.ones(1)}}, "state: only plain functions take it"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_argument_raises(name: str) -> None:
    options, text = ARGUMENTS[name]
    options = dict(options)
    step, make_inputs = options.pop("step", silu), options.pop("make_inputs", rows)
    with pytest.raises(ConfigError, match=text):
        verify(step, make_inputs, **options)


PARTS = {
    "buffers": ([torch.zeros(2)], "buffers: expected Mapping"),
    "state": (3, "state: expected Mapping, got 3"),
    "real": (lambda inputs: None, "real: expected Mapping, got None"),
    "real ": (
        lambda inputs: {"y": slice(0, 2)},
        r"real: \['y'\] are neither outputs nor state",
    ),
    "unowned": (lambda inputs: {"kv": 1}, r"unowned: unknown state tensors \['kv'\]"),
    "derived": (["y"], r"derived: unknown buffers \['y'\]"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_wrong_part_of_a_subject_raises(name: str) -> None:
    value, text = PARTS[name]
    subject = Copies()
    setattr(subject, name.strip(), value)
    with pytest.raises(ConfigError, match=text):
        verify(subject, rows)


RESULTS = {
    "int": (lambda x: [1], r"out\[0\]: expected a tensor, got int"),
    "sparse": (lambda x: x.to_sparse(), "out: sparse, nested and quantized tensors are not supported"),
    "names": (lambda x: {"layer": {"0": x}, "layer.0": x + 1}, "two results are named 'layer.0'"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_cannot_be_compared_is_a_finding(name: str) -> None:
    step, text = RESULTS[name]
    (finding,) = verify(step, rows).findings
    assert re.search(text, finding.text), finding


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.bool])
def test_inputs_of_dtypes_that_torch_supports_in_part(dtype: torch.dtype) -> None:
    """A correct step has no findings, and stale pad rows are blamed."""

    def inputs(case: int) -> dict[str, Any]:
        numbers = torch.arange(1, 1 + (5, 2, 4, 5)[case]) % 3 + case
        return {"x": (numbers % 2 == 0) if dtype == torch.bool else (2.0**numbers).to(dtype)}

    assert verify(lambda x: x.float() + 1, inputs).ok
    assert verify(lambda x: x.float() + x.float().sum(), inputs).blamed == ("x",)


def test_inputs_without_names() -> None:
    class OfTuples:
        """refresh() takes a pair of numbers."""

        def __init__(self, injected: bool) -> None:
            self.buffers = {"x": torch.zeros(4)}
            self.injected, self.factor = injected, 1

        def refresh(self, inputs: tuple[int, int]) -> None:
            self.buffers["x"].fill_(inputs[0])
            if self.injected:
                self.factor = inputs[1]

        def run(self) -> torch.Tensor:
            return self.buffers["x"] * self.factor

    make_inputs = lambda case: (case + 1, case + 2)  # noqa: E731
    assert verify(OfTuples(False), make_inputs).ok  # type: ignore[arg-type]
    assert verify(OfTuples(True), make_inputs).blamed == ("self.factor",)  # type: ignore[arg-type]


def test_make_inputs_and_steps_may_reuse_and_change_inputs() -> None:
    given: dict[str, Any] = {"x": torch.zeros(8, 4), "s": 0}

    def make(number: int) -> dict[str, Any]:
        given["x"].copy_(torch.randn(8, 4, generator=torch.Generator().manual_seed(number)))
        given["s"] = number + 1
        return given

    assert verify(lambda x, s: x * s, make).blamed == ("s",)
    subject = Copies()
    subject.refresh = lambda inputs: Copies.refresh(subject, {"x": inputs.pop("x").mul_(2)})
    subject.run = lambda: 3 * subject.buffers["x"]
    subject.eager = lambda inputs: inputs["x"].mul_(6)
    report = verify(subject, rows)
    assert report.ok, str(report)
