"""What the attention operators have in common on the host: argument checks and the constants of the logits."""

from __future__ import annotations

import math

import torch

from graphrt.kernels.checks import check_tensor, check_unit_stride
from graphrt.kernels.errors import ShapeError, UnsupportedError

ATTENTION_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 16, 256, 8
TRITON_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Names of the dtypes in a Triton signature."""

_LOG2E = math.log2(math.e)


def logit_constants(softmax_scale: float, logits_softcap: float) -> tuple[float, float]:
    """The two factors with which the kernels turn `q . k` into logits in units of log 2.

    Without softcap the logit is `factor * qk`. With it, `cap * tanh(scale * qk / cap)` is computed as
    `cap * (1 - 2 / (exp2(factor * qk) + 1))`: the first value is that factor, the second is the cap.
    """
    if logits_softcap == 0.0:
        return softmax_scale * _LOG2E, 0.0
    return 2.0 * _LOG2E * softmax_scale / logits_softcap, logits_softcap * _LOG2E


def head_dim_fault(head_dim: int) -> str | None:
    """Why the Triton kernels do not serve this head_dim, or None."""
    if MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_MULTIPLE == 0:
        return None
    return f"head_dim {head_dim}: supports multiples of {HEAD_DIM_MULTIPLE} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"


def check_attention_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    softmax_scale: float,
    sliding_window: int,
    logits_softcap: float,
) -> None:
    """Raise ShapeError unless the tensors that all attention operators take fit together."""
    device = q.device
    check_tensor("q", q, shape=(None, None, None), dtype=ATTENTION_DTYPES)
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    check_tensor("k_cache", k_cache, shape=(None, None, None, head_dim), dtype=q.dtype, device=device)
    check_tensor("v_cache", v_cache, shape=k_cache.shape, dtype=q.dtype, device=device)
    check_tensor("seq_lens", seq_lens, shape=(None,), dtype=torch.int32, device=device)
    check_tensor("block_table", block_table, shape=(seq_lens.shape[0], None), dtype=torch.int32, device=device)
    check_tensor("out", out, shape=q.shape, dtype=q.dtype, device=device)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        check_unit_stride(name, tensor)
    check_unit_stride("block_table", block_table)
    check_unit_stride("seq_lens", seq_lens)
    if k_cache.shape[2] == 0 or num_q_heads % k_cache.shape[2]:
        raise ShapeError(
            f"q: expected a multiple of k_cache's {k_cache.shape[2]} KV heads, got {num_q_heads} heads; "
            "pass the cache of the same layer"
        )
    if not (math.isfinite(softmax_scale) and softmax_scale > 0):
        raise ShapeError(f"softmax_scale: expected a finite number > 0, got {softmax_scale}; head_dim ** -0.5 is usual")
    if sliding_window < 0:
        raise ShapeError(f"sliding_window: expected >= 0, got {sliding_window}; 0 switches it off")
    if not (math.isfinite(logits_softcap) and logits_softcap >= 0):
        raise ShapeError(f"logits_softcap: expected a finite number >= 0, got {logits_softcap}; 0.0 switches it off")


def check_triton_head_dim(name: str, head_dim: int) -> None:
    """Raise UnsupportedError unless the Triton kernels serve this head_dim."""
    fault = head_dim_fault(head_dim)
    if fault is not None:
        raise UnsupportedError(f"{name}: {fault}; choose the backend 'torch_reference'")


def next_power_of_two(value: int) -> int:
    """The smallest power of two >= `value`, which is at least 1."""
    return 1 << (value - 1).bit_length()
