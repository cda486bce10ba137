"""The options of an attention layer beyond softmax(q k) v, as one frozen dataclass for all kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.checks import check_int, check_tensor, is_finite
from graphrt.kernels.errors import ShapeError

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_WINDOW = 1 << 30
"""Largest sliding window and chunk, because the kernels add positions and windows in int32."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of an attention call. A captured graph contains the numbers as constants, and reads the tensors at every
    replay.

    softmax_scale    factor of q . k
    causal           token i of a request sees positions 0 to seq_len - query_len + i; otherwise all positions
    sliding_window   positions that a token sees, including its own, up to MAX_WINDOW; 0: all. Requires `causal`
    attention_chunk_size  positions per chunk, up to MAX_WINDOW. A token sees only its own chunk: position p sees
                     p // size * size to p; 0: all. Requires `causal`, and excludes a sliding window
    logits_softcap   cap * tanh(logits / cap); 0.0: off
    alibi_slopes     [num_q_heads]           float32  bias -slope * distance, added after the softcap. The output of a
                                                     head is NaN if its slope is not finite; Press et al. 2022
    alibi_sqrt       the bias is -slope * sqrt(distance)
    sinks            [num_q_heads]           float32  a logit per head that adds exp(sink) to the softmax's denominator.
                                                     The output of a head is NaN unless its sink is finite or -inf
    k_scale          [1] or [num_kv_heads]   float32  key = stored value * k_scale; for fp8 caches; None: 1
    v_scale          like k_scale, for values
    tree_masks       [num_tokens]            int64    for paged calls with the same number of new tokens, at most 64, in
                                                     each request. Bit i is set if the token sees new token i of its
                                                     request: itself and earlier ones. The position of a token is that
                                                     of new token 0 plus the number of new tokens that it sees before
                                                     itself. Requires `causal`, and a window of at least as many
                                                     positions as new tokens; excludes chunks and alibi_slopes
    kv_limits        [num_tokens]            int32    for paged calls: a token sees the first kv_limits keys of its
                                                     request. Excludes `causal`, alibi_slopes and tree_masks
    """

    softmax_scale: float
    causal: bool = True
    sliding_window: int = 0
    attention_chunk_size: int = 0
    logits_softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    alibi_sqrt: bool = False
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    tree_masks: torch.Tensor | None = None
    kv_limits: torch.Tensor | None = None

    @property
    def span(self) -> int:
        """Positions of a window or of a chunk; 0: neither is set."""
        return self.sliding_window or self.attention_chunk_size

    @property
    def reach(self) -> tuple[int, int]:
        """Positions before and after its own that a token sees, ignoring chunks; MAX_WINDOW: all."""
        if self.causal:
            return self.sliding_window - 1 if self.sliding_window else MAX_WINDOW, 0
        return MAX_WINDOW, MAX_WINDOW

    @property
    def scale_strides(self) -> tuple[int, int]:
        """Strides of `k_scale` and `v_scale` between KV heads; 0 if there is no scale or all heads share one."""
        k_stride, v_stride = (int(s is not None and s.shape[0] > 1) for s in (self.k_scale, self.v_scale))
        return k_stride, v_stride


def check_options(
    options: AttentionOptions, num_q_heads: int, num_kv_heads: int, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ShapeError unless the options are valid for these heads and this cache."""
    scale, softcap = options.softmax_scale, options.logits_softcap
    if not (is_finite(scale) and scale > 0):
        raise ShapeError(
            f"softmax_scale: expected a finite number > 0, got {scale!r}; use head_dim ** -0.5, the usual value"
        )
    check_span(options.sliding_window, options.attention_chunk_size, options.causal)
    if not (is_finite(softcap) and softcap >= 0):
        raise ShapeError(f"logits_softcap: expected a finite number >= 0, got {softcap!r}; pass 0.0 for no softcap")
    if options.alibi_sqrt and options.alibi_slopes is None:
        raise ShapeError("alibi_sqrt: expected alibi_slopes, got None; pass the slopes")
    if options.tree_masks is not None:
        check_tensor("tree_masks", options.tree_masks, shape=(None,), dtype=torch.int64, device=device)
        _check_dense("tree_masks", options.tree_masks)
        if not options.causal or options.attention_chunk_size or options.alibi_slopes is not None:
            raise ShapeError("tree_masks: expected None without causal, with chunks or with alibi_slopes; pass None")
    if options.kv_limits is not None:
        check_tensor("kv_limits", options.kv_limits, shape=(None,), dtype=torch.int32, device=device)
        _check_dense("kv_limits", options.kv_limits)
        if options.causal or options.alibi_slopes is not None or options.tree_masks is not None:
            raise ShapeError("kv_limits: expected None with causal, alibi_slopes or tree_masks; pass None")
    for name in ("alibi_slopes", "sinks"):
        tensor: torch.Tensor | None = getattr(options, name)
        if tensor is not None:
            check_tensor(name, tensor, shape=(num_q_heads,), dtype=torch.float32, device=device)
            _check_dense(name, tensor)
    for name in ("k_scale", "v_scale"):
        tensor = getattr(options, name)
        if tensor is None:
            continue
        if kv_dtype not in FP8_DTYPES:
            raise ShapeError(
                f"{name}: expected None with a {kv_dtype} cache, got a tensor; pass scales only with fp8 caches"
            )
        check_tensor(name, tensor, shape=(None,), dtype=torch.float32, device=device)
        _check_dense(name, tensor)
        if tensor.shape[0] not in (1, num_kv_heads):
            raise ShapeError(
                f"{name}: expected shape [1] or [{num_kv_heads}], one scale per tensor or KV head, "
                f"got {list(tensor.shape)}; do not expand it over query heads"
            )


def check_span(sliding_window: int, attention_chunk_size: int, causal: bool) -> None:
    """Raise ShapeError unless the sliding window and chunk size are valid. 0 means no window or no chunks."""
    spans = {"sliding_window": sliding_window, "attention_chunk_size": attention_chunk_size}
    for name, size in spans.items():
        check_int(name, size, 0, MAX_WINDOW, advice="0 switches it off", error=ShapeError)
        if size and not causal:
            raise ShapeError(f"{name}: expected 0 without causal, got {size}; set causal=True")
    if sliding_window and attention_chunk_size:
        raise ShapeError(
            f"attention_chunk_size: expected 0 with sliding_window={sliding_window}, got {attention_chunk_size}; "
            "set only one of the two"
        )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ShapeError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}; call .contiguous()")
