"""Planted bugs of the host's side: something in a static buffer, or around it, is left as an earlier step had it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from tests.bugs.bug import add
from tests.bugs.step import COLUMNS, NULL_PAGE, NULL_SLOT, PAGE, ROWS, Decode


@add("stale positions tail", "sglang #24361, #10892", "positions")
class StalePositions(Decode):
    """The rotation is scaled by the longest position in the step, pad rows included."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        before = self.positions.clone()
        super().refresh(inputs)
        if self.planted:
            n = len(inputs["positions"])
            self.positions[n:] = before[n:]  # nobody clears the tail

    def rates(self) -> torch.Tensor:
        return super().rates() / (1 + self.positions.max())

    def angle(self, inputs: Mapping[str, Any], row: int) -> torch.Tensor:
        return super().angle(inputs, row) / (1 + inputs["positions"].max())


@add("stale slot mapping", "vLLM #36580, #21228", "slot_mapping")
class StaleSlots(Decode):
    """Pad rows write to the slots of rows that were there before: pages that belong to others by now."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        before = self.slot_mapping.clone()
        super().refresh(inputs)
        if self.planted:
            n = len(inputs["slot_mapping"])
            self.slot_mapping[n:] = before[n:]


@add("stale table columns", "nano-vllm PR 258", "block_table")
class StaleColumns(Decode):
    """The kernel takes every listed page; columns behind a row's last page still list those of a longer row."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        before = self.block_table.clone()
        super().refresh(inputs)
        if self.planted:
            listed = torch.where(self.block_table == NULL_PAGE, before, self.block_table)
            self.block_table.copy_(listed)

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        pages = (self.block_table != NULL_PAGE).sum(-1, keepdim=True)
        last = self.seq_lens[:, None] - (pages - 1) * PAGE if not self.planted else PAGE
        return torch.arange(slots.shape[1], device=self.device) < ((pages - 1) * PAGE + last).clamp(min=1)


@add("table one column short", "nano-vllm #106, #190", "block_table")
class ShortTable(Decode):
    """The table was sized for the longest prompt, and a row that grows past it loses its last page."""

    def add_buffers(self) -> None:
        if self.planted:
            self.buffers["block_table"] = self.ints((ROWS, COLUMNS - 1), NULL_PAGE)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        columns = self.block_table.shape[1]
        super().refresh({**inputs, "block_table": inputs["block_table"][:, :columns]})


@add("lengths refreshed when the batch size changes only", "sglang #26019", "kv_splits")
class SkippedRefresh(Decode):
    """How many splits a row has is computed anew when the batch size changes, but lengths change without it."""

    last_size = 0

    def add_buffers(self) -> None:
        self.buffers["kv_splits"] = self.ints(ROWS, 1)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if not (self.planted and self.last_size == 6 == len(inputs["seq_lens"])):
            self.kv_splits.copy_((self.seq_lens + PAGE - 1) // PAGE)
        self.last_size = len(inputs["seq_lens"])

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < self.kv_splits[:, None] * PAGE)


@add("split plan of the first step", "TensorRT-LLM #18769", "self.plan")
class FrozenPlan(Decode):
    """The plan is made once, at the warm-up, and every later step attends to what it says."""

    plan: torch.Tensor | None = None

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.plan is None:
            self.plan = torch.empty_like(self.seq_lens)
            self.plan.copy_(self.seq_lens)
        if not self.planted:
            self.plan.copy_(self.seq_lens)

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.arange(slots.shape[1], device=self.device) < self.plan[:, None]


@add("plan cached by batch size", "rtp-llm #1084", "self.plans")
class CachedPlan(Decode):
    """A cache of plans with the batch size for its key."""

    def add_buffers(self) -> None:
        self.buffers["plan"] = self.ints(ROWS, 1)
        self.plans: dict[Any, list[int]] = {}

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        lengths = inputs["seq_lens"].tolist()
        key = len(lengths) if self.planted else tuple(lengths)
        plan = self.plans.setdefault(key, [*lengths, *[1] * (ROWS - len(lengths))])
        self.plan.copy_(torch.tensor(plan, device=self.device))

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.arange(slots.shape[1], device=self.device) < self.plan[:, None]


