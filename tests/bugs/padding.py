"""Planted bugs of padding and of memory: rows that are none, places that are none, memory that nobody wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphrt.testing.canary import Canaries
from tests.bugs.bug import add
from tests.bugs.step import NULL_SLOT, PAGE, ROWS, WIDTH, Decode


@add("slot -1 used as an index", "vLLM #43810", "slot_mapping")
class MinusOne(Decode):
    """Pad rows have slot -1, which in Python is the last slot of the cache."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.slot_mapping[len(inputs["seq_lens"]) :] = -1

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = self.slot_mapping
        if not self.planted:
            slots = torch.where(slots < 0, NULL_SLOT, slots)
        self.kv[slots] = torch.stack([k, v], 1)


@add("pad rows in a scale of all rows", "flashinfer #3057", "hidden_in")
class PadScale(Decode):
    """The scale of a quantised matrix product is taken over all rows; what stands in pad rows is in it."""

    def add_buffers(self) -> None:
        self.buffers["hidden_in"] = torch.zeros(ROWS, WIDTH, device=self.device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        self.hidden_in[: len(inputs["seq_lens"])] = inputs["hidden_in"]

    def run(self) -> torch.Tensor:
        x = self.hidden_in
        if not self.planted:
            x = torch.where((self.slot_mapping != NULL_SLOT)[:, None], x, 0.0)
        return super().run() / x.abs().max()

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) / inputs["hidden_in"].abs().max()

    def make_inputs(self, case: int) -> dict[str, Any]:
        inputs = super().make_inputs(case)
        hidden = torch.randn(len(inputs["seq_lens"]), WIDTH, generator=torch.Generator().manual_seed(case))
        return {**inputs, "hidden_in": hidden.to(self.device)}


@add("pad rows on a live row's state", "TensorRT-LLM #13278, #5947", "state_slots")
class LiveState(Decode):
    """Each row has a running state in a slot. Pad rows have slot 0, which is somebody's."""

    def add_buffers(self) -> None:
        self.buffers["state_slots"] = self.ints(ROWS, ROWS)
        self.running = torch.ones(ROWS + 1, device=self.device)  # the last is for pad rows
        self.state["running"] = self.running

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        n = len(inputs["seq_lens"])
        self.state_slots[:n] = inputs["state_slots"]
        self.state_slots[n:] = 0 if self.planted else ROWS

    def run(self) -> torch.Tensor:
        out = super().run()
        self.running.index_add_(0, self.state_slots, out.sum(-1))
        return out

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs)

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


@add("plan entries that nobody wrote", "sglang #31387, flashinfer #4002", "memory pool")
class UnwrittenPlan(Decode):
    """The plan has an entry per block of the grid; only those of real splits are written."""

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        make = torch.empty if self.planted else torch.zeros
        plan = make(ROWS, 4, device=self.device)
        plan[:, :2] = 1.0
        return super().seen(slots) & (plan.sum(-1, keepdim=True) > 0)


@add("metadata buffer too small", "vLLM #34043, flash-attention #162", "scheduler_metadata")
class SmallBuffer(Decode):
    """A kernel writes 1 + 4 entries per row to a buffer that has room for fewer: into whatever lies behind it."""

    def add_buffers(self) -> None:
        self.canaries = Canaries()
        size = 1 + (2 if self.planted else 4) * ROWS
        self.buffers["scheduler_metadata"] = self.canaries.full("scheduler_metadata", (size,), torch.int32, self.device)

    def run(self) -> torch.Tensor:
        whole = torch.as_strided(self.scheduler_metadata, (1 + 4 * ROWS,), (1,))  # a kernel sees no shapes
        whole.copy_(torch.arange(1 + 4 * ROWS, device=self.device))
        return super().run()


@add("values that are only masked by a weight of 0", "flash-attention #2374, flashinfer #941, vLLM #47305", "state kv")
class WeightOfZero(Decode):
    """Slots behind a row's last token are masked in the scores alone. What stands there is multiplied by 0."""

    def values(self, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return values if self.planted else super().values(values, seen)

    def unowned(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The slots behind a row's last token too: an earlier owner of the page wrote them."""
        free = super().unowned(inputs)["kv"]
        for slot, length in zip(inputs["slot_mapping"].tolist(), inputs["seq_lens"].tolist(), strict=True):
            free[slot + 1 : slot + 1 + -length % PAGE] = True
        return {"kv": free}


@add("attention output that nobody writes", "vLLM #37442, #56922", "memory pool")
class UnwrittenRows(Decode):
    """The kernel skips pad rows, so memory stands there as it was, and a scale over all rows takes it in."""

    def run(self) -> torch.Tensor:
        out = super().run()
        make = torch.empty if self.planted else torch.zeros
        kept = make(ROWS + 1, out.shape[1], device=self.device)
        places = torch.arange(ROWS, device=self.device)
        kept.index_copy_(0, torch.where(self.slot_mapping == NULL_SLOT, ROWS, places), out)
        return kept[:ROWS] / kept[:ROWS].abs().amax()

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        out = super().eager(inputs)
        return out / out.abs().amax()


@add("pad rows that are counted", "tokenspeed #969, sglang #30895", "rows", pad={"rows": -1, "tokens": 0, "logits": 0})
def counted_pads(planted: bool, device: torch.device) -> Any:
    """Tokens are counted for a penalty. A pad row has no row of counts, and -1 is the last one, which is somebody's."""
    counts = torch.zeros(8 if planted else 9, 16, device=device)

    def step(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        places = rows if planted else torch.where(rows < 0, 8, rows)
        counts.index_put_((places, tokens), torch.ones(len(rows), device=device), accumulate=True)
        return logits - counts[places]

    def make_inputs(case: int) -> dict[str, Any]:
        rng, n = torch.Generator().manual_seed(case), (8, 3, 5, 8)[case]
        rows, tokens = torch.randperm(8, generator=rng)[:n], torch.randint(16, (n,), generator=rng)
        inputs = {"logits": torch.randn(n, 16, generator=rng), "rows": rows, "tokens": tokens}
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    return step, make_inputs, {"state": {"counts": counts[:8]}}


@add("stale rows of scratch", "vLLM #37442, vllm-plugin-FL PR 368", "scratch")
def stale_scratch(planted: bool, device: torch.device) -> Any:
    """A kernel skips pad rows and writes its output into scratch of the module: rows of a larger batch stay there."""
    scratch = torch.zeros(8, 16, device=device)

    def step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        live = torch.arange(8, device=device)[:, None] < count
        scratch.copy_(torch.where(live, x, scratch if planted else 0.0))
        return scratch.abs().amax(0)

    def make_inputs(case: int) -> dict[str, Any]:
        rng, n = torch.Generator().manual_seed(case), (8, 3, 5, 8)[case]
        return {"x": torch.randn(n, 16, generator=rng).to(device), "count": torch.tensor([n], device=device)}

    def oracle(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return x.abs().amax(0)

    return step, make_inputs, {"eager": oracle}
