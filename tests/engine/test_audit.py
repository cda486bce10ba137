"""The audit of a manager's graphs: no findings in them, and findings for tensors that a model hides."""

from __future__ import annotations

import pytest
import torch

from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.findings import FindingKind
from graphrt.config import RequestTensor
from graphrt.kernels.errors import CaptureError, ConfigError
from graphrt.kernels.types import KVLayout
from tests.support.toy import ToyModel, make_rig

EVERYTHING = {
    "penalties": True, "max_logprobs": 2, "token_masks": True, "max_logit_bias": 3,
    "request_tensors": (RequestTensor("a"),),
}  # fmt: skip
RIGS = {
    "reference": {"backend": "torch_reference"},
    "HND": {"backend": "torch_reference", "layout": KVLayout.HND},
    "triton": {"backend": "triton"},
    "window": {"backend": "triton", "window": 8},
    "fp8 and all options": {"backend": "triton", "kv_dtype": torch.float8_e4m3fn} | EVERYTHING,
    "no sampler": {"backend": "torch_reference", "sampler": None},
}


@pytest.mark.parametrize("name", RIGS)
def test_the_graphs_of_a_manager_have_no_findings(device: torch.device, name: str) -> None:
    rig = make_rig(device, decode_sizes=(1, 4), mixed_sizes=(16,), **RIGS[name])
    for size in rig.manager.descriptors:
        report = rig.manager.audit(size)
        assert report.ok, str(report)
        assert report.nodes >= len(inspect_graph(rig.manager.graph(size)).nodes) > 10
        assert sum(report.counts.values()) > 50
    rig.manager.close()


class Hiding(ToyModel):
    """Reads a tensor that is neither a parameter nor a buffer, and may free it."""

    def forward(self, step):
        return super().forward(step) * self.extra[0]


def test_unregistered_and_freed_memory_is_found(device: torch.device) -> None:
    model = Hiding(device, torch.float32)
    model.extra = [torch.ones(61, device=device)]
    rig = make_rig(device, model=model, decode_sizes=(2,), mixed_sizes=())
    (size,) = rig.manager.descriptors
    kept = rig.manager.audit(size)
    assert {finding.kind for finding in kept.findings} == {FindingKind.FOREIGN}, str(kept)
    assert {finding.address for finding in kept.findings} == {model.extra[0].data_ptr()}
    with pytest.raises(CaptureError, match="audit: expected no findings, got"):
        kept.raise_if_any()
    model.extra.clear()
    freed = rig.manager.audit(size)
    assert {finding.kind for finding in freed.findings} == {FindingKind.FREED}, str(freed)


def test_a_size_that_is_not_captured_raises(device: torch.device) -> None:
    rig = make_rig(device, decode_sizes=(2,), mixed_sizes=(16,))
    other = make_rig(device, decode_sizes=(4,), mixed_sizes=()).manager.descriptors[0]
    for call in (rig.manager.graph, rig.manager.memory_map, rig.manager.audit):
        with pytest.raises(ConfigError, match=r"descriptor: decode.* is not a captured size"):
            call(other)
    rig.manager.close()
    with pytest.raises(CaptureError):
        rig.manager.audit(other)
