"""What the contract suite asks of a backend: one feature at a time, and the layers and cache that have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphrt.backends.base import AttentionBackend, BackendContext, Capabilities
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionSpec, KVCacheSpec

ROWS = 4
SEED = 0
_OPTIONS = ("sliding_window", "logits_softcap", "alibi", "alibi_sqrt", "sinks")


@dataclass(frozen=True)
class Feature:
    """What a case asks of a backend. Where a field says nothing, the case takes what the backend declares.

    layers           options of each layer's spec; `{"alibi": True}` stands for slopes
    same             options for a backend that wants all layers alike
    dtype            of the layers; None: bfloat16 on CUDA, float32 on CPU
    kv_dtype         of the cache; None: that of the layers
    layout           None: NHD
    query_len        new tokens per row
    mixed            a mixed batch instead of a decode batch
    page_size        0: 16 on CUDA, 4 on CPU
    head_dim         0: 128 on CUDA, 16 on CPU
    group            query heads per KV head
    lse              the log-sum-exp is asked for and checked
    scale_per_head   scales of an fp8 cache are one per KV head; else one for all
    null_page_last   the null page is the last page; else page 0
    one_pool         K and V are views of one pool, so that pages do not follow each other
    longest          longest sequence on CUDA, in tokens; 0: 640
    """

    id: str
    layers: tuple[Mapping[str, Any], ...] = ({}, {})
    same: tuple[Mapping[str, Any], ...] | None = None
    dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    layout: KVLayout | None = None
    query_len: int = 1
    mixed: bool = False
    page_size: int = 0
    head_dim: int = 0
    group: int = 0
    lse: bool = False
    batch_invariant: bool = False
    scale_per_head: bool = True
    null_page_last: bool = False
    one_pool: bool = False
    longest: int = 0

    def __str__(self) -> str:
        return self.id


WINDOW = {"sliding_window": 5}
ALIBI = {"alibi": True}
_SCALE = {"softmax_scale": 0.3}

FEATURES = {
    feature.id: feature
    for feature in (
        Feature("plain"),
        Feature("scale", layers=(_SCALE, {}), same=(_SCALE, _SCALE)),
        Feature("window", layers=(WINDOW, {}), same=(WINDOW, WINDOW)),
        Feature("softcap", layers=({"logits_softcap": 2.0},) * 2),
        Feature("alibi", layers=(ALIBI,) * 2, lse=True),
        Feature("alibi-sqrt", layers=(ALIBI | {"alibi_sqrt": True},) * 2, lse=True),
        Feature("sinks", layers=({"sinks": True},) * 2, lse=True),
        Feature("sinks-many-splits", layers=({"sinks": True},) * 2, lse=True, longest=8192),
        Feature("lse", lse=True),
        Feature("fp8", kv_dtype=torch.float8_e4m3fn, lse=True),
        Feature("fp8-e5m2", kv_dtype=torch.float8_e5m2),
        Feature("hnd", layout=KVLayout.HND),
        Feature("group-3", group=3),
        Feature("one-pool", one_pool=True),
        Feature("null-page-last", null_page_last=True),
        Feature("query_len", query_len=3, lse=True),
        Feature("mixed", mixed=True, lse=True),
        Feature("mixed-window", layers=(WINDOW, {}), same=(WINDOW, WINDOW), mixed=True),
        Feature("mixed-fp8", kv_dtype=torch.float8_e4m3fn, mixed=True),
        Feature("mixed-large-pages", mixed=True, page_size=128),
        Feature("batch_invariant", batch_invariant=True),
        Feature("batch_invariant-query_len", query_len=3, batch_invariant=True),
        Feature("batch_invariant-mixed", mixed=True, batch_invariant=True),
    )
}
"""Every feature that a backend may declare, by name."""


def declared_features(cls: type[AttentionBackend], device: torch.device) -> list[Feature]:
    """Every feature that the class declares for a device, and a plain case of each dtype, head size and page size.

    An lse is asked for only of a backend that declares it.
    """
    have = cls.capabilities
    sized = [Feature(f"dtype-{_name(dtype)}", dtype=dtype) for dtype in have.dtypes]
    sized += [Feature(f"head_dim-{size}", head_dim=size) for size in _few(have.head_dims or (24, 80))]
    sized += [Feature(f"page_size-{size}", page_size=size) for size in _few(have.page_sizes or (1, 6, 16))]
    named = [
        replace(
            feature,
            lse=feature.lse and (have.lse or feature.id == "lse"),
            query_len=min(feature.query_len, max(2, have.max_query_len)),
        )
        for feature in FEATURES.values()
    ]
    return [feature for feature in (*named, *sized) if declares(cls, feature, device)]


def _few(sizes: tuple[int, ...]) -> list[int]:
    """The smallest, the largest and one between."""
    ordered = sorted(sizes)
    return list(dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))


def declares(cls: type[AttentionBackend], feature: Feature, device: torch.device) -> bool:
    """Whether the class says that it has the feature. It is then run, or skipped with the class's own reasons."""
    have, options = cls.capabilities, {name for layer in feature.layers for name in layer}
    dtype, stored = dtypes_of(have, feature, device)
    return (
        device.type in have.devices
        and all(getattr(have, name) for name in _OPTIONS if name in options)
        and dtype in have.dtypes
        and stored in have.kv_dtypes
        and stored in (dtype, *FP8_DTYPES)
        and (have.head_dims is None or not feature.head_dim or feature.head_dim in have.head_dims)
        and (have.page_sizes is None or not feature.page_size or feature.page_size in have.page_sizes)
        and not (feature.longest and device.type == "cpu")
        and (feature.layout is None or feature.layout in have.layouts)
        and feature.query_len <= have.max_query_len
        and (have.lse or not feature.lse)
        and (have.mixed or not feature.mixed)
        and (have.batch_invariant or not feature.batch_invariant)
    )


