"""Frozen specs of a model's attention layers and KV cache, checked at construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import torch

from graphrt.kernels.attention.arguments import KV_DTYPES
from graphrt.kernels.attention.options import MAX_WINDOW
from graphrt.kernels.checks import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    check_bool_field,
    check_instance,
    check_int,
    check_int_field,
    check_ints,
    check_number,
    is_finite,
    shown,
)
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout

_MOST = 1 << 16  # layers, heads, head size
MAX_PAGES = (1 << 31) - 1  # page ids are int32

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class AttentionKind(str, Enum):
    """Which keys and values a layer attends to.

    DECODER  its own sequence, causally, in the paged cache. Each step writes the KV of its new tokens
    CROSS    all encoder outputs of the request in the paged cache. Steps write none; see `KVCache.write`
    ENCODER  all tokens of the request in the same step, in both directions. There is no cache
    """

    DECODER = "decoder"
    CROSS = "cross"
    ENCODER = "encoder"


_MEANINGLESS = {
    AttentionKind.CROSS: ("sliding_window", "attention_chunk_size", "alibi_slopes"),
    AttentionKind.ENCODER: ("attention_chunk_size", "kv_shared_with"),
}
"""Fields of AttentionSpec that must be None for a kind."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer: heads, head size, dtype and options. Layers of a model may differ in their options.

    num_q_heads, num_kv_heads, head_dim   numbers of heads, and head size; num_q_heads is a multiple of num_kv_heads
    dtype            dtype of queries, keys, values and outputs: float16, bfloat16 or float32
    softmax_scale    factor of the logits; None: head_dim ** -0.5
    sliding_window   a query sees the tokens at a distance below this number, 1 to 2 ** 30; None: all. With 3, a decoder
                     query sees itself and two tokens before it; an encoder query also sees two tokens after it
    attention_chunk_size   a query sees the tokens of its own chunk up to itself; None: all
    v_head_dim       size of the heads of values and outputs; None: head_dim
    kv_shared_with   index of an earlier layer whose keys and values this layer reads, without writing its own
    logits_softcap   cap * tanh(logits / cap) before the softmax; None: off
    alibi_slopes     one slope per query head; adds -slope * distance to the logits after the softcap; None: off
    alibi_sqrt       adds -slope * sqrt(distance) instead
    sinks            whether the layer has learned sinks, which `Step.attend` takes: one logit per query head
    kind             which keys and values the layer attends to; see AttentionKind. A cross layer has no window, chunks
                     or slopes, because positions in two sequences have no distance. An encoder layer has no chunks and
                     no kv_shared_with

    Raises: ConfigError: if a field has the wrong type or is out of range, or if fields contradict each other.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    softmax_scale: float | None = None
    sliding_window: int | None = None
    logits_softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    alibi_sqrt: bool = False
    sinks: bool = False
    attention_chunk_size: int | None = None
    v_head_dim: int | None = None
    kv_shared_with: int | None = None
    kind: AttentionKind = AttentionKind.DECODER

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim"):
            check_int_field(self, name, 1, _MOST, advice="pass the model's")
        _check_value_size(self)
        if self.kv_shared_with is not None:
            check_int_field(self, "kv_shared_with", 0, _MOST, advice="pass the index of the layer that writes")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"AttentionSpec.num_q_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, got "
                f"{self.num_q_heads}; all KV heads serve the same number of query heads, so pass a multiple"
            )
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in COMPUTE_DTYPES:
            raise ConfigError(
                f"AttentionSpec.dtype: expected one of {COMPUTE_DTYPES}, got {shown(self.dtype)}; pass one of these"
            )
        for name, default in (("softmax_scale", "head_dim ** -0.5"), ("logits_softcap", "off")):
            if (value := getattr(self, name)) is not None:
                advice = f"None means {default}"
                value = check_number(f"AttentionSpec.{name}", value, FLOAT32_TINY, FLOAT32_MAX, advice=advice)
                object.__setattr__(self, name, value)
        _check_reach(self)
        for name in ("alibi_sqrt", "sinks"):
            check_bool_field(self, name, advice="pass tensors to Step.attend instead")
        self._check_alibi()
        check_instance(
            "AttentionSpec.kind",
            self.kind,
            AttentionKind,
            advice="pass an AttentionKind, such as AttentionKind.DECODER",
        )
        for name in _MEANINGLESS.get(self.kind, ()):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"AttentionSpec.{name}: expected None in {self.kind.value} attention, got "
                    f"{shown(getattr(self, name))}; omit it"
                )

    def _check_alibi(self) -> None:
        slopes = self.alibi_slopes
        if slopes is None:
            if self.alibi_sqrt:
                raise ConfigError("AttentionSpec.alibi_sqrt: requires alibi_slopes; pass the slopes")
            return
        check_instance("AttentionSpec.alibi_slopes", slopes, tuple, advice="pass tuple(...)")  # specs are hashed
        if len(slopes) != self.num_q_heads:
            raise ConfigError(
                f"AttentionSpec.alibi_slopes: expected {self.num_q_heads} slopes, one per query head, got "
                f"{len(slopes)}; pass the slopes of this rank's heads"
            )
        if not all(is_finite(slope) and abs(slope) <= FLOAT32_MAX for slope in slopes):
            raise ConfigError(
                f"AttentionSpec.alibi_slopes: expected finite floats, got {shown(slopes)}; convert a tensor by tolist()"
            )
        object.__setattr__(self, "alibi_slopes", tuple(map(float, slopes)))

    @property
    def is_cached(self) -> bool:
        """Whether the paged cache contains the layer's keys and values."""
        return self.kind is not AttentionKind.ENCODER

    @property
    def is_cross(self) -> bool:
        """Whether an encoder writes the layer's keys and values."""
        return self.kind is AttentionKind.CROSS

    @property
    def value_dim(self) -> int:
        """Size of the value heads: v_head_dim, or head_dim if it is None."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The softmax scale: softmax_scale, or its default if it is None."""
        return self.softmax_scale if self.softmax_scale is not None else self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The paged KV cache of a model whose layers are alike, or of one KV group.

    A KV group is a set of layers that share a block table. The layers have equal heads and keep the same tokens. Models
    whose layers differ have several groups; `kv_groups` derives these from the layers' specs.

    num_layers  number of layers
    num_kv_heads, head_dim   number and size of the KV heads
    page_size   tokens per page, 1 to 1024; fixed in captured graphs
    layout      NHD or HND, the dimension order in a page
    dtype       dtype of stored keys and values: float16, bfloat16 or float32 (usually the dtype of the layers), or
                float8_e4m3fn or float8_e5m2 with scales; see KVCache
    null_page   page that no sequence owns; padding requests and the unused ends of block tables refer to it. "last" is
                the last page of the cache, for allocators that allocate page 0. In the specs of a KVCache it is an int
    v_head_dim  size of the value heads; None: head_dim
    sliding_window         number of most recent tokens that are kept; no layer of the group sees more. Pages before
                           the window can be freed. None: all tokens are kept
    attention_chunk_size   layers see only their own chunk of this many tokens; pages of older chunks can be freed.
                           None: all tokens are kept
    layers      indices of the group's layers among the layers with their own KV, `num_layers` of them; None: all
    pool        groups of the same pool share page ids and memory; a page belongs to one group at a time
    cross       the pages contain encoder outputs, `encoder_len` tokens per request. Steps do not write to these pages,
                so requests may share them
    context_parallel_size  ranks over which the tokens of each page are interleaved; see docs/parallel.md. Each rank
                stores `page_size` tokens of a page, so pages of equal id hold `page_tokens` tokens together
    interleave_size        consecutive tokens that one rank stores; divides page_size

    Raises: ConfigError: if a field has the wrong type or is out of range, or if fields contradict each other.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    layout: KVLayout = KVLayout.NHD
    dtype: torch.dtype = torch.bfloat16
    null_page: int | Literal["last"] = 0
    v_head_dim: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    layers: tuple[int, ...] | None = None
    pool: int = 0
    cross: bool = False
    context_parallel_size: int = 1
    interleave_size: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            check_int_field(self, name, 1, _MOST, advice="pass the model's")
        check_int_field(self, "page_size", 1, 1024, advice="16 is usual")
        _check_value_size(self)
        _check_reach(self)
        check_int_field(self, "pool", 0, _MOST, advice="number pools from 0")
        check_bool_field(self, "cross", advice="pass whether an encoder writes the pages")
        if self.cross and (self.sliding_window or self.attention_chunk_size):
            raise ConfigError(
                "KVCacheSpec.cross: expected False with a window or chunks, got True; omit them, because cross "
                "layers see all tokens"
            )
        check_int_field(self, "context_parallel_size", 1, _MOST, advice="pass the number of ranks, or 1")
        check_int_field(self, "interleave_size", 1, 1024, advice="pass 1, or page_size")
        if self.page_size % self.interleave_size:
            raise ConfigError(
                f"KVCacheSpec.interleave_size: expected a divisor of page_size={self.page_size}, got "
                f"{self.interleave_size}; pass 1, or page_size"
            )
        if self.context_parallel_size > 1 and (self.cross or self.sliding_window or self.attention_chunk_size):
            raise ConfigError(
                f"KVCacheSpec.context_parallel_size: expected 1 with a window, chunks or cross, got "
                f"{self.context_parallel_size}; only groups whose layers see all tokens can be interleaved"
            )
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in KV_DTYPES:
            raise ConfigError(
                f"KVCacheSpec.dtype: expected one of {KV_DTYPES}, got {shown(self.dtype)}; pass one of these"
            )
        check_instance("KVCacheSpec.layout", self.layout, KVLayout, advice="pass KVLayout.NHD or KVLayout.HND")
        if not (isinstance(self.null_page, str) and self.null_page == "last"):
            check_int_field(self, "null_page", 0, MAX_PAGES - 1, advice='pass a page id, or "last"')
        if self.layers is not None:
            advice = "pass a tuple of layer indices"
            found = check_ints("KVCacheSpec.layers", self.layers, 0, _MOST, advice=advice, error=ConfigError).tolist()
            if len(set(found)) != self.num_layers or len(found) != self.num_layers:
                raise ConfigError(
                    f"KVCacheSpec.layers: expected num_layers={self.num_layers} different indices, got "
                    f"{shown(self.layers)}; list each layer once"
                )
            object.__setattr__(self, "layers", tuple(found))

    def resolve(self, num_pages: int) -> KVCacheSpec:
        """Return the spec for a cache of `num_pages` pages, with null_page as an int.

        Raises: ConfigError: if the null page is not below `num_pages`.
        """
        null_page = num_pages - 1 if isinstance(self.null_page, str) else self.null_page
        if null_page >= num_pages:
            raise ConfigError(
                f"KVCacheSpec.null_page: expected a page below num_pages={num_pages}, got {null_page}; pass 'last'"
            )
        return replace(self, null_page=null_page)

    @property
    def value_dim(self) -> int:
        """Size of the value heads: v_head_dim, or head_dim if it is None."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def page_tokens(self) -> int:
        """Tokens of a sequence per page: page_size tokens on each of context_parallel_size ranks."""
        return self.page_size * self.context_parallel_size

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """Sizes of a page on this rank, (page_size, num_kv_heads, head_dim, value_dim)."""
        return self.page_size, self.num_kv_heads, self.head_dim, self.value_dim

    @property
    def layer_bytes_per_page(self) -> int:
        """Bytes of one page in one layer, K and V."""
        return self.page_size * self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, K and V."""
        return self.num_layers * self.layer_bytes_per_page

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens.

        Raises: ConfigError: if `num_tokens` is not an int >= 0.
        """
        num_tokens = check_int("num_tokens", num_tokens, 0, advice="pass the number of tokens in the cache")
        return -(-num_tokens // self.page_tokens)

    def first_page_seen(self, position: int) -> int:
        """Return the index of the first page that a token at `position` sees; earlier pages can be freed."""
        seen = 0
        if self.sliding_window is not None:
            seen = max(0, position + 1 - self.sliding_window)
        if self.attention_chunk_size is not None:
            seen = position - position % self.attention_chunk_size
        return seen // self.page_tokens

    def most_pages(self, num_tokens: int, new_tokens: int) -> int:
        """Return the maximum number of pages of a sequence of up to `num_tokens` tokens, if a step adds up to
        `new_tokens`."""
        total = self.pages_for(num_tokens)
        kept = self.sliding_window or self.attention_chunk_size
        if kept is None:
            return total
        held = kept + new_tokens - 1  # from the oldest token that the first new token sees
        # A window can begin at any token of a page, a chunk of 6 only at every second token of a page of 4.
        begins = math.gcd(self.attention_chunk_size, self.page_tokens) if self.attention_chunk_size else 1
        return min(total, self.pages_for(held + self.page_tokens - begins))


def _check_value_size(spec: AttentionSpec | KVCacheSpec) -> None:
    if spec.v_head_dim is not None:
        check_int_field(spec, "v_head_dim", 1, _MOST, advice="pass None for head_dim")
        if spec.v_head_dim == spec.head_dim:  # normalized, because specs are compared
            object.__setattr__(spec, "v_head_dim", None)


def _check_reach(spec: AttentionSpec | KVCacheSpec) -> None:
    """Check the sliding window and the chunk size."""
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name) is not None:
            check_int_field(spec, name, 1, MAX_WINDOW, advice="pass None for no limit")
    if spec.sliding_window is not None and spec.attention_chunk_size is not None:
        raise ConfigError(
            f"{type(spec).__name__}.attention_chunk_size: expected None with sliding_window={spec.sliding_window}, got "
            f"{spec.attention_chunk_size}; pass only one of the two"
        )
