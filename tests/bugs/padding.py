"""Injected bugs of padding and memory: pad rows that count, invalid indices, and memory that is never written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphrt.testing.canary import Canaries
from tests.bugs.bug import add
from tests.bugs.step import NULL_SLOT, PAGE, ROWS, WIDTH, Decode


@add("slot -1 used as an index", "slot_mapping")
class MinusOne(Decode):
    """Pad rows have slot -1, which indexes the last slot of the cache."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.slot_mapping[len(inputs["seq_lens"]) :] = -1

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = self.slot_mapping
        if not self.injected:
            slots = torch.where(slots < 0, NULL_SLOT, slots)
        self.kv[slots] = torch.stack([k, v], 1)


@add("pad rows in a scale of all rows", "hidden_in")
class PadScale(Decode):
    """The scale of a quantized matrix product is computed over all rows, including pad rows."""

    def add_buffers(self) -> None:
        self.buffers["hidden_in"] = torch.zeros(ROWS, WIDTH, device=self.device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.hidden_in[: len(inputs["seq_lens"])] = inputs["hidden_in"]

    def run(self) -> torch.Tensor:
        x = self.hidden_in
        if not self.injected:
            x = torch.where((self.slot_mapping != NULL_SLOT)[:, None], x, 0.0)
        return super().run() / x.abs().max()

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) / inputs["hidden_in"].abs().max()

    def make_inputs(self, case: int) -> dict[str, Any]:
        inputs = super().make_inputs(case)
        hidden = torch.randn(len(inputs["seq_lens"]), WIDTH, generator=torch.Generator().manual_seed(case))
        return {**inputs, "hidden_in": hidden.to(self.device)}


@add("pad rows that update a live request's state", "state_slots")
class LiveState(Decode):
    """Each request has a state slot. Pad rows have slot 0, which belongs to a request."""

    def add_buffers(self) -> None:
        self.buffers["state_slots"] = self.ints(ROWS, ROWS)
        self.running = torch.ones(ROWS + 1, device=self.device)  # the last one is for pad rows
        self.state["running"] = self.running

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        n = len(inputs["seq_lens"])
        self.state_slots[:n] = inputs["state_slots"]
        self.state_slots[n:] = 0 if self.injected else ROWS

    def run(self) -> torch.Tensor:
        out = super().run()
        self.running.index_add_(0, self.state_slots, out.sum(-1))
        return out

    def real(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().real(inputs), "running": slice(0, ROWS)}

    def unowned(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        free = torch.ones(ROWS + 1, dtype=torch.bool, device=self.device)
        free[inputs["state_slots"]] = False
        free[ROWS] = False
        return {**super().unowned(inputs), "running": free}

    def make_inputs(self, case: int) -> dict[str, Any]:
        inputs = super().make_inputs(case)
        n = len(inputs["seq_lens"])
        return {**inputs, "state_slots": torch.arange(ROWS - n, ROWS, device=self.device)}


@add("plan entries that are never written", "memory pool")
class UnwrittenPlan(Decode):
    """The plan has one entry per block of the grid, and only entries of real splits are written."""

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        make = torch.empty if self.injected else torch.zeros
        plan = make(ROWS, 4, device=self.device)
        plan[:, :2] = 1.0
        return super().seen(slots) & (plan.sum(-1, keepdim=True) > 0)


@add("a metadata buffer that is too small", "scheduler_metadata")
class SmallBuffer(Decode):
    """A kernel writes 1 + 4 * rows entries to a smaller buffer, and overwrites the memory after it."""

    def add_buffers(self) -> None:
        self.canaries = Canaries()
        size = 1 + (2 if self.injected else 4) * ROWS
        self.buffers["scheduler_metadata"] = self.canaries.full("scheduler_metadata", (size,), torch.int32, self.device)

    def run(self) -> torch.Tensor:
        whole = torch.as_strided(self.scheduler_metadata, (1 + 4 * ROWS,), (1,))  # a kernel gets no shape
        whole.copy_(torch.arange(1 + 4 * ROWS, device=self.device))
        return super().run()


@add("values masked only by a weight of 0", "state kv")
class WeightOfZero(Decode):
    """Slots after a row's last token are masked in the scores only, so their values are multiplied by 0."""

    def values(self, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return values if self.injected else super().values(values, seen)

    def unowned(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Also return the slots after a row's last token, which an earlier owner of the page wrote."""
        free = super().unowned(inputs)["kv"]
        for slot, length in zip(inputs["slot_mapping"].tolist(), inputs["seq_lens"].tolist(), strict=True):
            free[slot + 1 : slot + 1 + -length % PAGE] = True
        return {"kv": free}


@add("attention output rows that are never written", "memory pool")
class UnwrittenRows(Decode):
    """The kernel skips pad rows, and a scale over all rows includes their uninitialized memory."""

    def run(self) -> torch.Tensor:
        out = super().run()
        make = torch.empty if self.injected else torch.zeros
        kept = make(ROWS + 1, out.shape[1], device=self.device)
        places = torch.arange(ROWS, device=self.device)
        kept.index_copy_(0, torch.where(self.slot_mapping == NULL_SLOT, ROWS, places), out)
        return kept[:ROWS] / kept[:ROWS].abs().amax()

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        out = super().eager(inputs)
        return out / out.abs().amax()


@add("pad rows that are counted", "rows", pad={"rows": -1, "tokens": 0, "logits": 0})
def counted_pads(injected: bool, device: torch.device) -> Any:
    """Tokens are counted for a penalty. Pad rows have index -1, the last row of counts, which belongs to a request."""
    counts = torch.zeros(8 if injected else 9, 16, device=device)

    def step(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        places = rows if injected else torch.where(rows < 0, 8, rows)
        counts.index_put_((places, tokens), torch.ones(len(rows), device=device), accumulate=True)
        return logits - counts[places]

    def make_inputs(case: int) -> dict[str, Any]:
        rng, n = torch.Generator().manual_seed(case), (8, 3, 5, 8)[case]
        rows, tokens = torch.randperm(8, generator=rng)[:n], torch.randint(16, (n,), generator=rng)
        inputs = {"logits": torch.randn(n, 16, generator=rng), "rows": rows, "tokens": tokens}
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    return step, make_inputs, {"state": {"counts": counts[:8]}}


@add("stale rows of scratch memory", "scratch")
def stale_scratch(injected: bool, device: torch.device) -> Any:
    """A kernel skips pad rows and writes to scratch memory of the module, where rows of a larger batch remain."""
    scratch = torch.zeros(8, 16, device=device)

    def step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        live = torch.arange(8, device=device)[:, None] < count
        scratch.copy_(torch.where(live, x, scratch if injected else 0.0))
        return scratch.abs().amax(0)

    def make_inputs(case: int) -> dict[str, Any]:
        rng, n = torch.Generator().manual_seed(case), (8, 3, 5, 8)[case]
        return {"x": torch.randn(n, 16, generator=rng).to(device), "count": torch.tensor([n], device=device)}

    def oracle(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(0)

    return step, make_inputs, {"eager": oracle}
