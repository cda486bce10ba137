"""Shadow steps: now and then a step runs eagerly too, from the same state as its graph, and both are compared.

    before ──> eager step ──> what it left      kept
    before ──> graph      ──> what it left      stays: the shadow changes nothing
                                    └─ compared on the device; the host reads one flag, whenever it has arrived

So a server can watch for graphs that have gone wrong while it serves. Everything is queued on the steps' stream.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.cache.copy import PagePacker
from graphrt.kernels.metadata.buffers import BufferKind
from graphrt.program import StepProgram
from graphrt.stats import ShadowDifference, Stats, TensorDifference
from graphrt.step_graphs import StepGraphs

_ALIGNMENT = 16  # bytes: copies begin at words of any dtype
_WORD = torch.int64  # what copies are compared by
_MOST_KEPT = 16  # differences that stats keep

_Named = Mapping[str, torch.Tensor]


class Shadow:
    """Runs steps of a program both ways, and tells `stats` what differed.

    Takes device memory where it runs first: three copies of what a step changes, and what an eager step needs. State
    that the model keeps outside of graphrt's buffers advances twice in a shadowed step.
    """

    def __init__(self, program: StepProgram, graphs: StepGraphs, stats: Stats) -> None:
        self._program, self._graphs, self._stats = program, graphs, stats
        self._before, self._eager, self._graph = _Copies(), _Copies(), _Copies()
        self._packers = [_slot_packer(program, group) for group in range(len(program.kv_cache.groups))]
        self._null_slots = [
            torch.tensor(int(spec.null_page) * spec.page_size, device=program.kv_cache.device)
            for spec in program.kv_cache.groups
            if spec.null_page is not None
        ]
        self._pending: _Pending | None = None

    def run(self, step: int, descriptor: BatchDescriptor, batch: Batch | None, num_reqs: int) -> torch.Tensor:
        """Run a step eagerly, take back what it did, and replay its graph: the graph's logits.

        The step's slot of the inbox must be the next one. An error of the eager step leaves all as it was.
        """
        self.poll(wait=True)  # the copies are in use until then
        with torch.inference_mode(), self._graphs.off_graph():  # which caches may have been made in
            logits, differs = self._both_ways(descriptor, batch, num_reqs)
        self._pending = _Pending(step, descriptor, differs)
        self._stats.shadow_steps += 1
        return logits

    def _both_ways(
        self, descriptor: BatchDescriptor, batch: Batch | None, num_reqs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the graph, and on the device whether both ways differ."""
        state, program = self._state(descriptor), self._program
        self._before.take(state)
        try:
            metadata = program.refresh(descriptor).metadata  # which slots the step writes
            slots = [
                mapping.where(mapping >= 0, null)  # the null page is nobody's
                for mapping, null in zip(metadata.slot_mappings, self._null_slots, strict=True)
            ]
            written = [packer.gather(at) for packer, at in zip(self._packers, slots, strict=True)]
            self._before.give_back(state)
            try:
                logits = self._graphs.run(descriptor, batch, eager=True)
                self._take(self._eager, descriptor, num_reqs, logits, slots)
            finally:
                for packer, at, block in zip(self._packers, slots, written, strict=True):
                    packer.scatter(at, block)
        finally:
            self._before.give_back(state)
        logits = self._graphs.run(descriptor, batch, eager=False)
        self._take(self._graph, descriptor, num_reqs, logits, slots)
        return logits, self._eager.differs_from(self._graph)

    def poll(self, *, wait: bool = False) -> None:
        """Take in the result of the last shadowed step, if it has arrived or `wait`: warns where both ways differ."""
        pending = self._pending
        if pending is None or not (wait or pending.has_arrived()):
            return
        self._pending = None
        if not pending.differs():
            return
        tensors = tuple(self._eager.differences(self._graph))
        difference = ShadowDifference(pending.step, pending.descriptor, tensors)
        self._stats.shadow_differences += (difference,) if len(self._stats.shadow_differences) < _MOST_KEPT else ()
        warnings.warn(f"graphrt: {difference}", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Take in what is pending, and drop the copies."""
        self.poll(wait=True)
        self._before, self._eager, self._graph = _Copies(), _Copies(), _Copies()
        self._packers = []

    def _state(self, descriptor: BatchDescriptor) -> dict[str, torch.Tensor]:
        """Everything that a step changes, the cache aside: the first of it in the order of the step."""
        buffers, rows = self._program.view(descriptor).buffers, self._program.row_tensors
        kinds = (BufferKind.DERIVED, BufferKind.CARRIED, BufferKind.PERSISTENT)
        named = {name: tensor for kind in kinds for name, tensor in buffers.named(kind)}
        others = {f"row tensor {name}": tensor for name, tensor in rows.items()}
        return named | others | {f"backend's {name}": t for name, t in self._program.backend.tensors().items()}

    def _take(
        self,
        copies: _Copies,
        descriptor: BatchDescriptor,
        num_reqs: int,
        logits: torch.Tensor,
        slots: Sequence[torch.Tensor],
    ) -> None:
        """Keep what a step left, in the order in which it came about: the first difference is nearest to its cause."""
        state = {name: t for name, t in self._state(descriptor).items() if not name.startswith("backend's ")}
        persistent = {name for name, _ in self._program.buffers.named(BufferKind.PERSISTENT)}
        rows = logits[:num_reqs]
        if self._program.decode_len(descriptor):
            rows = logits.index_select(0, self._program.buffers.places[:num_reqs])
        written = {
            f"kv of group {group}": packer.gather(at)
            for group, (packer, at) in enumerate(zip(self._packers, slots, strict=True))
        }
        early = {name: tensor for name, tensor in state.items() if name not in persistent}
        late = {name: tensor for name, tensor in state.items() if name in persistent}
        copies.take(early | written | {"logits": rows} | late)


class _Copies:
    """Copies of tensors in one block of bytes, which grows where it must."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: dict[str, torch.Tensor] = {}
        self._used = 0

    def take(self, named: _Named) -> None:
        """Copy these, and forget all others."""
        at, places = 0, []
        for tensor in named.values():
            places.append(at)
            at += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        device = next(iter(named.values())).device
        if self._block.numel() < at or self._block.device != device:
            self._block = torch.zeros(at, dtype=torch.uint8, device=device)
        self._used = at
        self._views = {
            name: self._block[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, (name, t) in zip(places, named.items(), strict=True)
        }
        torch._foreach_copy_(list(self._views.values()), list(named.values()))

    def give_back(self, named: _Named) -> None:
        """Write the copies back to the tensors that they were taken of."""
        torch._foreach_copy_(list(named.values()), list(self._views.values()))

    def differs_from(self, other: _Copies) -> torch.Tensor:
        """Whether any bit differs, as one value on the device; both have the same tensors."""
        assert self._used == other._used, "both runs of a step leave the same tensors"
        return (self._block[: self._used].view(_WORD) != other._block[: self._used].view(_WORD)).any()

    def differences(self, graph: _Copies) -> Iterator[TensorDifference]:
        """The tensors that differ, with the first element that does. Waits for the device."""
        for name, eager in self._views.items():
            pair = eager.contiguous(), graph._views[name].contiguous()
            bits = [t.view(torch.uint8).view(t.numel(), t.element_size()) for t in pair]
            other = (bits[0] != bits[1]).any(-1)
            if count := int(other.sum()):
                first = int(other.int().argmax())
                values = [t.view(-1)[first : first + 1].double().item() for t in pair]
                index = _index(first, tuple(eager.shape))
                yield TensorDifference(name, index, values[1], values[0], count, eager.numel())


@dataclass(slots=True)
class _Pending:
    """The flag of a shadowed step, on its way to the host."""

    step: int
    descriptor: BatchDescriptor
    flag: torch.Tensor
    event: Any = None

    def __post_init__(self) -> None:
        if self.flag.device.type == "cuda":
            pinned = torch.empty(1, dtype=torch.bool, device="cpu", pin_memory=True)
            self.flag, self.event = pinned.copy_(self.flag[None], non_blocking=True), torch.cuda.Event()
            self.event.record()

    def has_arrived(self) -> bool:
        return self.event is None or bool(self.event.query())

    def differs(self) -> bool:
        if self.event is not None:
            self.event.synchronize()
        return bool(self.flag)


class _SlotPacker:
    """Gathers single tokens of a KV group, all its layers, into one block of bytes, and scatters them again.

    Where a page's tokens do not lie one after the other (the HND layout), whole pages take their place.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], page_size: int) -> None:
        by_token = all(t.stride(0) == page_size * t.stride(1) for t in tensors)
        self._page_size = 1 if by_token else page_size
        if by_token:
            tensors = [
                t.as_strided((len(t) * page_size, 1, *t.shape[2:]), (t.stride(1), *t.stride()[1:])) for t in tensors
            ]
        self._packer = PagePacker(tensors)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """[slots, bytes of one] uint8."""
        block = torch.empty(len(slots) * self._packer.page_bytes, dtype=torch.uint8, device=slots.device)
        self._packer.pack(slots // self._page_size, block)
        return block.view(len(slots), -1)

    def scatter(self, slots: torch.Tensor, block: torch.Tensor) -> None:
        """Write back what `gather` gave: a slot that is named twice gets the same twice."""
        self._packer.unpack(slots // self._page_size, block.view(-1))


def _slot_packer(program: StepProgram, group: int) -> _SlotPacker:
    k, v = program.kv_cache.of_group(group)
    return _SlotPacker((*k, *v), program.kv_cache.groups[group].page_size)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the element at a place in row-major order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return tuple(flat // stride % extent for stride, extent in zip(strides, shape, strict=True))
