"""Mutations of backends: each thing that a step rewrites is left as it was, in turn. The contract suite notices each.

    schedule:  work list of this batch  ->  put back to that of the capture  ->  wrong attention, and the suite says so

On CPU only: a GPU kernel that follows another batch's work list may wait for words that nobody sends.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.registry import backend_class
from graphrt.backends.triton import TritonBackend
from graphrt.kernels.library import INTERPRETER_AVAILABLE
from graphrt.metadata import StepMetadata
from graphrt.testing.backend_contract import check_steps, steps_of
from graphrt.testing.backend_features import FEATURES, Feature
from graphrt.testing.backend_rig import open_rigs
from tests.support import fake_packages

CPU = torch.device("cpu")
SCRATCH = ("partial_out", "partial_lse")
"""Written and read within `run`: a test of their own gives both the same memory."""

IN_INTERPRETER = ("splits", "window", "query_len", "mixed", "kv_groups", "mixed-encoder_attention", "prefill")
CASES = [
    *(("triton", feature) for feature in IN_INTERPRETER),
    *((name, "plain") for name in fake_packages.PACKAGES),
    ("flash_attn3", "prefill"),
]
MESSAGES = {
    ("triton", "splits", "counters"): "expected NaN and infinities in the same places",
    ("flashinfer", "plain", "indices"): "expected NaN and infinities in the same places",
    ("triton", "prefill", "prompt_schedule_0"): r"wrote to the \d+ tokens of the decode part",
}
"""What the suite says of a tensor, where it is not an error that is too large."""


def class_of(name: str, monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    cls = backend_class(name)
    if name == "triton":
        if not INTERPRETER_AVAILABLE:
            pytest.skip("needs the Triton interpreter; set TRITON_INTERPRET=1")
        return cls
    cls = fake_packages.on_cpu(cls)
    fake_packages.install_package(monkeypatch, cls.name, cls.package.module)
    return cls


def stale_tensors(cls: type[AttentionBackend], feature: Feature) -> dict[str, torch.Tensor]:
    """By name, what the schedule of a smaller batch writes."""
    with open_rigs(cls, feature, CPU) as (rig,):
        steps = steps_of(rig)
        rig.write([rig.sequence(*row) for row in steps.get("shrunk", steps.get("one", ()))])
        rig.eager()
        return {name: tensor.clone() for name, tensor in rig.backend.tensors().items()}


def forgetful(cls: type[AttentionBackend], name: str, stale: torch.Tensor) -> type[AttentionBackend]:
    """The class with a `schedule` that leaves contents of another batch in one tensor, or a counter one too high."""

    def schedule(self: AttentionBackend, metadata: StepMetadata) -> None:
        cls.schedule(self, metadata)
        self.tensors()[name].copy_(stale + 1 if name == "counters" else stale)

    return type(cls.__name__, (cls,), {"schedule": schedule})


@pytest.mark.parametrize(("name", "feature_name"), CASES)
def test_schedule_that_skips_one_tensor_is_found(name: str, feature_name: str, monkeypatch) -> None:
    cls, feature = class_of(name, monkeypatch), FEATURES[feature_name]
    if feature.prefill:
        cls = cls.prefill_class()
    stale = stale_tensors(cls, feature)
    forgotten = [n for n in stale if n not in SCRATCH and (n != "counters" or feature_name == "splits")]
    assert forgotten, "nothing would be tested"
    for tensor in forgotten:
        message = MESSAGES.get((name, feature_name, tensor), "expected an error of at most")
        with pytest.raises(AssertionError, match=message):
            check_steps(forgetful(cls, tensor, stale[tensor]), feature, CPU, brief=True)


def test_shared_scratch_is_found(monkeypatch) -> None:
    """Partial results and their log-sum-exps in the same memory."""
    cls = class_of("triton", monkeypatch)

    def allocate(self: TritonBackend) -> None:
        TritonBackend.allocate(self)
        work = self._workspace
        assert work is not None
        self._workspace = replace(work, partial_lse=work.partial_out[64:][: work.partial_lse.numel()])

    aliased = type(cls.__name__, (cls,), {"allocate": allocate})
    with pytest.raises(AssertionError, match="expected"):
        check_steps(aliased, FEATURES["splits"], CPU, brief=True)


def test_stale_plan_is_found(monkeypatch) -> None:
    """FlashInfer's plan on the host is kept from the first replay."""
    cls = class_of("flashinfer", monkeypatch)

    def plan_replay(self, descriptor, batch) -> None:
        if not self.__dict__.setdefault("_planned", False):
            cls.plan_replay(self, descriptor, batch)
            self._planned = True

    frozen = type(cls.__name__, (cls,), {"plan_replay": plan_replay})
    with pytest.raises(AssertionError, match="expected"):
        check_steps(frozen, FEATURES["plain"], CPU, brief=True)
