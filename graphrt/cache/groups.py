"""KV groups: which layers share a page table, and where each layer's keys and values are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from graphrt.kernels.checks import check_instance, check_int, check_sequence
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.spec import AttentionSpec, KVCacheSpec

_NEARLY = 1.25
"""Kinds of layers that differ in number by at most this factor get a group each, the shorter ones padded."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where an attention layer finds its keys and values: the group, the cache layer, and whether steps write them."""

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
) -> tuple[KVCacheSpec, ...]:
    """The groups of a model's layers, for `Runtime` and `KVCache.allocate`; one group where all layers are alike.

        five layers with a window of 1,024, one without, five with, one without:

        group 0   layers 0 1      group 2   layers 4 6      group 4   layers 9 10
        group 1   layers 2 3      group 3   layers 7 8      group 5   layers 5 11, which see everything

    Layers of equal heads and equal reach are one kind. A kind with more layers than the rarest becomes several groups
    of that many layers. So a page has the same bytes in each group, and the pages of all groups come from one pool.
    Windowed groups keep the pages of their window only. Cross layers are kinds of their own. Encoder layers keep
    nothing: a model of these alone has no groups.

    attention   the spec of every layer, in order; layers that share another's KV have none of their own
    page_size   tokens per page of the kind with the most bytes per token. Where another kind has a whole fraction of
                these bytes, its pages have as many times more tokens; else it has a pool of its own
    dtype       of the cache; None means that of the layers

    Raises: ConfigError for what is no sequence of AttentionSpec or has none, or layers that share KV wrongly.
    """
    page_size = check_int("page_size", page_size, 1, 1024, advice="16 is usual")
    if dtype is not None:
        check_instance("dtype", dtype, torch.dtype, advice="None means that of the layers")
    check_sequence("attention", attention, of="AttentionSpec per layer", error=ConfigError)
    for index, spec in enumerate(attention):
        check_instance(f"attention[{index}]", spec, AttentionSpec, advice="pass one spec per layer")
    kinds: dict[tuple[object, ...], list[int]] = {}
    owners = [spec for spec in attention if _owns(spec)]
    for number, spec in enumerate(owners):
        kind = (spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.sliding_window, spec.attention_chunk_size)
        kinds.setdefault((*kind, spec.is_cross, spec.dtype if dtype is None else dtype), []).append(number)
    if attention and not any(spec.is_cached for spec in attention):
        return ()
    if not kinds:
        raise ConfigError(
            "attention: expected a layer with keys and values of its own, got none; give one no kv_shared_with"
        )
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most <= _NEARLY * fewest else fewest
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
                )
            )
    if len(groups) == 1:
        groups = [replace(groups[0], layers=None)]
    layer_places(attention, groups)
    return tuple(groups)


def _owns(spec: AttentionSpec) -> bool:
    """Whether a layer of the cache is this layer's."""
    return spec.is_cached and spec.kv_shared_with is None


def _token_bytes(spec: AttentionSpec, dtype: torch.dtype | None) -> int:
    return spec.num_kv_heads * (spec.head_dim + spec.value_dim) * (spec.dtype if dtype is None else dtype).itemsize


def layer_places(attention: Sequence[AttentionSpec], groups: Sequence[KVCacheSpec]) -> tuple[LayerPlace | None, ...]:
    """Where each attention layer finds its keys and values; None for encoder layers, which keep none.

    Layers with keys and values of their own are numbered in their order: these numbers are in `KVCacheSpec.layers`. A
    layer that shares another's reads what that one wrote in the same step and before.

    Raises: ConfigError where groups and layers do not fit each other.
    """
    group_of = cache_layer_groups(groups)
    owners = [index for index, spec in enumerate(attention) if _owns(spec)]
    if len(owners) != len(group_of):
        raise ConfigError(
            f"attention: expected {len(group_of)} layers with keys and values of their own, as in the cache, got "
            f"{len(owners)} of {len(attention)}; pass the specs of the same model"
        )
    number = {index: at for at, index in enumerate(owners)}
    places: list[LayerPlace | None] = []
    for index, spec in enumerate(attention):
        if not spec.is_cached:
            places.append(None)
            continue
        source = index if spec.kv_shared_with is None else spec.kv_shared_with
        if source not in number or source > index:
            raise ConfigError(
                f"attention[{index}].kv_shared_with: expected an earlier layer with keys and values of its own, got "
                f"{source}; name the one whose keys and values it reads"
            )
        place = LayerPlace(group_of[number[source]], number[source], source == index and not spec.is_cross)
        _check_fit(f"attention[{index}]", spec, groups[place.group])
        places.append(place)
    return tuple(places)


