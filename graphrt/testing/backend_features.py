"""The features that the backend test suite covers one at a time, with layers and caches that use them.

To cover another capability, add a line to FEATURES. A feature needs a capability if its layers have an option of that
name, or if the feature has a true field or property of that name; see `Feature.needs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from graphrt.backends.base import AttentionBackend
from graphrt.backends.capabilities import BackendContext, Capabilities
from graphrt.cache.groups import kv_locations
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionKind, AttentionSpec, KVCacheSpec

ROWS = 4
SEED = 0
FLAGS = tuple(field.name for field in fields(Capabilities) if field.type == "bool")
"""The boolean capabilities. The others are tuples and the longest query."""


@dataclass(frozen=True)
class Feature:
    """One feature under test. Default field values are replaced according to the backend's declarations.

    id               name of the feature
    layers           options of each layer, by the names of AttentionSpec, and:
                     "alibi": True         use ALiBi slopes
                     "v_head_dim": 0.5     the declared head size closest to this fraction of head_dim
                     "group": 1            KV group of the layer; default 0
    same             options for backends that require equal layers
    dtype            dtype of the layers; None: bfloat16 on CUDA, float32 on CPU
    kv_dtype         dtype of the cache; None: the layers' dtype
    layout           layout of pages; None: NHD
    query_len        new tokens per request
    tree_drafts      the new tokens of each request form a tree
    context_parallel a token sees only the first keys of its request, and those may be fewer than the new tokens
    mixed            use a mixed batch instead of a decode batch
    prefill          the backend runs the prefill part of a mixed step; requests with one new token are in the decode
                     part
    page_size        tokens per page; 0: 16 on CUDA, 4 on CPU
    page_sizes       page size of each KV group as a multiple of page_size, rounded to a declared size. (): no layer has
                     a cache
    drops_pages      KV groups free pages that their layers do not see; block tables contain null pages instead
    head_dim         head size; 0: 128 on CUDA, 16 on CPU
    num_queries_per_kv   query heads per KV head; 0: 4 on CUDA, 2 on CPU
    lse              request and check the log-sum-exp
    batch_invariant  check batch invariance
    scale_per_head   fp8 caches have one scale per KV head; else one scale for all heads
    null_page_last   the null page is the last page; else page 0
    one_pool         K and V are views of one pool, so that pages of a tensor are not adjacent
    longest          longest sequence on CUDA, in tokens; 0: 640
    """

    id: str
    layers: tuple[Mapping[str, Any], ...] = ({}, {})
    same: tuple[Mapping[str, Any], ...] | None = None
    dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    layout: KVLayout | None = None
    query_len: int = 1
    tree_drafts: bool = False
    context_parallel: bool = False
    mixed: bool = False
    prefill: bool = False
    page_size: int = 0
    page_sizes: tuple[float, ...] = (1,)
    drops_pages: bool = False
    head_dim: int = 0
    num_queries_per_kv: int = 0
    lse: bool = False
    batch_invariant: bool = False
    scale_per_head: bool = True
    null_page_last: bool = False
    one_pool: bool = False
    longest: int = 0

    def __str__(self) -> str:
        return self.id

    @property
    def kv_groups(self) -> bool:
        """Whether there are several KV groups."""
        return any(layer.get("group") for layer in self.layers)

    @property
    def cross_attention(self) -> bool:
        """Whether there is a cross layer."""
        return any(layer.get("kind") is AttentionKind.CROSS for layer in self.layers)

    @property
    def encoder_attention(self) -> bool:
        """Whether there is an encoder layer. If so, requests have all their tokens in one step."""
        return any(layer.get("kind") is AttentionKind.ENCODER for layer in self.layers)

    @property
    def needs(self) -> frozenset[str]:
        """The boolean Capabilities that a backend must declare: layer options, and true fields of the feature."""
        options = {name for layer in self.layers for name in layer}
        needed = {name for name in FLAGS if name in options or getattr(self, name, False)}
        return frozenset(needed - {"mixed"} if self.prefill else needed)  # a prefill part is not a whole mixed step


WINDOW = {"sliding_window": 5}
CHUNKS = {"attention_chunk_size": 6}  # starts within a page of 4 or 16
ALIBI = {"alibi": True}
_SCALE = {"softmax_scale": 0.3}
_GROUP = {"group": 1, "num_kv_heads": 1}  # with a different number of heads
_CROSS = {"kind": AttentionKind.CROSS}
_ENCODER = {"kind": AttentionKind.ENCODER}
_NEAR = _ENCODER | WINDOW

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
        Feature("num_queries_per_kv-3", num_queries_per_kv=3),
        Feature("one-pool", one_pool=True),
        Feature("null-page-last", null_page_last=True),
        Feature("splits", layers=({},), page_size=32),  # several tiles per request, split and merged, also on a CPU
        Feature("query_len", query_len=3, lse=True),
        Feature("tree_drafts", query_len=5, tree_drafts=True, lse=True),
        Feature("tree_drafts-window", ({"sliding_window": 9}, {}), query_len=8, tree_drafts=True),
        Feature("context_parallel", query_len=3, context_parallel=True, lse=True),
        Feature("mixed-context_parallel", mixed=True, context_parallel=True, lse=True),
        Feature("mixed", mixed=True, lse=True),
        Feature("mixed-window", layers=(WINDOW, {}), same=(WINDOW, WINDOW), mixed=True),
        Feature("mixed-fp8", kv_dtype=torch.float8_e4m3fn, mixed=True),
        Feature("mixed-large-pages", mixed=True, page_size=128),
        Feature("v_head_dim", layers=({"v_head_dim": 0.5},), lse=True),
        Feature("mixed-v_head_dim", layers=({"v_head_dim": 1.5},), mixed=True),
        Feature("attention_chunk_size", layers=(CHUNKS, {}), same=(CHUNKS, CHUNKS), lse=True),
        Feature("mixed-attention_chunk_size", layers=(CHUNKS,), drops_pages=True, mixed=True),
        Feature("chunks-of-many-tiles", layers=({"attention_chunk_size": 330},), lse=True, longest=640),
        Feature("window-pages", layers=(WINDOW,), drops_pages=True),
        # The last layer reads the cache of the first, after a layer of a different group.
        Feature("kv_groups", layers=({}, _GROUP, {"kv_shared_with": 0}), page_sizes=(1, 2), lse=True),
        Feature("mixed-kv_groups", layers=({}, {"group": 1}), page_sizes=(1, 0.5), mixed=True),
        Feature(
            "mixed-kv_groups-window", ({}, {"group": 1} | WINDOW), page_sizes=(1, 0.5), drops_pages=True, mixed=True
        ),
        Feature("prefill", mixed=True, prefill=True, lse=True),
        Feature("prefill-window", layers=(WINDOW, {}), same=(WINDOW, WINDOW), mixed=True, prefill=True),
        Feature("cross_attention", layers=(_CROSS,), lse=True),
        Feature("cross_attention-query_len", layers=(_CROSS,), query_len=3),
        Feature("cross_attention-kv_groups", layers=({}, _CROSS | {"group": 1}), page_sizes=(1, 0.5)),
        Feature("mixed-cross_attention", layers=(_CROSS,), mixed=True, lse=True),
        Feature("mixed-cross_attention-kv_groups", ({}, _CROSS | {"group": 1}), page_sizes=(1, 0.5), mixed=True),
        Feature("cross_attention-fp8", layers=(_CROSS,), kv_dtype=torch.float8_e4m3fn),
        Feature("encoder_attention", layers=(_ENCODER, {}), query_len=3, lse=True),
        Feature("mixed-encoder_attention", layers=(_ENCODER,), page_sizes=(), mixed=True, lse=True),
        Feature("mixed-encoder_attention-window", (_NEAR, _ENCODER), same=(_NEAR, _NEAR), page_sizes=(), mixed=True),
        Feature("batch_invariant", batch_invariant=True),
        Feature("batch_invariant-query_len", query_len=3, batch_invariant=True),
        Feature("batch_invariant-mixed", mixed=True, batch_invariant=True),
        Feature("batch_invariant-cross_attention", layers=(_CROSS,), batch_invariant=True),
    )
}
"""Every feature that a backend may declare, by id."""


def declared_features(cls: type[AttentionBackend], device: torch.device) -> list[Feature]:
    """Return all features that a class declares for a device, and a plain case per dtype, head size and page size.

    Features request the log-sum-exp only if the class declares it.
    """
    have = cls.capabilities
    sized = [Feature(f"dtype-{str(dtype).removeprefix('torch.')}", dtype=dtype) for dtype in have.dtypes]
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
    """Return the smallest, the middle and the largest size."""
    ordered = sorted(sizes)
    return list(dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))


def declares(cls: type[AttentionBackend], feature: Feature, device: torch.device) -> bool:
    """Return whether a class declares a feature. If so, its case runs or is skipped with `unsupported_reasons`."""
    have = cls.capabilities
    dtype, stored = dtypes_of(have, feature, device)
    return (
        device.type in have.devices
        and all(getattr(have, name) for name in feature.needs)
        and dtype in have.dtypes
        and stored in have.kv_dtypes
        and stored in (dtype, *FP8_DTYPES)
        and (have.head_dims is None or not feature.head_dim or feature.head_dim in have.head_dims)
        and (have.head_dims is None or "v_head_dim" not in feature.needs or len(have.head_dims) > 1)
        and (have.page_sizes is None or not feature.page_size or feature.page_size in have.page_sizes)
        and not (feature.longest and device.type == "cpu")
        and (feature.layout is None or feature.layout in have.layouts)
        and feature.query_len <= have.max_query_len
    )


def dtypes_of(have: Capabilities, feature: Feature, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of layers and cache, from the feature, else common dtypes that the backend declares."""
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    equal = [dtype for dtype in have.dtypes if dtype in have.kv_dtypes] or list(have.dtypes)
    dtype = feature.dtype or (usual if usual in equal else equal[0])
    return dtype, feature.kv_dtype or (dtype if dtype in have.kv_dtypes else have.kv_dtypes[0])


