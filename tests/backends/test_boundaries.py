"""Bounds of the wrapped packages from both sides, and conditions on layers with the decisive layer at each position."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from graphrt.backends import peer
from graphrt.backends.base import AttentionBackend
from graphrt.backends.flash_attn2 import FlashAttention2Backend
from graphrt.backends.flash_attn3 import FlashAttention3Backend
from graphrt.backends.flashinfer import FlashInferBackend
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.spec import AttentionSpec
from tests.support.fake_packages import install
from tests.support.peer_kit import BF16, CUDA, FULL, allocated, context, layer_of, metadata_of, step

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the three packages look installed to class methods."""
    taking = lambda q, k_cache, v_cache, sinks=None: None  # noqa: E731
    names = {"get_scheduler_metadata": None, "flash_attn_with_kvcache": taking}
    for module in ("flash_attn", "flash_attn_interface", "flashinfer"):
        install(monkeypatch, module, **(names if module == "flash_attn_interface" else {}))


def on_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


GENERATIONS = [
    (FlashAttention2Backend, (7, 5), "device sm_75: needs sm_80 or newer"),
    (FlashAttention2Backend, (8, 0), None),
    (FlashInferBackend, (7, 9), "device sm_79: needs sm_80 or newer"),
    (FlashInferBackend, (8, 0), None),
    (FlashAttention3Backend, (8, 9), "device sm_89: needs sm_90 or newer"),
    (FlashAttention3Backend, (9, 0), None),
    (FlashAttention3Backend, (10, 0), "device sm_10x: the kernels are compiled for sm_90a, which runs on sm_90 only"),
]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("cls", "capability", "reason"), GENERATIONS, ids=str)
def test_compute_capability(
    cls: type[AttentionBackend], capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch, capability)
    assert cls.unsupported_reasons(context(device=CUDA)) == ([] if reason is None else [reason])


VERSIONS = [
    ({}, None),
    ({"acme": "0.5.9"}, "0.5.9"),
    ({"acme": "0.6"}, None),
    ({"acme": "0.10"}, None),
    ({"acme": "0"}, "0"),
    ({"acme_cu13": "0.5"}, "0.5"),
    ({"acme": "0.6", "acme_cu13": "0.5"}, None),
    ({"acme": "0.6.4rc1"}, None),
]


@pytest.mark.parametrize(("found", "refused"), VERSIONS, ids=str)
def test_minimum_package_version(found: dict[str, str], refused: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared as numbers; the first distribution found counts; a build without metadata passes."""
    install(monkeypatch, "acme")

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(peer, "version", version)
    package = peer.Package("acme", "pip install acme", ("acme", "acme_cu13"), (0, 6), ())
    wanted = (
        None if refused is None else f"package acme: needs version 0.6, got {refused}; run pip install acme --upgrade"
    )
    assert package.missing() == wanted


def layers_with(other: AttentionSpec, at: int) -> list[AttentionSpec]:
    layers = [FULL] * 3
    layers[at] = other
    return layers


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("at", [0, 1, 2])
def test_flash_attn3_with_fp8_cache_needs_bfloat16_in_every_layer(at: int) -> None:
    half = AttentionSpec(8, 2, 64, torch.float16)
    refused = context(*layers_with(half, at), device=CUDA, kv_dtype=E4M3)
    assert FlashAttention3Backend.unsupported_reasons(refused) == [
        "KV dtype float8_e4m3fn: outputs are bfloat16, so the layers must be bfloat16"
    ]
    assert FlashAttention3Backend.unsupported_reasons(context(FULL, FULL, FULL, device=CUDA, kv_dtype=E4M3)) == []


AGREE: dict[str, dict[str, Any]] = {
    "num_q_heads 8, 16": {"num_q_heads": 16},
    "sliding_window None, 7": {"sliding_window": 7},
    "logits_softcap None, 2.0": {"logits_softcap": 2.0},
    "scale 0.125, 0.5": {"softmax_scale": 0.5},
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("text", AGREE)
def test_flashinfer_needs_equal_options_in_all_layers(text: str, at: int) -> None:
    options = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": BF16} | AGREE[text]
    asked = context(*layers_with(AttentionSpec(**options), at), device=CUDA)
    assert FlashInferBackend.unsupported_reasons(asked) == [f"{text}: must be equal, one plan serves all layers"]
    alike = context(*[AttentionSpec(**options)] * 3, device=CUDA)
    assert FlashInferBackend.unsupported_reasons(alike) == []


@pytest.mark.parametrize(("window", "biased"), [(None, True), (1023, False), (1024, False), (1025, True)])
def test_flash_attn2_removes_the_bias_from_the_lse(
    window: int | None, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window up to the width of the table, 1,024 tokens, the kernel adds no bias."""
    spec = AttentionSpec(8, 2, 64, BF16, alibi_slopes=(0.5,) * 8, sliding_window=window)
    sums = lambda q, *args, **kwargs: (torch.zeros_like(q), torch.ones(4, 8, 1))  # noqa: E731
    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=sums, flash_attn_varlen_func=None)
    backend, asked = allocated(FlashAttention2Backend, spec)
    metadata = metadata_of(asked, BatchDescriptor.decode(4), live=4)
    metadata.positions.copy_(torch.tensor([0, 4, 2, 6]))
    layer = layer_of(asked, alibi_slopes=torch.full((8,), 0.5))
    _, lse = step(backend, metadata, torch.zeros(4, 8, 64, dtype=BF16), [layer])
    assert lse[:, 0].tolist() == ([1.0, -1.0, 0.0, -2.0] if biased else [1.0] * 4)