def cache_layer_groups(groups: Sequence[KVCacheSpec]) -> tuple[int, ...]:
    """The group of each cache layer. Raises: ConfigError unless every layer belongs to one group."""
    if len(groups) == 1 and groups[0].layers is None:
        return (0,) * groups[0].num_layers
    found: dict[int, int] = {}
    for index, group in enumerate(groups):
        if group.layers is None:
            raise ConfigError(f"groups[{index}].layers: expected the group's layers, got None; name them")
        for layer in group.layers:
            if layer in found:
                raise ConfigError(
                    f"groups[{index}].layers: expected layers of no other group, got layer {layer} of group "
                    f"{found[layer]}; name each layer once"
                )
            found[layer] = index
    if sorted(found) != list(range(len(found))):
        raise ConfigError(
            f"groups: expected the layers 0 to {len(found) - 1}, each in one group, got {sorted(found)}; name each once"
        )
    return tuple(found[layer] for layer in range(len(found)))


def _check_fit(name: str, layer: AttentionSpec, group: KVCacheSpec) -> None:
    """Raise ConfigError unless the group keeps what the layer reads."""
    have = (group.num_kv_heads, group.head_dim, group.value_dim)
    if (layer.num_kv_heads, layer.head_dim, layer.value_dim) != have:
        raise ConfigError(
            f"{name}: expected {have[0]} KV heads of sizes {have[1]} and {have[2]} as in the cache, got "
            f"{layer.num_kv_heads} of {layer.head_dim} and {layer.value_dim}; pass the specs of the same model"
        )
    if layer.is_cross != group.cross:
        want, got = ("cross" if cross else "decoder" for cross in (group.cross, layer.is_cross))
        raise ConfigError(
            f"{name}.kind: expected {want} attention, as its KV group holds, got {got}; kv_groups() keeps them apart"
        )
    if group.attention_chunk_size is not None and layer.attention_chunk_size != group.attention_chunk_size:
        raise ConfigError(
            f"{name}.attention_chunk_size: expected {group.attention_chunk_size}, as its KV group keeps, got "
            f"{layer.attention_chunk_size}; put it into a group that keeps more"
        )
    if group.sliding_window is not None and not (
        layer.sliding_window is not None and layer.sliding_window <= group.sliding_window
    ):
        raise ConfigError(
            f"{name}.sliding_window: expected at most {group.sliding_window}, which its KV group keeps, got "
            f"{layer.sliding_window}; put it into a group that keeps more"
        )


def check_encoder_len(groups: Sequence[KVCacheSpec], max_encoder_len: int | None) -> int:
    """`RuntimeConfig.max_encoder_len`, 0 for None. Raises: ConfigError unless it is there just for cross groups."""
    crosses = any(group.cross for group in groups)
    if crosses != (max_encoder_len is not None):
        want = "the most tokens of an encoder" if crosses else "None without cross layers"
        raise ConfigError(
            f"RuntimeConfig.max_encoder_len: expected {want}, got {max_encoder_len}; it bounds the tables of cross "
            "layers"
        )
    return max_encoder_len or 0


def longest_of(group: KVCacheSpec, max_seq_len: int, max_encoder_len: int) -> int:
    """Most tokens of a row that a group holds: of an encoder, or of the row's own sequence."""
    return max_encoder_len if group.cross else max_seq_len
