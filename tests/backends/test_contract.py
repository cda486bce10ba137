"""Every backend through one contract: replay is eager bitwise, right, and free of stale metadata, padding and NaN.

On CPU the three families of metadata stand in as mocks, and broken ones show that the check notices what it is for.
Skips are the backend's own refusals, which name it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.registry import backend_class
from graphrt.kernels.library import INTERPRETER_AVAILABLE
from tests.backends import fake_packages, mocks
from tests.backends.contract import FEATURES, Feature, check, check_batch_invariance, check_retry, declares

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FAKES = {name: fake_packages.on_cpu(backend_class(name)) for name in fake_packages.PACKAGES}
MOCKS = {cls.name: cls for cls in mocks.FAMILIES}
ON_CUDA = ("triton", "flash_attn3", "flash_attn2", "flashinfer", "torch_reference")


def cases(*features: str) -> list:
    """Every backend with every one of the features that it declares."""
    on_cpu = ["torch_reference", *MOCKS, *(["triton"] if INTERPRETER_AVAILABLE else [])]
    params = []
    for device, names in ((CPU, on_cpu), (CUDA, ON_CUDA)):
        marks = [pytest.mark.gpu] if device is CUDA else []
        for name in names:
            cls = MOCKS.get(name) or backend_class(name)
            for feature in features:
                if declares(cls, FEATURES[feature], device):
                    params.append(pytest.param(cls, feature, device, id=f"{name}-{device.type}-{feature}", marks=marks))
    return params


@pytest.mark.parametrize(("cls", "feature", "device"), cases("plain", "window", "softcap"))
def test_masks(cls: type[AttentionBackend], feature: str, device: torch.device) -> None:
    check(cls, FEATURES[feature], device)


@pytest.mark.parametrize(("cls", "feature", "device"), cases("alibi", "sinks", "sinks-many-splits", "lse", "fp8"))
def test_extras(cls: type[AttentionBackend], feature: str, device: torch.device) -> None:
    check(cls, FEATURES[feature], device)


@pytest.mark.parametrize(("cls", "feature", "device"), cases("hnd", "query_len"))
def test_shapes(cls: type[AttentionBackend], feature: str, device: torch.device) -> None:
    check(cls, FEATURES[feature], device)


@pytest.mark.parametrize(("cls", "feature", "device"), cases("mixed", "mixed-window", "mixed-fp8", "mixed-large-pages"))
def test_mixed(cls: type[AttentionBackend], feature: str, device: torch.device) -> None:
    """Captured where the backend has graphs for mixed batches, else eagerly."""
    check(cls, FEATURES[feature], device)


INVARIANT = ("batch_invariant", "batch_invariant-query_len", "batch_invariant-mixed")


@pytest.mark.parametrize(("cls", "feature", "device"), cases(*INVARIANT))
def test_batch_invariance(cls: type[AttentionBackend], feature: str, device: torch.device) -> None:
    check_batch_invariance(cls, FEATURES[feature], device)


@pytest.mark.parametrize(("cls", "feature", "device"), cases("plain", "mixed"))
def test_allocate_and_capture_twice(cls: type[AttentionBackend], feature: str, device: torch.device) -> None:
    check_retry(cls, FEATURES[feature], device)


def fake_cases(*features: str) -> list:
    """The peers on CPU, over kernels that only compute as theirs do: what the backends themselves do is under test."""
    params = []
    for name, on_cpu in FAKES.items():
        for feature in (FEATURES[f] for f in features or FEATURES):
            # What the real kernels take in 16 bits alone.
            asked = replace(feature, dtype=torch.bfloat16) if feature.kv_dtype is not None else feature
            if declares(on_cpu, asked, CPU):
                params.append(pytest.param(on_cpu, asked, id=f"{name}-{feature.id}"))
    return params


@pytest.mark.parametrize(("cls", "feature"), fake_cases())
def test_peers_over_fake_kernels(
    cls: type[AttentionBackend], feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_package(monkeypatch, cls.name, cls.package.module)
    check(cls, feature, CPU)


@pytest.mark.parametrize(("cls", "feature"), fake_cases("plain", "mixed"))
def test_peers_over_fake_kernels_allocate_twice(
    cls: type[AttentionBackend], feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_package(monkeypatch, cls.name, cls.package.module)
    check_retry(cls, feature, CPU)


@pytest.mark.parametrize(("cls", "feature"), fake_cases(*INVARIANT))
def test_batch_invariance_over_fake_kernels(
    cls: type[AttentionBackend], feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_package(monkeypatch, cls.name, cls.package.module)
    check_batch_invariance(cls, feature, CPU)


def test_a_row_that_depends_on_the_size_of_its_graph_is_noticed() -> None:
    """As it would be with splits that follow from the number of rows."""
    with pytest.raises(AssertionError, match="a row of 16 with others"):
        check_batch_invariance(mocks.SplitsByRows, FEATURES["plain"], CPU)


def test_buffers_of_the_first_attempt_are_noticed() -> None:
    check(mocks.BuffersOfTheFirstAttempt, FEATURES["plain"], CPU)
    with pytest.raises(AssertionError, match="max error"):
        check_retry(mocks.BuffersOfTheFirstAttempt, FEATURES["plain"], CPU)


@pytest.mark.parametrize("broken", mocks.BROKEN, ids=lambda cls: cls.name)
def test_stale_metadata_is_noticed(broken: type) -> None:
    with pytest.raises(AssertionError):
        check(broken, FEATURES["plain"], CPU)