def dtypes_of(have: Capabilities, feature: Feature, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of the layers and of the cache: those that the feature names, else usual ones that the backend has."""
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    equal = [dtype for dtype in have.dtypes if dtype in have.kv_dtypes] or list(have.dtypes)
    dtype = feature.dtype or (usual if usual in equal else equal[0])
    return dtype, feature.kv_dtype or (dtype if dtype in have.kv_dtypes else have.kv_dtypes[0])


def contexts_of(cls: type[AttentionBackend], feature: Feature, device: torch.device, rows: int) -> list[BackendContext]:
    """What to build the backend for: with the feature's layers, and with layers that are all alike."""
    have, cuda = cls.capabilities, device.type == "cuda"
    kv_heads, group = 2, feature.group or (4 if cuda else 2)
    dtype, stored = dtypes_of(have, feature, device)
    head_dim = feature.head_dim or _usual(128 if cuda else 16, have.head_dims)
    page_size = feature.page_size or _usual(16 if cuda else 4, have.page_sizes)
    layout = feature.layout or (KVLayout.NHD if KVLayout.NHD in have.layouts else have.layouts[0])
    max_pages = max(4, (feature.longest or 640) // page_size) if cuda else (4 if page_size < 64 else 2)
    null_page = rows * max_pages if feature.null_page_last else 0
    contexts = []
    for options in (feature.layers, feature.same or feature.layers):
        kv = KVCacheSpec(len(options), kv_heads, head_dim, page_size, layout, stored, null_page)
        contexts.append(
            BackendContext(
                attention=tuple(_spec(o, kv_heads * group, kv_heads, head_dim, dtype) for o in options),
                kv_groups=(kv,),
                device=device,
                max_num_reqs=max(ROWS, rows),
                max_num_tokens=64 if cuda else 12,
                max_seq_len=max_pages * page_size,
                max_query_len=feature.query_len,
                batch_invariant=feature.batch_invariant,
                mixed_batches=have.mixed,
            )
        )
    return contexts


def _usual(wanted: int, declared: tuple[int, ...] | None) -> int:
    return wanted if declared is None or wanted in declared else min(declared)


def _spec(
    options: Mapping[str, Any], num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> AttentionSpec:
    others = {name: value for name, value in options.items() if name != "alibi"}
    if options.get("alibi"):
        others["alibi_slopes"] = tuple(0.03 * (1 + head) for head in range(num_q_heads))
    return AttentionSpec(num_q_heads, num_kv_heads, head_dim, dtype, **others)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
