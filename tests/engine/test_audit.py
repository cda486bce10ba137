"""The audit of a manager's own graphs: silent on all of them, and what a model smuggles in is named."""

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
def test_no_findings_in_our_own_graphs(device: torch.device, name: str) -> None:
    rig = make_rig(device, decode_sizes=(1, 4), mixed_sizes=(16,), **RIGS[name])
    for size in rig.manager.descriptors:
        report = rig.manager.audit(size)
        assert report.ok, str(report)
        assert report.nodes >= len(inspect_graph(rig.manager.graph(size)).nodes) > 10
        assert sum(report.counts.values()) > 50
    rig.manager.close()


class Smuggling(ToyModel):
    """Reads a tensor that is neither weight nor buffer: of its own, or of a cache that it forgets."""

    def forward(self, step):
        return super().forward(step) * self.extra[0]


def test_memory_of_nobody_is_named(device: torch.device) -> None:
    model = Smuggling(device, torch.float32)
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


def test_sizes_that_are_not_captured(device: torch.device) -> None:
    rig = make_rig(device, decode_sizes=(2,), mixed_sizes=(16,))
    other = make_rig(device, decode_sizes=(4,), mixed_sizes=()).manager.descriptors[0]
    for call in (rig.manager.graph, rig.manager.memory_map, rig.manager.audit):
        with pytest.raises(ConfigError, match="descriptor: expected one of the captured sizes, got decode"):
            call(other)
    rig.manager.close()
    with pytest.raises(CaptureError):
        rig.manager.audit(other)
