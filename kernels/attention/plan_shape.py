"""The part of a plan that says what is attended to: rows, tokens and heads of the captured size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphrt.kernels.attention.arguments import ATTENTION_DTYPES, check_triton_head_dim
from graphrt.kernels.attention.options import FP8_DTYPES
from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.launcher import next_power_of_two

MAX_QUERY_LEN = 16
"""Most new tokens per row of a decode plan. Rows with more take a plan made by `AttentionPlan.varlen`. Not measured."""

_MIN_BLOCK_D = 16
"""Lanes. A product on tensor cores takes at least 16 elements along each side. A limit of Triton, not measured."""


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Sizes of the tensors of a call.

    num_rows      rows: sequences of the batch, pad rows included
    num_tokens    tokens of q, pad tokens included
    query_len     new tokens per row; 0: any number, given by query_start_loc
    group         query heads that share a KV head
    num_kv_heads  KV heads
    head_dim      elements of a head of Q and of K
    v_head_dim    elements of a head of V and of the output
    """

    num_rows: int
    num_tokens: int
    query_len: int
    group: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def checked(
        cls,
        num_rows: int,
        num_tokens: int,
        query_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None,
    ) -> PlanShape:
        """The shape; v_head_dim None stands for head_dim.

        Raises: ShapeError for no rows, no tokens or heads that do not divide; UnsupportedError (head_dim, v_head_dim).
        """
        if num_rows < 1 or num_tokens < 1:
            raise ShapeError(
                f"plan: expected at least 1 row and 1 token, got {num_rows} and {num_tokens}; pad the batch"
            )
        if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
            raise ShapeError(
                f"num_q_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_q_heads}; "
                "each KV head serves equally many query heads"
            )
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_triton_head_dim("head_dim", head_dim)
        check_triton_head_dim("v_head_dim", v_head_dim)
        return cls(num_rows, num_tokens, query_len, num_q_heads // num_kv_heads, num_kv_heads, head_dim, v_head_dim)

    @property
    def queries_of_row(self) -> int:
        """Queries of a row per KV head: new tokens x query heads that share it; 0 where rows differ."""
        return self.query_len * self.group

    @property
    def block_d(self) -> int:
        """Lanes of a head of Q and of K: head_dim, rounded up to a power of two that a product takes."""
        return max(_MIN_BLOCK_D, next_power_of_two(self.head_dim))

    @property
    def block_v(self) -> int:
        """Lanes of a head of V and of the output: the same of v_head_dim."""
        return max(_MIN_BLOCK_D, next_power_of_two(self.v_head_dim))

    @property
    def widest(self) -> int:
        """The larger of block_d and block_v, which sizes of tiles and programs follow."""
        return max(self.block_d, self.block_v)


def check_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the cache, where None stands for that of the queries; raises ShapeError for what is not served."""
    if dtype not in ATTENTION_DTYPES:
        raise ShapeError(f"dtype: expected one of {ATTENTION_DTYPES}, got {dtype}; convert q with .to()")
    if kv_dtype not in (None, dtype, *FP8_DTYPES):
        raise ShapeError(
            f"kv_dtype: expected {dtype} as the queries, or one of {FP8_DTYPES}, got {kv_dtype}; fill such a cache"
        )
    return kv_dtype or dtype


def check_num_sms(num_sms: int) -> int:
    """The number of multiprocessors; raises ShapeError unless it is an int from 1 on."""
    return check_int("num_sms", num_sms, 1, advice="pass the device's multi_processor_count", error=ShapeError)
