"""Our own backends through the suite that other packages run: graphrt.testing.backend_contract.

On CPU the three families of metadata stand in as mocks. Skips are the backend's own refusals, which name it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.registry import backend_class
from graphrt.kernels.library import INTERPRETER_AVAILABLE
from graphrt.testing.backend_contract import ContractCase, contract_cases
from graphrt.testing.backend_features import FEATURES
from tests.support import fake_packages, mocks

ON_CUDA = ("triton", "flash_attn3", "flash_attn2", "flashinfer", "torch_reference")
FAKES = {name: fake_packages.on_cpu(backend_class(name)) for name in fake_packages.PACKAGES}

IN_OTHERS = (
    "mixed-kv_groups", "cross_attention", "cross_attention-query_len", "mixed-cross_attention-kv_groups", "window",
    "mixed-window", "mixed-fp8", "mixed-v_head_dim", "alibi",
)  # fmt: skip
"""Features whose parts are in others: the interpreter would take seconds for each."""


def cases() -> list:
    """Every backend with everything that it declares.

    Sizes and dtypes one by one are left out on CUDA and in the interpreter: test_combinations.py has them in pairs. In
    the interpreter IN_OTHERS are left out, too.
    """
    reference = backend_class("torch_reference")
    found = [case for cls in (reference, *mocks.FAMILIES) for case in contract_cases(cls, devices=["cpu"])]
    if INTERPRETER_AVAILABLE:
        few = [name for name in FEATURES if name not in IN_OTHERS]
        found += contract_cases(backend_class("triton"), devices=["cpu"], features=few, brief=True)
    for name in ON_CUDA:
        found += contract_cases(backend_class(name), devices=["cuda"], features=FEATURES)
    gpu = [pytest.mark.gpu]
    return [pytest.param(case, id=str(case), marks=gpu if case.device.type == "cuda" else []) for case in found]


@pytest.mark.parametrize("case", cases())
def test_contract(case: ContractCase) -> None:
    case.run()


def fake_cases() -> list[ContractCase]:
    """The wrapped packages on CPU, replaced by fake kernels: the code of the backends themselves is under test."""
    found = []
    for cls in FAKES.values():
        for case in contract_cases(cls):
            # What the real kernels take in 16 bits alone.
            fp8 = case.feature.kv_dtype is not None
            found.append(replace(case, feature=replace(case.feature, dtype=torch.bfloat16)) if fp8 else case)
    return found


@pytest.mark.parametrize("case", fake_cases(), ids=str)
def test_peers_over_fake_kernels(case: ContractCase, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = case.backend
    fake_packages.install_package(monkeypatch, cls.name, cls.package.module)
    case.run()


def test_every_backend_has_cases() -> None:
    """A backend without cases would pass."""
    ids = [param.id for param in cases()]
    for name in ON_CUDA:
        for feature in ("plain", "mixed", "hnd", "plain-capture_twice"):
            assert f"{name}-cuda-{feature}" in ids
    classes: list[type[AttentionBackend]] = [backend_class("torch_reference"), *mocks.FAMILIES]
    for cls in classes:
        assert sum(name.startswith(f"{cls.name}-cpu-") for name in ids) > 15
