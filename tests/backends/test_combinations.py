"""Every pair of values of what a backend declares: a covering array per class, checked in brief."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.registry import backend_class
from graphrt.kernels.library import INTERPRETER_AVAILABLE
from graphrt.kernels.types import KVLayout
from graphrt.testing.backend_contract import check_steps
from graphrt.testing.backend_features import ALIBI, WINDOW, Feature
from tests.backends.conftest import FLASHINFER_MODULES
from tests.support import fake_packages, mocks
from tests.support.covering import covering_array

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
F32, F16, BF16, E4M3, E5M2 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
MOST = 40  # cases of one backend
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": WINDOW,
    "softcap": {"logits_softcap": 2.0},
    "window_softcap": WINDOW | {"logits_softcap": 2.0},
    "alibi": ALIBI,
    "sinks": {"sinks": True},
}
KINDS: dict[str, dict[str, Any]] = {"decode": {}, "query_len": {"query_len": 3}, "mixed": {"mixed": True}}


def types_of(cls: type[AttentionBackend]) -> list[tuple[torch.dtype, torch.dtype]]:
    """Dtypes of layers and cache: equal, and each fp8 dtype with one layer dtype."""
    have = cls.capabilities
    types = [(dtype, dtype) for dtype in (BF16, F16, F32) if dtype in have.dtypes and dtype in have.kv_dtypes]
    for fp8, dtype in ((E4M3, BF16), (E5M2, F16)):
        partner = dtype if dtype in have.dtypes else have.dtypes[0]
        types += [(partner, fp8)] if fp8 in have.kv_dtypes else []
    return types


def factors_of(cls: type[AttentionBackend], device: torch.device) -> dict[str, list[Any]]:
    """What is varied: only what the class declares. Dtypes, head size and mask are one factor where each combination
    is a module of its own to compile."""
    have, cuda = cls.capabilities, device.type == "cuda"
    masks = {"sliding_window": "window", "logits_softcap": "softcap", "alibi": "alibi", "sinks": "sinks"}
    names = ["full", *(mask for flag, mask in masks.items() if getattr(have, flag))]
    if {"window", "softcap"} <= set(names):
        names[names.index("softcap")] = "window_softcap"
    many_head_dims = have.head_dims is None or len(have.head_dims) > 4
    head_dims = ([64, 80, 128, 256] if cuda else [16, 24]) if many_head_dims else list(have.head_dims or ())
    page_sizes = ([16, 64, 256] if cuda else [1, 4, 6]) if have.page_sizes is None else list(have.page_sizes)[:3]
    kernels: dict[str, list[Any]] = {"types": types_of(cls), "head_dim": head_dims, "mask": names}
    if cls.name == "flashinfer" and cuda:
        kernels = {"module": list(FLASHINFER_MODULES)}
    return kernels | {
        "page_size": page_sizes,
        "layout": [layout for layout in KVLayout if layout in have.layouts],
        "scale_per_head": [False, True],
        "kind": ["decode", *(["query_len"] if have.max_query_len >= 3 else []), *(["mixed"] if have.mixed else [])],
        "lse": [False, True] if have.lse else [False],
    }


def feature_of(row: dict[str, Any]) -> Feature:
    module = row.get("module")
    (dtype, kv_dtype), head_dim, mask = module or (row["types"], row["head_dim"], row["mask"])
    words = [dtype, kv_dtype, head_dim, mask, row["page_size"], row["layout"].value, row["kind"]]
    flags = [name for name in ("scale_per_head", "lse") if row[name]]
    return Feature(
        "-".join(str(word).removeprefix("torch.") for word in [*words, *flags]),
        layers=(MASKS[mask],) * 2,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim=head_dim,
        page_size=row["page_size"],
        layout=row["layout"],
        scale_per_head=row["scale_per_head"],
        lse=row["lse"],
        **KINDS[row["kind"]],
    )


def features_of(cls: type[AttentionBackend], device: torch.device) -> list[Feature]:
    return [feature_of(row) for row in covering_array(factors_of(cls, device))]


def cases() -> list:
    """All on CUDA; on CPU as many as are quick: an interpreted launch takes half a second."""
    ours = [backend_class("torch_reference"), *([backend_class("triton")] if INTERPRETER_AVAILABLE else [])]
    peers = [fake_packages.on_cpu(backend_class(name)) for name in fake_packages.PACKAGES]
    on_cpu = [(cls, CPU, 5 if cls.name == "triton" else 12) for cls in (*ours, *peers, *mocks.FAMILIES)]
    names = ("triton", *fake_packages.PACKAGES, "torch_reference")
    params = []
    for cls, device, count in (*on_cpu, *((backend_class(name), CUDA, MOST) for name in names)):
        marks = [pytest.mark.gpu] if device is CUDA else []
        for feature in features_of(cls, device)[:count]:
            params.append(pytest.param(cls, feature, device, id=f"{cls.name}-{device.type}-{feature.id}", marks=marks))
    return params


@pytest.mark.parametrize(("cls", "feature", "device"), cases())
def test_combinations(
    cls: type[AttentionBackend], feature: Feature, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device is CPU and cls.name in fake_packages.PACKAGES:
        fake_packages.install_package(monkeypatch, cls.name, cls.package.module)
    check_steps(cls, feature, device, brief=True)
