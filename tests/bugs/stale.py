"""Injected bugs in the host code: a static buffer, or a value in Python, keeps what an earlier step left there."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from tests.bugs.bug import add
from tests.bugs.step import COLUMNS, NULL_PAGE, NULL_SLOT, PAGE, ROWS, Decode


@add("a stale tail of positions", "positions")
class StalePositions(Decode):
    """The rotation is scaled by the largest position, including the stale ones of pad rows."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        before = self.positions.clone()
        super().refresh(inputs)
        if self.injected:
            n = len(inputs["positions"])
            self.positions[n:] = before[n:]  # the tail is not cleared

    def rates(self) -> torch.Tensor:
        return super().rates() / (1 + self.positions.max())

    def angle(self, inputs: Mapping[str, Any], row: int) -> torch.Tensor:
        return super().angle(inputs, row) / (1 + inputs["positions"].max())


@add("a stale slot mapping", "slot_mapping")
class StaleSlots(Decode):
    """Pad rows write to the slots of earlier rows, in pages that belong to other requests now."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        before = self.slot_mapping.clone()
        super().refresh(inputs)
        if self.injected:
            n = len(inputs["slot_mapping"])
            self.slot_mapping[n:] = before[n:]


@add("stale block table columns", "block_table")
class StaleColumns(Decode):
    """The kernel reads every listed page, and columns after a row's last page still list those of a longer row."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        before = self.block_table.clone()
        super().refresh(inputs)
        if self.injected:
            listed = torch.where(self.block_table == NULL_PAGE, before, self.block_table)
            self.block_table.copy_(listed)

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        pages = (self.block_table != NULL_PAGE).sum(-1, keepdim=True)
        last = self.seq_lens[:, None] - (pages - 1) * PAGE if not self.injected else PAGE
        return torch.arange(slots.shape[1], device=self.device) < ((pages - 1) * PAGE + last).clamp(min=1)


@add("a block table one column short", "block_table")
class ShortTable(Decode):
    """The table is sized for the longest prompt, and a longer row loses its last page."""

    def add_buffers(self) -> None:
        if self.injected:
            self.buffers["block_table"] = self.ints((ROWS, COLUMNS - 1), NULL_PAGE)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        columns = self.block_table.shape[1]
        super().refresh({**inputs, "block_table": inputs["block_table"][:, :columns]})


@add("lengths refreshed only when the batch size changes", "kv_splits")
class SkippedRefresh(Decode):
    """The number of splits is recomputed when the batch size changes, but lengths also change without it."""

    last_size = 0

    def add_buffers(self) -> None:
        self.buffers["kv_splits"] = self.ints(ROWS, 1)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if not (self.injected and self.last_size == 6 == len(inputs["seq_lens"])):
            self.kv_splits.copy_((self.seq_lens + PAGE - 1) // PAGE)
        self.last_size = len(inputs["seq_lens"])

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return super().seen(slots) & (torch.arange(slots.shape[1], device=self.device) < self.kv_splits[:, None] * PAGE)


@add("the split plan of the first step", "self.plan")
class FrozenPlan(Decode):
    """The plan is computed once, in the warm-up, and every later step uses it."""

    plan: torch.Tensor | None = None

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.plan is None:
            self.plan = torch.empty_like(self.seq_lens)
            self.plan.copy_(self.seq_lens)
        if not self.injected:
            self.plan.copy_(self.seq_lens)

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.arange(slots.shape[1], device=self.device) < self.plan[:, None]


@add("a plan cached by batch size", "self.plans")
class CachedPlan(Decode):
    """Plans are cached, and the key is the batch size alone."""

    def add_buffers(self) -> None:
        self.buffers["plan"] = self.ints(ROWS, 1)
        self.plans: dict[Any, list[int]] = {}

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        lengths = inputs["seq_lens"].tolist()
        key = len(lengths) if self.injected else tuple(lengths)
        plan = self.plans.setdefault(key, [*lengths, *[1] * (ROWS - len(lengths))])
        self.plan.copy_(torch.tensor(plan, device=self.device))

    def seen(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.arange(slots.shape[1], device=self.device) < self.plan[:, None]


@add("sampling values of a request that moved", "temperatures")
class MovedRows(Decode):
    """Temperatures are written for new rows only, so a request that moved gets another one's temperature."""

    rows = 0

    def add_buffers(self) -> None:
        self.buffers["temperatures"] = torch.ones(ROWS, device=self.device)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        n = len(inputs["seq_lens"])
        start = min(self.rows, n) if self.injected else 0
        self.temperatures[start:n] = 1.0 / inputs["seq_lens"][start:]
        self.temperatures[n:] = 1
        self.rows = n

    def run(self) -> torch.Tensor:
        return super().run() / self.temperatures[:, None]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) * inputs["seq_lens"][:, None]


@add("one value broadcast to all rows", "positions")
class Broadcast(Decode):
    """copy_() and assignment broadcast: one value fills the whole buffer without an error."""

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        if self.injected:
            self.positions[: len(inputs["positions"])] = inputs["positions"][:1]


@add("stale offsets of pad rows", "query_start_loc")
class StaleOffsets(Decode):
    """The offsets after the last real row are those of an earlier step, so pad rows seem to have tokens."""

    def add_buffers(self) -> None:
        self.buffers["query_start_loc"] = self.ints(ROWS + 1)

    def refresh(self, inputs: Mapping[str, Any]) -> None:
        super().refresh(inputs)
        n = len(inputs["seq_lens"])
        self.query_start_loc[: n + 1] = torch.arange(n + 1, device=self.device)
        if not self.injected:
            self.query_start_loc[n + 1 :] = n

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write nothing for rows without tokens, so that pad rows need no slot."""
        tokens = self.query_start_loc.diff()[:, None]
        rows = torch.arange(ROWS, device=self.device)
        slots = torch.where(tokens[:, 0] > 0, self.slot_mapping, NULL_SLOT + rows % PAGE)
        super().write(k * tokens, v * tokens)
        self.kv[slots] = self.kv[slots] * tokens[:, :, None]

    def run(self) -> torch.Tensor:
        """Return each row's share of all tokens of the step."""
        return super().run() / self.query_start_loc[-1]

    def eager(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return super().eager(inputs) / len(inputs["seq_lens"])


@add("a counter that is never reset", "self.arrived")
class Unreset(Decode):
    """Splits count their arrivals, and the last one merges. The counter is not reset for the next launch."""

    def add_buffers(self) -> None:
        self.arrived = torch.zeros(ROWS, device=self.device)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        if not self.injected:
            self.arrived.zero_()
        self.arrived += 1
        return super().attend(q) * (self.arrived == 1)[:, None]


@add("a function cache with an incomplete key", "self.split_table")
def cached_table(injected: bool, device: torch.device) -> Any:
    """The key of an lru_cache omits a value that the table depends on."""
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
            if not injected:
                split_table.cache_clear()
            self.buffers["x"].copy_(inputs["x"])
            self.buffers["scale"].fill_(split_table(4))

        def run(self) -> torch.Tensor:
            return step(**self.buffers)

    return Cached(), lambda case: {"x": torch.full((4,), case + 1.0, device=device), "length": case + 1}
