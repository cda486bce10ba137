"""The shape of an attention plan: padded requests and tokens, query length, heads and head sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.attention.arguments import ATTENTION_DTYPES, check_triton_head_dim
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.sizes import next_power_of_two

MAX_QUERY_LEN = 16
"""Maximum new tokens per request of a decode plan. `AttentionPlan.varlen` supports more. Not measured."""

_MIN_BLOCK_D = 16
"""Minimum lanes, because each dimension of a tensor core product needs at least 16 elements. A limit of Triton."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Sizes of the tensors of a call.

    num_reqs            requests of the batch, including padding
    num_tokens          tokens of q, including padding
    query_len           new tokens per request; 0: any number, given by query_start_loc
    num_queries_per_kv  query heads per KV head
    num_kv_heads        KV heads
    head_dim            head size of Q and K
    v_head_dim          head size of V and the output
    """

    num_reqs: int
    num_tokens: int
    query_len: int
    num_queries_per_kv: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def checked(
        cls,
        num_reqs: int,
        num_tokens: int,
        query_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None,
    ) -> PlanShape:
        """Return the shape after checking the sizes; if v_head_dim is None, it is head_dim.

        Raises: ShapeError: if num_reqs or num_tokens is less than 1, or num_q_heads is not a multiple of num_kv_heads.
        UnsupportedError: if head_dim or v_head_dim is not supported.
        """
        if num_reqs < 1 or num_tokens < 1:
            raise ShapeError(
                f"plan: expected at least 1 request and 1 token, got {num_reqs} and {num_tokens}; pad the batch to "
                f"at least one request"
            )
        if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
            raise ShapeError(
                f"num_q_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_q_heads}; "
                "choose head counts so that each KV head serves the same number of query heads"
            )
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_triton_head_dim("head_dim", head_dim)
        check_triton_head_dim("v_head_dim", v_head_dim)
        return cls(num_reqs, num_tokens, query_len, num_q_heads // num_kv_heads, num_kv_heads, head_dim, v_head_dim)

    @property
    def queries_per_req(self) -> int:
        """Queries of a request per KV head: new tokens x query heads per KV head; 0 if requests differ."""
        return self.query_len * self.num_queries_per_kv

    @property
    def block_d(self) -> int:
        """Lanes per head of Q and K: head_dim rounded up to a power of two, at least 16."""
        return max(_MIN_BLOCK_D, next_power_of_two(self.head_dim))

    @property
    def block_v(self) -> int:
        """Lanes per head of V and the output: v_head_dim rounded up in the same way."""
        return max(_MIN_BLOCK_D, next_power_of_two(self.v_head_dim))

    @property
    def widest(self) -> int:
        """The larger of block_d and block_v, which determines tile sizes."""
        return max(self.block_d, self.block_v)


def check_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> torch.dtype:
    """Return the cache dtype, by default the dtype of the queries. Raises: ShapeError: if either dtype is not
    supported."""
    if dtype not in ATTENTION_DTYPES:
        raise ShapeError(f"dtype: expected one of {ATTENTION_DTYPES}, got {dtype}; convert q with .to()")
    if kv_dtype not in (None, dtype, *FP8_DTYPES):
        raise ShapeError(
            f"kv_dtype: expected {dtype} as for the queries, or one of {FP8_DTYPES}, got {kv_dtype}; "
            "pass the dtype of the cache"
        )
    return kv_dtype or dtype


def check_num_sms(num_sms: int) -> int:
    """Return the number of multiprocessors. Raises: ShapeError: if it is not a positive int."""
    return check_int("num_sms", num_sms, 1, advice="pass the device's multi_processor_count", error=ShapeError)