def contexts_of(cls: type[AttentionBackend], feature: Feature, device: torch.device, rows: int) -> list[BackendContext]:
    """Return the contexts for which to build the backend, one with the feature's layers, and one with equal layers."""
    have, cuda = cls.capabilities, device.type == "cuda"
    kv_heads, queries_per_kv = 2, feature.num_queries_per_kv or (4 if cuda else 2)
    dtype, stored = dtypes_of(have, feature, device)
    head_dim = feature.head_dim or _usual(128 if cuda else 16, have.head_dims)
    page_size = feature.page_size or _usual(16 if cuda else 4, have.page_sizes)
    max_pages = max(4, (feature.longest or 640) // page_size) if cuda else (4 if page_size < 64 else 2)
    max_seq_len = max_pages * page_size
    page_sizes = [_nearest(part * page_size, have.page_sizes) for part in feature.page_sizes]
    last_page = rows * max((-(-max_seq_len // size) for size in page_sizes), default=0)
    cache = KVCacheSpec(
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layout=feature.layout or (KVLayout.NHD if KVLayout.NHD in have.layouts else have.layouts[0]),
        dtype=stored,
        null_page=last_page if feature.null_page_last else 0,
    )
    max_num_tokens = max(
        (640 if feature.encoder_attention else 64) if cuda else 12, max(ROWS, rows) * feature.query_len
    )
    contexts = []
    for layers in (feature.layers, feature.same or feature.layers):
        plain = AttentionSpec(kv_heads * queries_per_kv, kv_heads, head_dim, dtype)
        specs = tuple(_spec(options, plain, have.head_dims) for options in layers)
        groups = tuple(
            _group(number, replace(cache, page_size=size), layers, specs, drops_pages=feature.drops_pages)
            for number, size in enumerate(page_sizes)
        )
        contexts.append(
            BackendContext(
                attention=specs,
                kv_groups=groups,
                group_of=tuple(None if x is None else x.group for x in kv_locations(specs, groups)),
                device=device,
                max_num_reqs=max(ROWS, rows),
                max_num_tokens=max_num_tokens,
                max_seq_len=max_seq_len,
                max_query_len=feature.query_len,
                batch_invariant=feature.batch_invariant,
                tree_drafts=feature.tree_drafts,
                context_parallel=feature.context_parallel,
                mixed_batches=have.mixed or feature.prefill,
                prefill=feature.prefill,
                # Longer than a sequence, and not a multiple of the page size.
                max_encoder_len=max_seq_len + page_size // 2 + 1 if feature.cross_attention else 0,
            )
        )
    return contexts


def _usual(wanted: int, declared: tuple[int, ...] | None) -> int:
    return wanted if declared is None or wanted in declared else min(declared)


def _nearest(wanted: float, declared: Sequence[int] | None) -> int:
    return int(wanted) if declared is None else min(declared, key=lambda size: abs(size - wanted))


def _spec(options: Mapping[str, Any], plain: AttentionSpec, head_dims: tuple[int, ...] | None) -> AttentionSpec:
    """Return the spec of a plain layer with these options."""
    changes = {name: value for name, value in options.items() if name not in ("alibi", "group")}
    if options.get("alibi"):
        changes["alibi_slopes"] = tuple(0.03 * (1 + head) for head in range(plain.num_q_heads))
    if "v_head_dim" in options:
        others = None if head_dims is None else [size for size in head_dims if size != plain.head_dim]
        changes["v_head_dim"] = _nearest(options["v_head_dim"] * plain.head_dim, others)
    return replace(plain, **changes)


def _group(
    number: int,
    cache: KVCacheSpec,
    layers: Sequence[Mapping[str, Any]],
    specs: Sequence[AttentionSpec],
    *,
    drops_pages: bool,
) -> KVCacheSpec:
    """Return the spec of a KV group, `cache` with the heads of its layers and, if pages are dropped, their window or
    chunks."""
    owners = [at for at, spec in enumerate(specs) if spec.is_cached and spec.kv_shared_with is None]
    own = [cache_layer for cache_layer, at in enumerate(owners) if layers[at].get("group", 0) == number]
    spec = specs[owners[own[0]]]
    return replace(
        cache,
        num_layers=len(own),
        layers=tuple(own),
        num_kv_heads=spec.num_kv_heads,
        v_head_dim=spec.v_head_dim,
        sliding_window=spec.sliding_window if drops_pages else None,
        attention_chunk_size=spec.attention_chunk_size if drops_pages else None,
        cross=spec.is_cross,
    )
