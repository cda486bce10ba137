"""Which part of each weight a rank holds, if the ranks of a process group share a model.

All ranks have weights of equal shapes. Where a dimension does not divide, the last ranks have zeros, which add exactly
0 to every sum. Matrices of queries, keys, values, gate and up are split by rows, those of output and down by columns,
embedding and head by tokens. Norms are not split. Scales and zeros of quantized weights are split with them. The bounds
of columns are multiples of a group; for the output, of a smaller group, whose scales are repeated (`empty_weight`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

import torch
from torch import distributed as dist

from graphrt.kernels.errors import UnsupportedError
from graphrt.kernels.ops.collectives import vocab_part
from graphrt.kernels.ops.quantized import GROUPS, Weight
from graphrt.kernels.sizes import ceil_div
from graphrt.models.config import ModelConfig
from graphrt.models.weights import WeightSource

_INTERMEDIATE_BITS = 512  # kernels of products load 64 bytes of a row; in int4, these are whole groups


class Part(NamedTuple):
    """The part [first, end) of a dimension of a checkpoint tensor, whose full size is `size`."""

    dim: int
    first: int
    end: int
    size: int


@dataclass(frozen=True, slots=True)
class Sharding:
    """The shard of one rank.

    Attributes:
        full: configuration of the whole model.
        config: configuration of a shard: numbers of heads and intermediate size; other values are those of the model.
        vocab_columns: rows of embedding and head.
    """

    full: ModelConfig
    config: ModelConfig
    rank: int = 0
    ranks: int = 1
    vocab_columns: int = 0

    @classmethod
    def of(cls, config: ModelConfig, group: dist.ProcessGroup | None) -> Sharding:
        """Return the shard of this rank; the whole model without a group.

        Raises: UnsupportedError: if the model cannot be split over this number of ranks. The message lists all reasons.
        """
        if group is None:
            return cls(config, config, vocab_columns=config.vocab_size)
        rank, ranks = group.rank(), group.size()
        kv_heads, queries = config.num_kv_heads, config.num_q_heads // config.num_kv_heads
        copies = max(1, ranks // kv_heads)  # ranks that hold the same KV head
        per_rank, quantization = ceil_div(kv_heads, ranks), config.quantization
        num_q_heads = per_rank * queries // copies
        inputs = num_q_heads * config.head_dim  # width of the attention output
        _, _, columns = vocab_part(config.vocab_size, rank, ranks)
        reasons = []
        if ranks > kv_heads and (ranks % kv_heads or queries % copies):
            reasons.append(f"{config.num_q_heads} query and {kv_heads} KV heads cannot be divided among {ranks} ranks")
        elif quantization is not None and quantization.bits == 4 and gcd(quantization.group, inputs) not in GROUPS:
            reasons.append(
                f"the attention output would have {inputs} inputs per rank, which are not whole groups of at least "
                f"{min(GROUPS)} int4 weights"
            )
        if ranks > 1 and config.vocab_size <= columns:
            reasons.append(f"a vocabulary of {config.vocab_size} is too small for {ranks} ranks")
        if reasons:
            raise UnsupportedError(f"group: {'; '.join(reasons)}; use fewer ranks, or another checkpoint")
        multiple = _INTERMEDIATE_BITS // (16 if quantization is None else quantization.bits)
        width = multiple * ceil_div(ceil_div(config.intermediate_size, ranks), multiple)
        shard = replace(
            config,
            num_kv_heads=per_rank,
            num_q_heads=num_q_heads,
            intermediate_size=width if ranks > 1 else config.intermediate_size,
        )
        return cls(config, shard, rank, ranks, columns)

    @property
    def kv_copies(self) -> int:
        """Number of consecutive ranks that hold the same KV heads."""
        return max(1, self.ranks // self.full.num_kv_heads)

    def part(self, name: str) -> Part | None:
        """Return the part of a checkpoint tensor that this rank holds; None: all of it."""
        *_, module, kind = name.split(".")
        full, config = self.full, self.config
        if self.ranks == 1 and self.vocab_columns == full.vocab_size:
            return None
        if module in ("embed_tokens", "lm_head"):
            first, end, _ = vocab_part(full.vocab_size, self.rank, self.ranks)
            return Part(0, first, end, full.vocab_size)
        if module in ("gate_proj", "up_proj", "down_proj"):
            heads, size, unit = config.intermediate_size, full.intermediate_size, 1
            first = self.rank * heads
        elif module in ("q_proj", "o_proj"):
            heads, size, unit = config.num_q_heads, full.num_q_heads, full.head_dim
            first = self.rank * heads
        elif module in ("k_proj", "v_proj"):
            heads, size, unit = config.num_kv_heads, full.num_kv_heads, full.head_dim
            first = self.rank * heads // self.kv_copies
        else:
            return None
        by_columns = module in ("o_proj", "down_proj")
        if by_columns and kind == "bias":  # added once, after the sum
            return None
        first, end = (min(at, size) * unit for at in (first, first + heads))
        return Part(int(by_columns), first, end, size * unit)

    def shape(self, name: str, target: Weight) -> tuple[int, ...]:
        """Return the shape of the checkpoint tensor whose part is copied to `target`."""
        shape, part = list(target.shape), self.part(name)
        if part is not None:
            shape[part.dim] = part.size
        return tuple(shape)

    def load(self, checkpoint: WeightSource, name: str, target: Weight) -> None:
        """Copy this rank's part of a checkpoint tensor into `target`, and zeros into its padding."""
        part = self.part(name)
        if part is None:
            checkpoint.copy_into(name, target)
            return
        count = part.end - part.first
        if isinstance(target, torch.Tensor):
            target.narrow(part.dim, count, target.shape[part.dim] - count).zero_()
            target = target.narrow(part.dim, 0, count)
        else:
            target.zero_()
        if count:
            index = (*[slice(None)] * part.dim, slice(part.first, part.end))
            checkpoint.copy_into(name, target, index)
