"""A step on trial: what it changes is copied before it runs, and written back behind it, on the steps' stream.

undo = StepUndo(program)
with undo.undone(descriptor) as slots:      # the step's slot of the inbox must be the next one
    ...                                     # run the step, keep what is wanted of it
                                            # row state, derived buffers and cache are as before, also by an error
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.kernels.cache.copy import PagePacker
from graphrt.kernels.metadata.buffers import BufferKind
from graphrt.program import StepProgram

_ALIGNMENT = 16  # bytes: copies begin at words of any dtype

Slots = Sequence[torch.Tensor]
"""By KV group, the flat KV slot of each new token, [padded_tokens] int64; a slot of the null page for pad tokens."""


class Copies:
    """Copies of tensors by name, in one block of bytes, which grows where it must."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.views: dict[str, torch.Tensor] = {}

    def take(self, named: Mapping[str, torch.Tensor]) -> None:
        """Copy these tensors, which are on one device, and forget all others."""
        at, places = 0, []
        for tensor in named.values():
            places.append(at)
            at += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        device = next(iter(named.values())).device
        whole = self.block.untyped_storage()
        if whole.nbytes() < at or self.block.device != device:
            self.block = torch.zeros(at, dtype=torch.uint8, device=device)
        self.block = torch.empty(0, dtype=torch.uint8, device=device).set_(self.block.untyped_storage(), 0, (at,), (1,))
        self.views = {
            name: self.block[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, (name, t) in zip(places, named.items(), strict=True)
        }
        torch._foreach_copy_(list(self.views.values()), list(named.values()))

    def give_back(self, named: Mapping[str, torch.Tensor]) -> None:
        """Write the copies back to the tensors that they were taken of."""
        torch._foreach_copy_(list(named.values()), list(self.views.values()))


class StepUndo:
    """Takes back steps of a program. Keeps its copies from step to step: device memory for what a step changes.

    State that the model keeps outside of graphrt's buffers is not taken back.
    """

    def __init__(self, program: StepProgram) -> None:
        self._program, self._copies = program, Copies()
        cache = program.kv_cache
        self._packers, self._null_slots = [], []
        for group, spec in enumerate(cache.groups):
            assert isinstance(spec.null_page, int), "resolved by the cache"
            k, v = cache.of_group(group)
            self._packers.append(_SlotPacker((*k, *v), spec.page_size))
            self._null_slots.append(torch.tensor(spec.null_page * spec.page_size, device=cache.device))

    @contextmanager
    def undone(self, descriptor: BatchDescriptor) -> Iterator[Slots]:
        """What one step changes in this block is as before behind it. The block gets the slots that the step writes.

        Everything is queued on the current stream, and the host does not wait. Call it in inference mode.
        """
        state = self.state(descriptor) | {
            f"backend's {name}": tensor for name, tensor in self._program.backend.tensors().items()
        }
        self._copies.take(state)
        try:
            # The refresh says which slots the step will write.
            mappings = self._program.refresh(descriptor).metadata.slot_mappings
            slots = [
                mapping.where(mapping >= 0, null) for mapping, null in zip(mappings, self._null_slots, strict=True)
            ]
            written = self.written(slots)
            self._copies.give_back(state)
            try:
                yield slots
            finally:
                for packer, at, block in zip(self._packers, slots, written.values(), strict=True):
                    packer.scatter(at, block)
        finally:
            self._copies.give_back(state)

    def state(self, descriptor: BatchDescriptor) -> dict[str, torch.Tensor]:
        """What a step writes beside the cache, by name: derived buffers first, row state last, as in a step."""
        buffers = self._program.view(descriptor).buffers
        rows = {f"row tensor {name}": tensor for name, tensor in self._program.row_tensors.items()}
        return dict(buffers.named(BufferKind.DERIVED, BufferKind.CARRIED)) | rows | dict(
            buffers.named(BufferKind.PERSISTENT)
        )  # fmt: skip

    def written(self, slots: Slots) -> dict[str, torch.Tensor]:
        """A copy of what the cache holds in these slots, [tokens, bytes] uint8 by KV group."""
        return {
            f"kv of group {group}": packer.gather(at)
            for group, (packer, at) in enumerate(zip(self._packers, slots, strict=True))
        }


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
