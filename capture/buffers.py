"""The static buffers: every tensor, other than weights and KV, whose address a graph may hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import torch


class BufferKind(str, Enum):
    """Who may change a buffer, and when.

    UPLOADED    its used prefix is overwritten by each step's upload
    PERSISTENT  survives replays: row state keyed by row_id, and counters
    DERIVED     rewritten by every refresh, for every captured row; may be poisoned between replays
    OUTPUT      host memory that the graph writes to, one entry per step in flight
    """

    UPLOADED = "uploaded"
    PERSISTENT = "persistent"
    DERIVED = "derived"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Declaration of one static buffer; docs/decode_step.md is generated from these.

    shape   names of Capacity attributes, or integers
    initial value that it is filled with at allocation
    pad     what the refresh writes for pad rows and pad tokens, in words
    """

    shape: tuple[str | int, ...]
    dtype: torch.dtype
    kind: BufferKind
    writer: str
    readers: str
    pad: str
    initial: int | float = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The extents that static buffers are allocated for."""

    rows: int  # most requests in a step
    tokens: int  # most new tokens in a step
    pages_per_row: int  # width of the block table
    row_ids: int  # persistent row states
    slots: int  # KV slots in the cache
    record: int  # int32 words in the largest step record
    ring: int  # steps in flight

    @property
    def rows_plus_one(self) -> int:
        return self.rows + 1

    @property
    def claims(self) -> int:
        """One claim per KV slot, then one per row id."""
        return self.slots + self.row_ids


def _buffer(
    shape: tuple[str | int, ...],
    dtype: torch.dtype,
    kind: BufferKind,
    *,
    writer: str,
    readers: str,
    pad: str,
    initial: int | float = 0,
) -> Any:
    return field(metadata={"spec": BufferSpec(shape, dtype, kind, writer, readers, pad, initial)})


_UP, _PERSISTENT, _DERIVED, _OUT = BufferKind.UPLOADED, BufferKind.PERSISTENT, BufferKind.DERIVED, BufferKind.OUTPUT


@dataclass(frozen=True, slots=True)
class StaticBuffers:
    """Allocated once for the largest descriptor; a graph gets views. Never reallocated."""

    record: torch.Tensor = _buffer(
        ("record",), torch.int32, _UP, writer="upload", readers="refresh", pad="not padded: the header has the counts"
    )

    last_token: torch.Tensor = _buffer(
        ("row_ids",), torch.int32, _PERSISTENT, writer="publish", readers="refresh", pad="untouched", initial=-1
    )
    step_counter: torch.Tensor = _buffer(
        (1,), torch.int64, _PERSISTENT, writer="refresh", readers="publish", pad="one value", initial=-1
    )
    claims: torch.Tensor = _buffer(
        ("claims",), torch.int64, _PERSISTENT, writer="refresh", readers="refresh", pad="untouched"
    )
    duplicates: torch.Tensor = _buffer(
        (2, "rows"), torch.int64, _PERSISTENT, writer="refresh", readers="refresh", pad="untouched"
    )

    input_ids: torch.Tensor = _buffer(("tokens",), torch.int64, _DERIVED, writer="refresh", readers="model", pad="0")
    positions: torch.Tensor = _buffer(
        ("tokens",), torch.int64, _DERIVED, writer="refresh", readers="model, KV write", pad="0"
    )
    slot_mapping: torch.Tensor = _buffer(
        ("tokens",), torch.int64, _DERIVED, writer="refresh", readers="KV write", pad="-1, from the real token count on"
    )
    query_start_loc: torch.Tensor = _buffer(
        ("rows_plus_one",), torch.int32, _DERIVED, writer="refresh", readers="attention", pad="repeats its last value"
    )
    seq_lens: torch.Tensor = _buffer(
        ("rows",), torch.int32, _DERIVED, writer="refresh", readers="attention, sampling", pad="the backend's fill"
    )
    block_table: torch.Tensor = _buffer(
        ("rows", "pages_per_row"), torch.int32, _DERIVED, writer="refresh", readers="attention",
        pad="null page, also beyond a row's pages",
    )  # fmt: skip
    logits_indices: torch.Tensor = _buffer(("rows",), torch.int64, _DERIVED, writer="refresh", readers="model", pad="0")
    row_ids: torch.Tensor = _buffer(("rows",), torch.int32, _DERIVED, writer="refresh", readers="publish", pad="-1")
    row_status: torch.Tensor = _buffer(
        ("rows",),
        torch.int32,
        _DERIVED,
        writer="refresh",
        readers="publish",
        pad="PAD (-1); INVALID (-2) after a fault",
    )
    temperatures: torch.Tensor = _buffer(
        ("rows",), torch.float32, _DERIVED, writer="refresh", readers="sampling", pad="0"
    )
    seeds: torch.Tensor = _buffer(("rows",), torch.int64, _DERIVED, writer="refresh", readers="sampling", pad="0")
    fault_code: torch.Tensor = _buffer(("rows",), torch.int32, _DERIVED, writer="refresh", readers="refresh", pad="0")
    fault_value: torch.Tensor = _buffer(("rows",), torch.int64, _DERIVED, writer="refresh", readers="refresh", pad="0")

    token_ring: torch.Tensor = _buffer(
        ("ring", "rows"),
        torch.int32,
        _OUT,
        writer="publish",
        readers="host, by the step's handle",
        pad="-1",
        initial=-1,
    )
    fault_ring: torch.Tensor = _buffer(
        ("ring", 4), torch.int64, _OUT, writer="refresh", readers="host, by the step's handle",
        pad="{step, row, code, value} of the first fault; row -1 without one", initial=-1,
    )  # fmt: skip

    @classmethod
    def specs(cls) -> dict[str, BufferSpec]:
        """Declaration of every buffer, by name."""
        return {f.name: f.metadata["spec"] for f in fields(cls)}

    @classmethod
    def allocate(cls, capacity: Capacity, device: torch.device) -> StaticBuffers:
        """All buffers for `capacity` on `device`; OUTPUT ones in (pinned) host memory."""
        tensors = {}
        for name, spec in cls.specs().items():
            shape = [getattr(capacity, s) if isinstance(s, str) else s for s in spec.shape]
            on_host = spec.kind is BufferKind.OUTPUT
            tensors[name] = torch.full(
                shape,
                spec.initial,
                dtype=spec.dtype,
                device="cpu" if on_host else device,
                pin_memory=on_host and device.type == "cuda",
            )
        return cls(**tensors)

    def named(self, *kinds: BufferKind) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of every buffer of the given kinds, or of all."""
        for name, spec in self.specs().items():
            if not kinds or spec.kind in kinds:
                yield name, getattr(self, name)

    def reset(self) -> None:
        """Put every buffer back to its initial contents, as after an aborted launch. The device must be idle."""
        for name, tensor in self.named():
            tensor.fill_(self.specs()[name].initial)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, host memory included."""
        return sum(t.numel() * t.element_size() for _, t in self.named())
