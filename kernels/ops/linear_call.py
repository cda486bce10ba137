"""Matrix products with few tokens: the plan and arguments of a call, declared once for operator, kernel, reference."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from graphrt.kernels.op_declaration import Written

MAX_TOKENS = 64
"""Maximum number of tokens for the CUDA kernel."""

STEP_BYTES = 64
"""Bytes of a weight row that a warp multiplies at a time. The size of a row must be a multiple of this."""


class End(IntEnum):
    """The epilogue of the product: the macro END of native/linear.cu."""

    PLAIN = 0
    ADD = 1
    SILU_MUL = 2
    ROPE_WRITE = 3


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How a block computes a tile of rows.

    row_tiles   tiles of 16 rows per warp
    warps       warps per block
    unroll      steps of 64 bytes of a row in flight per warp
    persistent  True: as many blocks as run concurrently process the tiles in turn; False: one block per tile
    row_warps   warps of a block that take different rows and read the same x; the others split k
    cluster     blocks per cluster, which split k of a tile; 1 if persistent
    """

    row_tiles: int
    warps: int
    unroll: int
    persistent: bool
    row_warps: int = 1
    cluster: int = 1

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def k_parts(self) -> int:
        """Warps of a cluster that split k."""
        return self.warps // self.row_warps * self.cluster

    @property
    def square_rows(self) -> int:
        """Rows per sum of squares."""
        return min(self.rows, 32)

    def fits(self, end: End, rows: int, head_dim: int, rotary_dim: int) -> bool:
        """Return whether tiles divide the rows of a weight, and with ROPE_WRITE also the heads and rotated dims."""
        divided = (rows, head_dim, rotary_dim) if end is End.ROPE_WRITE else (rows,)
        return not any(count % self.rows for count in divided)

    @property
    def ints(self) -> list[int]:
        """The plan as an argument of an operator."""
        return [self.row_tiles, self.warps, self.unroll, int(self.persistent), self.row_warps, self.cluster]

    @classmethod
    def from_ints(cls, values: list[int]) -> LinearPlan:
        """Return the plan with these `ints`."""
        row_tiles, warps, unroll, persistent, row_warps, cluster = values
        return cls(row_tiles, warps, unroll, bool(persistent), row_warps, cluster)


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One product with its epilogue. Tensors have the dtype of x unless noted. Absent tensors are None.

    x            [rows of x, depth]; rows may be strided
    weight       [rows, depth]  contiguous; float8_e4m3fn with `scale`; uint8 [rows, depth / 2] with `scale` and `zero`
    scale        8 bits: [rows]  float32; 4 bits: [rows, groups]; contiguous; else None
    zero         4 bits: [rows, groups]  uint8, contiguous; else None
    bias         [rows]
    x_rows       [tokens]  int64  the row of x of each token; None: its index
    squares      [rows of x, parts]  float32  sums of squares of the vector before its gain; None: x needs no norm
    out          [tokens, width]; ROPE_WRITE: the queries
    residual     ADD: [tokens, rows]  the product is added to it
    gain         ADD: [rows]  out = residual * gain
    squares_out  ADD: [tokens, rows / plan.square_rows]  float32  sums of squares of the residual
    k_cache, v_cache  ROPE_WRITE: [num_pages, page_size, num_kv_heads, head_dim]  last stride 1
    slots, positions  ROPE_WRITE: [tokens]  int64
    cos_sin      ROPE_WRITE: [max_positions, rotary_dim]  float32, contiguous; None: nothing is rotated
    eps          added to the mean square
    end          an End
    early        load the weight before earlier kernels of a captured step have finished; they must not write it
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    bias: torch.Tensor | None
    x_rows: torch.Tensor | None
    squares: torch.Tensor | None
    out: Written
    residual: Written | None
    gain: torch.Tensor | None
    squares_out: Written | None
    k_cache: Written | None
    v_cache: Written | None
    slots: torch.Tensor | None
    positions: torch.Tensor | None
    cos_sin: torch.Tensor | None
    eps: float
    end: int
    plan: LinearPlan
    early: bool

    @property
    def bits(self) -> int:
        """Bits per weight: 16, 8 or 4."""
        return 4 if self.zero is not None else 8 * self.weight.element_size()

    @property
    def depth(self) -> int:
        """Elements of k."""
        return self.x.shape[1]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.out.shape[0]

    @property
    def num_q_heads(self) -> int:
        """ROPE_WRITE: query heads, whose rows come first."""
        assert self.k_cache is not None, "ROPE_WRITE has a cache"
        return self.out.shape[1] // self.k_cache.shape[3]
