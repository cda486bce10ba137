"""Contexts, steps and layers for host tests of the backends that wrap other packages."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.backends.base import AttentionBackend, AttentionLayer
from graphrt.backends.capabilities import BackendContext
from graphrt.backends.flash_attn2 import FlashAttention2Backend
from graphrt.backends.flash_attn3 import FlashAttention3Backend
from graphrt.backends.flashinfer import FlashInferBackend
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.types import KVLayout
from graphrt.metadata import StepMetadata
from graphrt.spec import AttentionSpec, KVCacheSpec

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
FULL, WINDOWED = AttentionSpec(8, 2, 64, BF16), AttentionSpec(8, 2, 64, BF16, sliding_window=7)
PEERS = (FlashAttention2Backend, FlashAttention3Backend, FlashInferBackend)
Calls = list[tuple[str, dict[str, Any]]]


def context(*specs: AttentionSpec, device: torch.device = CPU, page_size: int = 256, **options: Any) -> BackendContext:
    layers = specs or (FULL,)
    kv_dtype, layout = options.pop("kv_dtype", layers[0].dtype), options.pop("layout", KVLayout.NHD)
    kv = KVCacheSpec(len(layers), layers[0].num_kv_heads, layers[0].head_dim, page_size, layout, kv_dtype)
    sizes = {"max_num_reqs": 4, "max_num_tokens": 32, "max_seq_len": 4 * page_size} | options
    return BackendContext(layers, (kv,), device, **sizes)


def allocated(cls: type[AttentionBackend], *specs: AttentionSpec, **options: Any) -> tuple[Any, BackendContext]:
    """A backend with its memory, and its context."""
    asked = context(*specs, **options)
    backend = cls(asked)
    backend.allocate()
    return backend, asked


def metadata_of(asked: BackendContext, descriptor: BatchDescriptor, live: int) -> StepMetadata:
    """Metadata of `live` real tokens and padding; in mixed steps one token per request except the last real one."""
    rows, tokens = descriptor.padded_reqs, descriptor.padded_tokens
    starts = [min(row * (descriptor.query_len or 1), live) for row in range(rows)] + [live]
    slots = torch.arange(1, tokens + 1)
    slots[live:] = -1
    return StepMetadata(
        descriptor,
        seq_lens=torch.full((rows,), 5, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        block_tables=(torch.arange(rows * asked.max_pages(0), dtype=torch.int32).view(rows, -1),),
        slot_mappings=(slots,),
        encoder_lens=torch.zeros(rows, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64),
        max_seq_len=asked.max_seq_len,
    )


def layer_of(asked: BackendContext, index: int = 0, **scales: torch.Tensor) -> Any:
    kv = asked.kv_groups[0]
    k, v = (torch.zeros(3, kv.page_size, kv.num_kv_heads, kv.head_dim).to(kv.dtype) for _ in range(2))
    return AttentionLayer(index, asked.attention[index], k, v, **scales)


def step(backend: AttentionBackend, metadata: StepMetadata, q: torch.Tensor, layers: list[Any]) -> list[torch.Tensor]:
    backend.schedule(metadata)
    results = []
    for layer in layers:
        out, lse = torch.full_like(q, 777.0), torch.full(q.shape[:2], 777.0)
        backend.run(layer, q, metadata, out, lse=lse)
        results += [out, lse]
    return results
