"""Which tokens a layer sees, learned from the mask function that `transformers` would build its mask with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Reach:
    """A causal layer sees all earlier tokens, those in a sliding window, or those in its own chunk."""

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def sees(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return whether tokens at positions q see those at positions k."""
        found = k <= q
        if self.sliding_window is not None:
            found &= k > q - self.sliding_window
        if self.attention_chunk_size is not None:
            found &= k // self.attention_chunk_size == q // self.attention_chunk_size
        return found


def reach_of(predicate: Callable[..., Any], length: int) -> Reach | None:
    """Return which tokens a mask function shows in sequences of up to `length` tokens; None if no `Reach` describes
    them.

    The first token that does not see token 0 gives the size. In a window, that token still sees token 1. In a chunk, it
    sees only itself. A grid of positions then confirms the answer.

    predicate  maps batch, head, query and key positions to bool
    """
    if length < 2:
        return Reach()
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    last = torch.arange(length, device="cpu")

    def sees(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = predicate(zero, zero, q, k)
        return torch.as_tensor(found, device="cpu").expand(torch.broadcast_shapes(q.shape, k.shape))

    hidden = (~sees(last, torch.zeros_like(last))).nonzero()
    reach = Reach()
    if len(hidden):
        size = int(hidden[0])
        if size == 0:
            return None
        reach = Reach(sliding_window=size)
        if size > 1 and not bool(sees(last[size], last[1])):
            reach = Reach(attention_chunk_size=size)
    size = reach.sliding_window or reach.attention_chunk_size or length
    near = {0, 1, 2, length // 2, length - 1} | {n * size + d for n in (1, 2, 3) for d in (-2, -1, 0, 1, 2)}
    grid = torch.tensor(sorted(at for at in near if 0 <= at < length), device="cpu")
    grid = torch.cat((grid, torch.linspace(0, length - 1, 61, dtype=torch.float64, device="cpu").long())).unique()
    q, k = grid[:, None], grid[None, :]
    return reach if bool((sees(q, k) == reach.sees(q, k)).all()) else None
