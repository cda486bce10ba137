"""A correct decode step in plain torch: static buffers, the host code that fills them, and an oracle without buffers.

Each injected bug changes a few lines of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

ROWS, PAGE, PAGES, COLUMNS, WIDTH, VOCAB = 6, 4, 20, 4, 8, 31
NULL_PAGE = PAGES - 2  # for pad rows. No request of the batch owns the last page
NULL_SLOT = NULL_PAGE * PAGE
LENGTHS = ([5, 9, 1, 12, 8, 4], [3, 7], [8, 4, 2, 11, 5], [13, 2, 7, 16, 1, 5])
"""Lengths of the rows in each case. The batch shrinks and grows, and some lengths are at page boundaries."""


class Decode:
    """Process one token per row: write its key and value to the row's page, attend to the row, return logits."""

    def __init__(self, injected: bool = False, device: torch.device | str = "cpu") -> None:
        self.injected, self.device = injected, torch.device(device)
        rng = torch.Generator().manual_seed(7)
        self.embed = torch.randn(VOCAB, WIDTH, generator=rng).to(device)
        self.weights = torch.randn(3, WIDTH, WIDTH, generator=rng).to(device) / WIDTH**0.5
        self.kv = torch.randn(PAGES * PAGE, 2, WIDTH, generator=rng).to(device)
        self.kv[NULL_SLOT : NULL_SLOT + PAGE] = 0
        self.state = {"kv": self.kv}
        self.buffers = {
            "input_ids": self.ints(ROWS),
            "positions": self.ints(ROWS),
            "seq_lens": self.ints(ROWS, 1),
            "slot_mapping": self.ints(ROWS, NULL_SLOT),
            "block_table": self.ints((ROWS, COLUMNS), NULL_PAGE),
        }
        self.add_buffers()

    def ints(self, shape: Any, value: int = 0) -> torch.Tensor:
        return torch.full((shape,) if isinstance(shape, int) else shape, value, device=self.device)

    def add_buffers(self) -> None:
        """Add the buffers of a bug."""

    def __getattr__(self, name: str) -> Any:
        """Return a buffer by its name."""
        try:
            return self.__dict__["buffers"][name]
        except KeyError:
            raise AttributeError(name) from None

    # -- host code

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        """Copy the real rows. Each pad row has one token in the null page."""
        n = len(inputs["seq_lens"])
        fills = {"input_ids": 0, "positions": 0, "seq_lens": 1, "slot_mapping": NULL_SLOT, "block_table": NULL_PAGE}
        for name, pad in fills.items():
            self.buffers[name][:n] = inputs[name]
            self.buffers[name][n:] = pad

    # -- the captured body

    def run(self) -> torch.Tensor:
        x = self.hidden()
        q, k, v = (x @ w for w in self.weights)
        self.write(k, v)
        return self.attend(q) @ self.embed.t()

    def hidden(self) -> torch.Tensor:
        return self.embed[self.input_ids] + torch.cos(self.positions[:, None] * self.rates())

    def rates(self) -> torch.Tensor:
        return torch.arange(1, WIDTH + 1, device=self.device) / 20

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.kv[self.slot_mapping] = torch.stack([k, v], 1)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        places = torch.arange(PAGE, device=self.device)
        slots = (self.block_table[:, :, None] * PAGE + places).flatten(1)  # [rows, columns * page]
        seen = self.seen(slots)
        keys, values = self.kv[slots].unbind(2)
        scores = torch.einsum("rd,rkd->rk", q, keys).masked_fill(~seen, float("-inf"))
        weights = scores.softmax(-1)
        return torch.einsum("rk,rkd->rd", weights, self.values(values, seen))

    def values(self, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(~seen[:, :, None], 0.0)

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.arange(slots.shape[1], device=self.device) < self.seq_lens[:, None]

    # -- for verify

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Compute row by row in float64, without padding, null page and buffers."""
        embed, weights, kv = (t.double() for t in (self.embed, self.weights, self.kv))
        out = []
        for row in range(len(inputs["seq_lens"])):
            length, pages = int(inputs["seq_lens"][row]), inputs["block_table"][row].tolist()
            x = embed[inputs["input_ids"][row]] + torch.cos(self.angle(inputs, row).double()) + self.carried(row)
            q, k, v = (x @ w for w in weights)
            slots = [pages[at // PAGE] * PAGE + at % PAGE for at in range(length - 1)]
            keys, values = torch.cat([kv[slots, 0], k[None]]), torch.cat([kv[slots, 1], v[None]])
            out.append((torch.softmax(keys @ q, 0) @ values) @ embed.t())
        return torch.stack(out).float()

    def angle(self, inputs: Mapping[str, Any], row: int) -> torch.Tensor:
        return inputs["positions"][row] * (torch.arange(1, WIDTH + 1, device=self.device) / 20)

    def carried(self, row: int) -> Any:
        """Return what a row takes over from the previous step, out of the state."""
        return 0

    def real(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Compare everything except the null page."""
        own = torch.ones(PAGES * PAGE, dtype=torch.bool, device=self.device)
        own[NULL_SLOT : NULL_SLOT + PAGE] = False
        return {"out": slice(0, len(inputs["seq_lens"])), "kv": own}

    def unowned(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pages that no row of this case lists, except the null page."""
        free = torch.ones(PAGES, dtype=torch.bool, device=self.device)
        free[inputs["block_table"].flatten()] = False
        free[NULL_PAGE] = False
        return {"kv": free.repeat_interleave(PAGE)}

    def make_inputs(self, case: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(100 + case)
        lengths = torch.tensor(LENGTHS[case])
        pages = (torch.randperm(NULL_PAGE, generator=rng) + 0).tolist()
        table = torch.full((len(lengths), COLUMNS), NULL_PAGE)
        for row, length in enumerate(lengths.tolist()):
            for column in range(-(-length // PAGE)):
                table[row, column] = pages.pop()
        last = lengths - 1
        slots = table[torch.arange(len(lengths)), last // PAGE] * PAGE + last % PAGE
        ids = torch.randint(VOCAB, lengths.shape, generator=rng)
        named = {"input_ids": ids, "positions": last, "seq_lens": lengths, "slot_mapping": slots, "block_table": table}
        return {name: tensor.to(self.device) for name, tensor in named.items()}
