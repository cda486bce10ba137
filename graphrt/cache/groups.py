"""KV groups: which layers share a block table, and where the cache stores the keys and values of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from graphrt.kernels.checks import check_instance, check_int, check_sequence
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionSpec, KVCacheSpec

_MAX_PADDING = 1.25
"""If the layer counts of all kinds differ by at most this factor, each kind gets one group; smaller ones are padded."""


@dataclass(frozen=True, slots=True)
class KVLocation:
    """Where an attention layer finds its keys and values.

    group        KV group
    cache_layer  index of the cache layer; only layers with their own KV are counted
    writes       whether the layer writes them in a step; False if an earlier layer or an encoder writes them
    """

    group: int
    cache_layer: int
    writes: bool


def kv_groups(
    attention: Sequence[AttentionSpec],
    *,
    page_size: int = 16,
    layout: KVLayout = KVLayout.NHD,
    dtype: torch.dtype | None = None,
    null_page: int | Literal["last"] = 0,
    context_parallel_size: int = 1,
    interleave_size: int = 1,
) -> tuple[KVCacheSpec, ...]:
    """Return the KV groups of a model's layers, for `Runtime` and `KVCache.allocate`; one group if all are alike.

        five layers with a window of 1,024, one without, five with, one without:

        group 0   layers 0 1      group 2   layers 4 6      group 4   layers 9 10
        group 1   layers 2 3      group 3   layers 7 8      group 5   layers 5 11, without a window

    Layers with equal heads, window and chunk size are of one kind. A kind with more layers than the smallest kind is
    split into groups of that size. A page then has the same number of bytes in each group, and the pages of all groups
    come from one pool. Groups with a window keep only the pages of the window. Cross layers are a separate kind.
    Encoder layers have no KV cache, so a model with only encoder layers has no groups.

    attention   the spec of every layer, in order; layers with kv_shared_with store no KV
    page_size   tokens per page of the kind with the most bytes per token. If the bytes per token of a different kind
                divide this number of bytes, its pages hold proportionally more tokens; otherwise the kind gets its own
                pool
    layout      memory layout of a page
    dtype       dtype of the cache; None: the dtype of the layers
    null_page   page id that padding requests read, which no sequence may own
    context_parallel_size, interleave_size   as in KVCacheSpec, for all groups

    Raises: ConfigError: if `attention` is not a non-empty sequence of AttentionSpec, if no layer has its own KV, or if
    kv_shared_with does not name a matching earlier layer.
    """
    page_size = check_int("page_size", page_size, 1, 1024, advice="16 is usual")
    if dtype is not None:
        check_instance("dtype", dtype, torch.dtype, advice="pass None to use the dtype of the layers")
    if not check_sequence("attention", attention, of="AttentionSpec per layer", error=ConfigError):
        raise ConfigError("attention: expected at least 1 AttentionSpec, got none; pass one spec per layer")
    for index, spec in enumerate(attention):
        check_instance(f"attention[{index}]", spec, AttentionSpec, advice="pass one spec per layer")
    kinds: dict[tuple[object, ...], list[int]] = {}
    owners = [spec for spec in attention if _owns(spec)]
    for number, spec in enumerate(owners):
        kind = (spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.sliding_window, spec.attention_chunk_size)
        kinds.setdefault((*kind, spec.is_cross, spec.dtype if dtype is None else dtype), []).append(number)
    if not any(spec.is_cached for spec in attention):
        return ()
    if not kinds:
        raise ConfigError(
            "attention: every layer reads the KV of another layer; omit kv_shared_with in the first layer"
        )
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most <= _MAX_PADDING * fewest else fewest
    largest = max(_token_bytes(owners[layers[0]], dtype) for layers in kinds.values())
    pools: dict[int, int] = {}
    groups = []
    for layers in kinds.values():
        spec = owners[layers[0]]
        times, rest = divmod(largest, _token_bytes(spec, dtype))
        tokens = page_size * times if not rest and page_size * times <= 1024 else page_size
        pool = pools.setdefault(tokens * _token_bytes(spec, dtype), len(pools))
        for first in range(0, len(layers), size):
            of_group = tuple(layers[first : first + size])
            groups.append(
                KVCacheSpec(
                    num_layers=len(of_group),
                    num_kv_heads=spec.num_kv_heads,
                    head_dim=spec.head_dim,
                    v_head_dim=spec.v_head_dim,
                    page_size=tokens,
                    layout=layout,
                    dtype=spec.dtype if dtype is None else dtype,
                    null_page=null_page,
                    sliding_window=spec.sliding_window,
                    attention_chunk_size=spec.attention_chunk_size,
                    layers=of_group,
                    pool=pool,
                    cross=spec.is_cross,
                    context_parallel_size=context_parallel_size,
                    interleave_size=interleave_size,
                )
            )
    if len(groups) == 1:
        groups = [replace(groups[0], layers=None)]
    kv_locations(attention, groups)
    return tuple(groups)


def _owns(spec: AttentionSpec) -> bool:
    """Return whether the cache stores KV of this layer."""
    return spec.is_cached and spec.kv_shared_with is None


def _token_bytes(spec: AttentionSpec, dtype: torch.dtype | None) -> int:
    return spec.num_kv_heads * (spec.head_dim + spec.value_dim) * (spec.dtype if dtype is None else dtype).itemsize


def kv_locations(attention: Sequence[AttentionSpec], groups: Sequence[KVCacheSpec]) -> tuple[KVLocation | None, ...]:
    """Return where each attention layer finds its keys and values; None for encoder layers, which have no cache.

    Layers with their own KV are numbered in order; `KVCacheSpec.layers` contains these numbers. A layer with
    kv_shared_with reads the KV of its source. Raises: ConfigError: if groups and layers do not match.
    """
    group_of = cache_layer_groups(groups)
    owners = [index for index, spec in enumerate(attention) if _owns(spec)]
    if len(owners) != len(group_of):
        raise ConfigError(
            f"attention: expected {len(group_of)} layers with their own KV, as in the cache, got {len(owners)} among "
            f"{len(attention)}; pass the specs that the cache was built for"
        )
    number = {index: at for at, index in enumerate(owners)}
    locations: list[KVLocation | None] = []
    for index, spec in enumerate(attention):
        if not spec.is_cached:
            locations.append(None)
            continue
        source = index if spec.kv_shared_with is None else spec.kv_shared_with
        if source not in number or source > index:
            raise ConfigError(
                f"attention[{index}].kv_shared_with: layer {source} is not an earlier layer with its own KV; pass the "
                "index of such a layer"
            )
        location = KVLocation(group_of[number[source]], number[source], source == index and not spec.is_cross)
        _check_fit(f"attention[{index}]", spec, groups[location.group])
        locations.append(location)
    return tuple(locations)


def cache_layer_groups(groups: Sequence[KVCacheSpec]) -> tuple[int, ...]:
    """Return the group of each cache layer. Raises: ConfigError: if a layer is in no group or in several."""
    if len(groups) == 1 and groups[0].layers is None:
        return (0,) * groups[0].num_layers
    found: dict[int, int] = {}
    for index, group in enumerate(groups):
        if group.layers is None:
            raise ConfigError(f"groups[{index}].layers: required if there are several groups; list the group's layers")
        for layer in group.layers:
            if layer in found:
                raise ConfigError(
                    f"groups[{index}].layers: layer {layer} is also in group {found[layer]}; list each layer once"
                )
            found[layer] = index
    if sorted(found) != list(range(len(found))):
        raise ConfigError(
            f"groups: expected layers 0 to {len(found) - 1}, got {sorted(found)}; list every cache layer in one group"
        )
    return tuple(found[layer] for layer in range(len(found)))


def _check_fit(name: str, layer: AttentionSpec, group: KVCacheSpec) -> None:
    """Raise ConfigError unless the group keeps all keys and values that the layer reads."""
    for field, want, got in (
        ("num_kv_heads", group.num_kv_heads, layer.num_kv_heads),
        ("head_dim", group.head_dim, layer.head_dim),
        ("v_head_dim", group.value_dim, layer.value_dim),
        ("kind", "cross" if group.cross else "decoder", layer.kind.value),
        ("attention_chunk_size", group.attention_chunk_size or layer.attention_chunk_size, layer.attention_chunk_size),
    ):
        if want != got:
            raise ConfigError(
                f"{name}.{field}: expected {want}, as in its KV group, got {got}; pass the specs of the cache"
            )
    seen = math.inf if layer.sliding_window is None else layer.sliding_window
    if group.sliding_window is not None and seen > group.sliding_window:
        raise ConfigError(
            f"{name}.sliding_window: expected at most {group.sliding_window}, the window of its KV group, got "
            f"{layer.sliding_window}; put the layer into a group that keeps more tokens"
        )


def check_encoder_len(groups: Sequence[KVCacheSpec], max_encoder_len: int | None) -> int:
    """Raise ConfigError if max_encoder_len is None with cross layers, or set without cross layers."""
    crosses = any(group.cross for group in groups)
    if crosses and max_encoder_len is None:
        raise ConfigError(
            "RuntimeConfig.max_encoder_len: required for cross layers; pass the maximum number of encoder tokens of "
            "a request"
        )
    if not crosses and max_encoder_len is not None:
        raise ConfigError(
            f"RuntimeConfig.max_encoder_len: expected None without cross layers, got {max_encoder_len}; omit it"
        )
    return max_encoder_len or 0


def longest_of(group: KVCacheSpec, max_seq_len: int, max_encoder_len: int) -> int:
    """Return the maximum tokens of a request in a group: encoder tokens of a cross group, else sequence tokens."""
    return max_encoder_len if group.cross else max_seq_len
