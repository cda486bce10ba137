"""Every backend through one contract: replay is eager bitwise, right, and free of stale metadata, padding and NaN.

On CPU the three families of metadata stand in as mocks, and broken ones show that the check notices what it is for.
Skips are the backend's own refusals, which name it.
"""

from __future__ import annotations

import pytest
import torch

from graphrt.backends.registry import backend_class
from graphrt.kernels.library import INTERPRETER_AVAILABLE
from tests.backends import mocks
from tests.backends.contract import FEATURES, check

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MOCKS = {cls.name: cls for cls in mocks.FAMILIES}
ON_CUDA = ("triton", "flash_attn3", "flash_attn2", "flashinfer", "torch_reference")


def _backends() -> list:
    on_cpu = ["torch_reference", *MOCKS, *(["triton"] if INTERPRETER_AVAILABLE else [])]
    params = [pytest.param(name, CPU, id=f"{name}-cpu") for name in on_cpu]
    return params + [pytest.param(name, CUDA, id=f"{name}-cuda", marks=pytest.mark.gpu) for name in ON_CUDA]


def run(name: str, device: torch.device, feature: str) -> None:
    check(MOCKS.get(name) or backend_class(name), FEATURES[feature], device)


@pytest.mark.parametrize("feature", ["plain", "window", "softcap"])
@pytest.mark.parametrize(("name", "device"), _backends())
def test_masks(name: str, device: torch.device, feature: str) -> None:
    run(name, device, feature)


@pytest.mark.parametrize("feature", ["alibi", "sinks", "lse", "fp8"])
@pytest.mark.parametrize(("name", "device"), _backends())
def test_extras(name: str, device: torch.device, feature: str) -> None:
    run(name, device, feature)


@pytest.mark.parametrize("feature", ["hnd", "query_len", "batch_invariant"])
@pytest.mark.parametrize(("name", "device"), _backends())
def test_shapes(name: str, device: torch.device, feature: str) -> None:
    run(name, device, feature)


@pytest.mark.parametrize("feature", ["mixed", "mixed-window", "mixed-fp8", "mixed-large-pages"])
@pytest.mark.parametrize(("name", "device"), _backends())
def test_mixed(name: str, device: torch.device, feature: str) -> None:
    """Captured where the backend has graphs for mixed batches, else eagerly."""
    run(name, device, feature)


@pytest.mark.parametrize("broken", mocks.BROKEN, ids=lambda cls: cls.name)
def test_stale_metadata_is_noticed(broken: type) -> None:
    with pytest.raises(AssertionError):
        check(broken, FEATURES["plain"], CPU)
