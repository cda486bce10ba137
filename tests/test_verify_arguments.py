"""What verify refuses, and what it takes: each wrong argument is a ConfigError that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt.kernels.errors import ConfigError
from graphrt.testing.verify import verify
from tests.verify_examples import Copies, rows, silu

SPARSE = torch.eye(3).to_sparse()


ARGUMENTS = {
    "cases": ({"cases": 0}, "cases: expected an int >= 1, got 0"),
    "no number": ({"cases": 1.5}, "cases: expected a list or tuple of numbers of cases, got 1.5"),
    "one capture": ({"captures": 1}, "captures: expected a list or tuple of numbers of cases, got 1"),
    "no capture": ({"captures": []}, "captures: expected at least one, got none"),
    "make_inputs": ({"make_inputs": 4}, "make_inputs: expected a callable, got 4"),
    "eager": ({"eager": 4}, "eager: expected a callable, got 4"),
    "tolerance": ({"tolerance": float("nan")}, "tolerance: expected a finite number >= 0, got nan"),
    "no result": ({"step": lambda x: None}, "step: expected results, or buffers or state that it changes, got none"),
    "captures": ({"captures": [9]}, r"captures: expected some of the cases \['0', '1', '2', '3'\]"),
    "pad": ({"pad": {"y": 0}}, "pad: expected names of inputs"),
    "pad's value": ({"pad": {"x": "0"}}, r"pad\['x'\]: expected int or float, got '0'"),
    "permute": ({"permute": ["y"]}, "permute: expected names of inputs"),
    "names": ({"make_inputs": lambda case: {"y": torch.ones(2)}}, "make_inputs: expected the arguments of silu"),
    "dtype": (
        {"make_inputs": lambda case: {"x": torch.ones(2, 6, dtype=(torch.float32, torch.int64)[case % 2])}},
        "x: expected one dtype",
    ),
    "a text": ({"cases": ["a"]}, r"cases\[0\]: expected an int, got 'a'"),
    "a float": ({"cases": [0, 1.5]}, r"cases\[1\]: expected an int, got 1\.5"),
    "captured text": ({"captures": ["0"]}, r"captures\[0\]: expected an int, got '0'"),
    "state's value": ({"state": {"kv": 3}}, r"state\['kv'\]: expected Tensor, got 3"),
    "state's name": ({"state": {1: torch.zeros(2)}}, "state's name: expected str, got 1"),
    "states": ({"state": [torch.zeros(2)]}, "state: expected Mapping"),
    "shared state": ({"state": {"kv": torch.zeros(1).expand(5)}}, r"state\['kv'\]: elements share memory"),
    "sparse state": ({"state": {"kv": SPARSE}}, r"state\['kv'\]: expected a dense tensor"),
    "large pad": ({"pad": {"x": 1e300}}, r"pad\['x'\]: expected a value of torch.float32, got 1e\+300"),
    "pads": ({"pad": [1]}, "pad: expected Mapping"),
    "pad of a number": (
        {"pad": {"y": 1}, "step": lambda x, y: x * y, "make_inputs": lambda case: rows(case, y=2)},
        "pad: expected names of tensors, got y",
    ),
    "fp8 pad": (
        {"pad": {"x": 1e3}, "make_inputs": lambda case: {"x": torch.ones(2, 6).to(torch.float8_e4m3fn)}},
        r"pad\['x'\]: expected a value of torch.float8_e4m3fn",
    ),
    "int pad": (
        {"pad": {"x": float("nan")}, "make_inputs": lambda case: {"x": torch.ones(2, dtype=torch.int32)}},
        r"pad\['x'\]: expected a value of torch.int32, got nan",
    ),
    "dims": ({"dims": {"out": 3}}, r"dims\['out'\]: expected a list or tuple of names of dimensions, got 3"),
    "a dim": ({"dims": {"out": [3]}}, r"dims\['out'\]\[0\]: expected str, got 3"),
    "dims of": ({"dims": {"logits": ["row"]}}, r"dims: expected names of outputs, \['out'\], got \['logits'\]"),
    "permuted text": ({"permute": "x"}, "permute: expected a list or tuple of names of inputs"),
    "permuted number": (
        {"permute": ["y"], "step": lambda x, y: x * y, "make_inputs": lambda case: rows(case, y=2)},
        "permute: expected tensors with rows, got y = 2",
    ),
    "sparse input": ({"make_inputs": lambda case: {"x": SPARSE}}, "x: expected a dense tensor"),
    "meta input": (
        {"make_inputs": lambda case: {"x": torch.ones(2, device="meta")}},
        "x: expected a tensor with memory",
    ),
    "bits": (
        {"make_inputs": lambda case: {"x": torch.ones(2, dtype=torch.uint8).view(torch.bits8)}},
        "x: expected numbers that torch compares, got torch.bits8",
    ),
    "step": ({"step": 3}, "step: expected a function, or an object with buffers, refresh and run, got one without"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit(name: str) -> None:
    options, text = ARGUMENTS[name]
    options = dict(options)
    step, make_inputs = options.pop("step", silu), options.pop("make_inputs", rows)
    with pytest.raises(ConfigError, match=text):
        verify(step, make_inputs, **options)


def test_names_that_differ_between_cases() -> None:
    with pytest.raises(ConfigError, match="expected the names"):
        verify(lambda **inputs: inputs["x"], lambda case: {"x": torch.ones(2), **({"y": 1} if case else {})})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda x: [1], "expected a tensor, got int"),
        (lambda x: x.to_sparse(), "expected a dense tensor, got a sparse or nested one"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "expected a dense tensor, got a sparse or nested one"),
    ],
    ids=["int", "sparse", "nested"],
)
def test_results_that_cannot_be_compared_are_findings(step: Any, text: str) -> None:
    report = verify(step, rows)
    assert not report.ok
    assert text in str(report)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.bool])
def test_dtypes_of_inputs(dtype: torch.dtype) -> None:
    """Those that torch computes little with, too: a right step is silent, and a stale tail is found."""

    def inputs(case: int) -> dict[str, Any]:
        numbers = torch.arange(1, 1 + (5, 2, 4, 5)[case]) % 3 + case
        return {"x": (numbers % 2 == 0) if dtype == torch.bool else (2.0**numbers).to(dtype)}

    assert verify(lambda x: x.float() + 1, inputs).ok
    assert verify(lambda x: x.float() + x.float().sum(), inputs).blamed == ("x",)


# -- the parts of a Subject

PARTS = {
    "buffers": ([torch.zeros(2)], "buffers: expected Mapping"),
    "state": (3, "state: expected Mapping, got 3"),
    "real": (lambda inputs: None, "real: expected Mapping, got None"),
    "real ": (lambda inputs: {"y": slice(0, 2)}, r"real: expected names of outputs or state, \['out'\], got \['y'\]"),
    "real  ": (lambda inputs: {"out": 7}, r"real\['out'\]: expected an index of a tensor of shape \[5, 6\], got 7"),
    "real   ": (3, "real: expected a callable, got 3"),
    "unowned": (lambda inputs: None, "unowned: expected Mapping, got None"),
    "unowned ": (lambda inputs: {"kv": 1}, r"unowned: expected names of state, got \['kv'\]"),
    "host": (3, "host: expected a pair of an object and its name, got 3"),
    "derived": (3, "derived: expected names of buffers, got 3"),
    "derived ": (["y"], r"derived: expected names of buffers, got \['y'\]"),
    "eager": (3, "eager: expected a callable, got 3"),
    "capture": (3, "capture: expected a callable, got 3"),
    "canaries": (3, "canaries: expected Canaries, got 3"),
    "run": (3, "run: expected a callable, got 3"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_subject_that_do_not_fit(name: str) -> None:
    value, text = PARTS[name]
    subject = Copies()
    setattr(subject, name.strip(), value)
    with pytest.raises(ConfigError, match=text):
        verify(subject, rows)


def test_an_index_of_unowned_state_that_does_not_fit() -> None:
    subject = Copies()
    subject.state, subject.unowned = {"kv": torch.zeros(3)}, lambda inputs: {"kv": 7}
    with pytest.raises(ConfigError, match=r"unowned\['kv'\]: expected an index of a tensor of shape \[3\], got 7"):
        verify(subject, rows)


class OfTuples:
    """Its refresh takes a pair, which has no names."""

    def __init__(self, planted: bool) -> None:
        self.buffers = {"x": torch.zeros(4)}
        self.planted, self.factor = planted, 1

    def refresh(self, inputs: tuple[int, int]) -> None:
        self.buffers["x"].fill_(inputs[0])
        if self.planted:
            self.factor = inputs[1]

    def run(self) -> torch.Tensor:
        return self.buffers["x"] * self.factor

    def eager(self, inputs: tuple[int, int]) -> torch.Tensor:
        return torch.full((4,), float(inputs[0] * (inputs[1] if self.planted else 1)))


@pytest.mark.parametrize("make_inputs", [lambda case: (case + 1, case + 2), lambda case: (1, 2)], ids=["other", "same"])
def test_inputs_without_names(make_inputs: Any) -> None:
    report = verify(OfTuples(False), make_inputs)
    assert report.ok, report
    report = verify(OfTuples(True), make_inputs)
    assert report.blamed == (("self.factor",) if make_inputs(0) != make_inputs(1) else ()), report
    with pytest.raises(ConfigError, match="permute: expected names of inputs"):
        verify(OfTuples(False), make_inputs, permute=["x"])


# -- rows in reverse order


def ranked(self: Copies) -> torch.Tensor:
    return self.buffers["x"] * torch.arange(5)[:, None]


def test_rows_in_reverse_order_without_an_oracle() -> None:
    report = verify(Copies(), rows, permute=["x"])
    assert report.ok, report
    assert "permute" in report.checked
    subject = Copies()
    subject.run = ranked.__get__(subject)
    report = verify(subject, lambda case: rows((1, 0, 2, 3)[case]), permute=["x"])  # fewer rows than the buffer has
    assert [finding.check for finding in report.findings] == ["permute"]


def test_results_without_rows_are_not_reversed() -> None:
    subject = Copies()
    subject.run = lambda: subject.buffers["x"].sum(0)
    subject.real = lambda inputs: {"out": slice(None)}
    report = verify(subject, rows, permute=["x"])
    assert report.ok, report
    assert "has a row for each" in report.not_checked["permute"]
