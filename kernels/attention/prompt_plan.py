"""The values of prefill attention that are fixed at capture: padded sizes, heads, and derived tile sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from graphrt.kernels.checks import check_int
from graphrt.kernels.errors import ShapeError
from graphrt.kernels.sizes import next_power_of_two

Q_TILE_WORDS = 8
"""int32 words per query tile in the schedule, and of the header before the first one."""

PROMPT_HEAD_DIMS = range(16, 257, 8)
"""Supported head sizes of K and V."""

NATIVE_BLOCK_M = 128
"""Queries per query tile of the CUDA kernel, in two warpgroups of 64 queries each."""

_FLOAT32_BLOCK_M = 16  # float32 products run without tensor cores and keep their operands in registers


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The sizes of a batch's prefills. Make a plan with `PromptPlan.make`.

    num_reqs, num_tokens   padded sizes: requests, and new tokens of all requests
    causal                 schedule query tiles that see more keys first; affects only speed
    block_m                maximum queries per query tile; a query is one new token in one query head
    block_n                tokens per KV tile of the Triton kernel
    num_warps, num_stages  warps and stages of a program of the Triton kernel
    num_blocks             persistent blocks of the CUDA kernel; 0: the Triton kernel runs
    """

    num_reqs: int
    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_blocks: int

    @property
    def ints(self) -> list[int]:
        return [int(getattr(self, field.name)) for field in fields(self)]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> PromptPlan:
        made = dict(zip((field.name for field in fields(cls)), values, strict=True))
        return cls(**{**made, "causal": bool(made["causal"])})  # type: ignore[arg-type]  # all others are ints

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        return next_power_of_two(self.head_dim)

    @property
    def max_q_tiles(self) -> int:
        """Maximum query tiles per KV head. Each request, and the padding, may end with an incomplete query tile."""
        return self.num_tokens * self.num_queries_per_kv // self.block_m + min(self.num_reqs + 1, self.num_tokens)

    @property
    def schedule_words(self) -> int:
        """int32 words of the schedule."""
        return Q_TILE_WORDS * (1 + self.max_q_tiles)

    @classmethod
    def make(
        cls,
        num_reqs: int,
        num_tokens: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        num_sms: int,
        causal: bool = True,
        native: bool = False,
    ) -> PromptPlan:
        """Make a plan for the prefills of a batch.

        num_sms   streaming multiprocessors of the device
        native    whether the device runs the CUDA kernel, see `runs_prompt_kernel`. The plan then uses the CUDA kernel
                  if the kernel supports the dtypes

        Raises: ShapeError: if a size is not a positive int, or num_q_heads is not a multiple of num_kv_heads.
        """
        sizes = {"num_reqs": num_reqs, "num_tokens": num_tokens, "num_q_heads": num_q_heads}
        for name, value in (
            *sizes.items(),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
            ("num_sms", num_sms),
        ):
            check_int(name, value, 1, advice="pass the padded sizes of the batch", error=ShapeError)
        if num_q_heads % num_kv_heads:
            raise ShapeError(
                f"num_q_heads: expected a multiple of num_kv_heads={num_kv_heads}, got {num_q_heads}; "
                "choose head counts so that each KV head serves the same number of query heads"
            )
        stored = kv_dtype or dtype
        serves = native and dtype.itemsize == 2 and stored == dtype
        block_m, block_n, num_warps, num_stages = _triton_tile(head_dim, dtype, stored)
        if serves:
            block_m = NATIVE_BLOCK_M
        return cls(
            num_reqs, num_tokens, num_q_heads, num_kv_heads, head_dim, causal, block_m, block_n, num_warps, num_stages,
            num_sms if serves else 0,
        )  # fmt: skip


def _triton_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return block_m, block_n, warps and stages. Measured: docs/dev/log.md "Tiles of varlen"."""
    block_d = next_power_of_two(head_dim)
    if dtype == torch.float32:
        return _FLOAT32_BLOCK_M, *((32, 4) if block_d <= 64 else (16, 8)), 3
    if block_d > 128:
        return (64 if kv_dtype == dtype else 32), 32, 8, 3
    return (128 if kv_dtype == dtype else 64), 64, 8, 3