@add("sampling values of a row that moved", "vLLM #43894", "temperatures")
class MovedRows(Decode):
    """A row's temperature is written when a row is new, by a count, and rows that take others' places keep theirs."""

    rows = 0

    def add_buffers(self) -> None:
        self.buffers["temperatures"] = torch.ones(ROWS, device=self.device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        n = len(inputs["seq_lens"])
        start = min(self.rows, n) if self.planted else 0
        self.temperatures[start:n] = 1.0 / inputs["seq_lens"][start:]
        self.temperatures[n:] = 1
        self.rows = n

    def run(self) -> torch.Tensor:
        return super().run() / self.temperatures[:, None]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) * inputs["seq_lens"][:, None]


@add("one row's value broadcast to all", "TensorRT-LLM #18207", "positions")
class Broadcast(Decode):
    """copy_ and assignment broadcast: a slice that is too short fills the whole buffer without an error."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.planted:
            self.positions[: len(inputs["positions"])] = inputs["positions"][:1]


@add("offsets of pad rows", "sglang #1094, #1469, padded lengths", "query_start_loc")
class StaleOffsets(Decode):
    """Packed rows end where the next begins; behind the last real row the offsets of an earlier step go on."""

    def add_buffers(self) -> None:
        self.buffers["query_start_loc"] = self.ints(ROWS + 1)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        n = len(inputs["seq_lens"])
        self.query_start_loc[: n + 1] = torch.arange(n + 1, device=self.device)
        if not self.planted:
            self.query_start_loc[n + 1 :] = n

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows without tokens write nothing, so that pad rows need no slot."""
        tokens = self.query_start_loc.diff()[:, None]
        rows = torch.arange(ROWS, device=self.device)
        slots = torch.where(tokens[:, 0] > 0, self.slot_mapping, NULL_SLOT + rows % PAGE)
        super().write(k * tokens, v * tokens)
        self.kv[slots] = self.kv[slots] * tokens[:, :, None]

    def run(self) -> torch.Tensor:
        """The share of a row among all tokens of the step."""
        return super().run() / self.query_start_loc[-1]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) / len(inputs["seq_lens"])


@add("a counter that nobody resets", "aiter #4494, #4715, #4920", "self.arrived")
class Unreset(Decode):
    """Split rows count who has arrived; the last one merges. The counter is not put back for the next launch."""

    def add_buffers(self) -> None:
        self.arrived = torch.zeros(ROWS, device=self.device)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        if not self.planted:
            self.arrived.zero_()
        self.arrived += 1
        return super().attend(q) * (self.arrived == 1)[:, None]


@add("cache of results in a function", "aiter #4587, its cache", "self.split_table")
def cached_table(planted: bool, device: torch.device) -> Any:
    """An lru_cache with a key that leaves out what the table depends on."""
    lengths = {"now": 0}

    @functools.lru_cache
    def split_table(rows: int) -> float:
        return 1.0 / lengths["now"]

    def step(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale * 0 + x * scale

    class Cached:
        def __init__(self) -> None:
            self.buffers = {"x": torch.zeros(4, device=device), "scale": torch.zeros(1, device=device)}
            self.split_table = split_table

        def refresh(self, inputs: Mapping[str, Any]) -> None:
            lengths["now"] = inputs["length"]
            if not planted:
                split_table.cache_clear()
            self.buffers["x"].copy_(inputs["x"])
            self.buffers["scale"].fill_(split_table(4))

        def run(self) -> torch.Tensor:
            return step(**self.buffers)

    return Cached(), lambda case: {"x": torch.full((4,), case + 1.0, device=device), "length": case + 1}
