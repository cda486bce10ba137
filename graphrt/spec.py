"""What a model's attention and KV cache look like: frozen, checked at construction."""

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
    is_finite,
    shown,
)
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.types import KVLayout

_MOST = 1 << 16  # layers, heads, head size
MAX_PAGES = (1 << 31) - 1  # page ids are int32

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class AttentionKind(str, Enum):
    """Whose keys and values a layer attends to.

    DECODER  those of its own sequence, causally, from the paged cache; each step writes those of its new tokens
    CROSS    those that an encoder left in the paged cache, all of them; steps write none. See `KVCache.write`
    ENCODER  those of the row's tokens in the same step, before and behind a token; there is no cache
    """

    DECODER = "decoder"
    CROSS = "cross"
    ENCODER = "encoder"


_MEANINGLESS = {
    AttentionKind.CROSS: ("sliding_window", "attention_chunk_size", "alibi_slopes"),
    AttentionKind.ENCODER: ("attention_chunk_size", "kv_shared_with"),
}
"""Fields of AttentionSpec that must be None."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer: heads, head size, dtype and options. Layers of one model may differ in their options.

    softmax_scale    None means head_dim ** -0.5
    sliding_window   a query sees the tokens at a distance below it, 1 to 2 ** 30; None means all. With 3, a decoder's
                     query sees itself and two tokens before it, an encoder's two behind it as well
    attention_chunk_size   a query sees its own chunk of so many tokens only, up to itself; None means all
    v_head_dim       size of the value heads, and of the output's; None means head_dim
    kv_shared_with   number of an earlier layer whose keys and values this one reads; it writes none of its own
    logits_softcap   cap * tanh(logits / cap) before the softmax; None means off
    alibi_slopes     a slope per query head: the logits get -slope * distance after the softcap; None means off
    alibi_sqrt       -slope * sqrt(distance) instead
    sinks            the layer has learned sinks: `Step.attend` takes a tensor of them, a logit per query head
    kind             whose keys and values the layer attends to; see AttentionKind. A cross layer has no window, chunks
                     or slopes, since places in two sequences have no distance. An encoder layer has no chunks, and
                     shares no keys and values
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
            check_int_field(self, "kv_shared_with", 0, _MOST, advice="pass the number of the layer that writes")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"AttentionSpec.num_q_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_q_heads}; grouped-query attention shares each KV head between equally many query heads"
            )
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in COMPUTE_DTYPES:
            raise ConfigError(
                f"AttentionSpec.dtype: expected one of {COMPUTE_DTYPES}, got {shown(self.dtype)}; "
                "load the model in one of these"
            )
        for name, default in (("softmax_scale", "head_dim ** -0.5"), ("logits_softcap", "off")):
            if (value := getattr(self, name)) is not None:
                if not (is_finite(value) and FLOAT32_TINY <= value <= FLOAT32_MAX):
                    raise ConfigError(
                        f"AttentionSpec.{name}: expected a finite number > 0 that float32 can hold, "
                        f"got {shown(value)}; None means {default}"
                    )
                object.__setattr__(self, name, float(value))
        _check_reach(self)
        for name in ("alibi_sqrt", "sinks"):
            check_bool_field(self, name, advice="tensors are passed to Step.attend")
        self._check_alibi()
        self._check_kind()

    def _check_kind(self) -> None:
        check_instance("AttentionSpec.kind", self.kind, AttentionKind, advice="pass AttentionKind.DECODER or another")
        for name in _MEANINGLESS.get(self.kind, ()):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"AttentionSpec.{name}: expected None in {self.kind.value} attention, got "
                    f"{shown(getattr(self, name))}; leave it out"
                )

    def _check_alibi(self) -> None:
        slopes = self.alibi_slopes
        if slopes is None:
            if self.alibi_sqrt:
                raise ConfigError("AttentionSpec.alibi_sqrt: expected alibi_slopes with it, got None; pass the slopes")
            return
        if not isinstance(slopes, tuple):  # a spec is hashed
            raise ConfigError(
                f"AttentionSpec.alibi_slopes: expected a tuple of floats, got {type(slopes).__name__}; pass tuple(...)"
            )
        if len(slopes) != self.num_q_heads:
            raise ConfigError(
                f"AttentionSpec.alibi_slopes: expected {self.num_q_heads} slopes, one per query head, "
                f"got {len(slopes)}; pass those of this rank's heads"
            )
        if not all(is_finite(slope) and abs(slope) <= FLOAT32_MAX for slope in slopes):
            raise ConfigError(
                f"AttentionSpec.alibi_slopes: expected finite numbers, got {shown(slopes)}; check their source, "
                "and take those of a tensor by tolist()"
            )
        object.__setattr__(self, "alibi_slopes", tuple(map(float, slopes)))

    @property
    def is_cached(self) -> bool:
        """Whether the layer's keys and values lie in the paged cache."""
        return self.kind is not AttentionKind.ENCODER

    @property
    def is_cross(self) -> bool:
        """Whether an encoder wrote the layer's keys and values."""
        return self.kind is AttentionKind.CROSS

    @property
    def value_dim(self) -> int:
        """Size of the value heads in force."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        return self.softmax_scale if self.softmax_scale is not None else self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The paged KV cache of a model whose layers are alike, or one group of layers of another model.

    A group is a number of layers that share a page table: their heads are alike, and they keep the same tokens. Models
    whose layers differ have several groups, as `kv_groups` makes them of the layers' specs.

    num_layers  K and V tensors of equal shape
    page_size   tokens per page, 1 to 1024; the captured graphs hold it
    layout      NHD or HND, the order inside a page
    dtype       of the stored keys and values: float16, bfloat16 or float32, in general that of the layers, or fp8
                (float8_e4m3fn, float8_e5m2), half the bytes and with scales; see KVCache
    null_page   id of the page that no sequence owns; pad rows and table tails point at it. "last" is the cache's last
                page, for block managers that hand out page 0; the spec of a KVCache has its number
    v_head_dim  size of the value heads; None means head_dim
    sliding_window         tokens that are kept of a sequence: no layer of the group sees more. Pages behind the window
                           can be given to others. None keeps all
    attention_chunk_size   layers see their own chunk of so many tokens only: older chunks are not kept. None keeps all
    layers      which of the layers that write keys and values belong to the group, `num_layers` of them by number;
                None means all, in order
    pool        groups of equal number share their page ids and their memory: a page belongs to one group at a time
    cross       the pages hold what an encoder wrote, a row's `encoder_len` tokens. Steps write none, so rows may list
                the same pages
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

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            check_int_field(self, name, 1, _MOST, advice="pass the model's")
        check_int_field(self, "page_size", 1, 1024, advice="16 is usual")
        _check_value_size(self)
        _check_reach(self)
        check_int_field(self, "pool", 0, _MOST, advice="0 is the first")
        check_bool_field(self, "cross", advice="say whether an encoder writes the pages")
        if self.cross and (self.sliding_window or self.attention_chunk_size):
            raise ConfigError(
                "KVCacheSpec.cross: expected False with a window or chunks, got True; a decoder sees all of an encoder"
            )
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in KV_DTYPES:
            raise ConfigError(
                f"KVCacheSpec.dtype: expected one of {KV_DTYPES}, got {shown(self.dtype)}; "
                "pass the layers' dtype, or fp8"
            )
        if not isinstance(self.layout, KVLayout):
            raise ConfigError(f"KVCacheSpec.layout: expected KVLayout.NHD or KVLayout.HND, got {shown(self.layout)}")
        if not (isinstance(self.null_page, str) and self.null_page == "last"):
            check_int_field(
                self, "null_page", 0, MAX_PAGES - 1, advice='0 is usual, "last" leaves page 0 to be handed out'
            )
        if self.layers is not None:
            advice = "pass a tuple of numbers of layers"
            found = check_ints("KVCacheSpec.layers", self.layers, 0, _MOST, advice=advice, error=ConfigError).tolist()
            if len(set(found)) != self.num_layers or len(found) != self.num_layers:
                raise ConfigError(
                    f"KVCacheSpec.layers: expected num_layers={self.num_layers} different layers, got "
                    f"{shown(self.layers)}; name each once"
                )
            object.__setattr__(self, "layers", tuple(found))

    def resolve(self, num_pages: int) -> KVCacheSpec:
        """The spec of a cache of `num_pages` pages, with the null page by its number.

        Raises: ConfigError for a null page beyond the cache.
        """
        null_page = num_pages - 1 if isinstance(self.null_page, str) else self.null_page
        if null_page >= num_pages:
            raise ConfigError(
                f"KVCacheSpec.null_page: expected a page below num_pages={num_pages}, got {null_page}; "
                'pass "last" for the last page'
            )
        return replace(self, null_page=null_page)

    @property
    def value_dim(self) -> int:
        """Size of the value heads in force."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """Tokens, KV heads, and sizes of the key and value heads of a page."""
        return self.page_size, self.num_kv_heads, self.head_dim, self.value_dim

    @property
    def layer_bytes_per_page(self) -> int:
        """Bytes of one page in one layer, K and V."""
        return self.page_size * self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, K and V."""
        return self.num_layers * self.layer_bytes_per_page

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one token takes over all layers."""
        return self.bytes_per_page // self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` needs.

        Raises: ConfigError for what is no int >= 0.
        """
        num_tokens = check_int("num_tokens", num_tokens, 0, advice="pass the tokens whose KV is kept")
        return -(-num_tokens // self.page_size)

    def first_page_seen(self, position: int) -> int:
        """Page of the oldest token that a token at `position` sees: pages before it can be given to others."""
        seen = 0
        if self.sliding_window is not None:
            seen = max(0, position + 1 - self.sliding_window)
        if self.attention_chunk_size is not None:
            seen = position - position % self.attention_chunk_size
        return seen // self.page_size

    def most_pages(self, num_tokens: int, new_tokens: int) -> int:
        """Pages that a sequence of up to `num_tokens` owns at most, in steps of up to `new_tokens` new ones."""
        total = self.pages_for(num_tokens)
        kept = self.sliding_window or self.attention_chunk_size
        if kept is None:
            return total
        held = kept + new_tokens - 1  # from the oldest token that the first new one sees
        # A window begins at any token of a page, a chunk of 6 only at each second one of a page of 4.
        begins = math.gcd(self.attention_chunk_size, self.page_size) if self.attention_chunk_size else 1
        return min(total, self.pages_for(held + self.page_size - begins))


def _check_value_size(spec: AttentionSpec | KVCacheSpec) -> None:
    if spec.v_head_dim is not None:
        check_int_field(spec, "v_head_dim", 1, _MOST, advice="None means head_dim")
        if spec.v_head_dim == spec.head_dim:  # one way to say it: specs are compared
            object.__setattr__(spec, "v_head_dim", None)


def _check_reach(spec: AttentionSpec | KVCacheSpec) -> None:
    """Check what a query sees of its sequence."""
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name) is not None:
            check_int_field(spec, name, 1, MAX_WINDOW, advice="None means everything")
    if spec.sliding_window is not None and spec.attention_chunk_size is not None:
        raise ConfigError(
            f"{type(spec).__name__}.attention_chunk_size: expected None with sliding_window={spec.sliding_window}, got "
            f"{spec.attention_chunk_size}; a layer has a window or chunks"
        )
