"""A step on trial: what it changes is copied before it runs, and written back behind it, on the steps' stream.

undo = StepUndo(program)
with undo.undone(descriptor) as slots:      # the step's slot of the input_ring must be the next one
    ...                                     # run the step, keep what is wanted of it
                                            # row state, derived buffers and cache are as before, also by an error
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphrt.capture.descriptor import BatchDescriptor
from graphrt.engine.program import StepProgram
from graphrt.kernels.cache.copy import PagePacker
from graphrt.kernels.metadata.buffers import BufferKind, StaticBuffers

_LISTED = (torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.uint8)  # copied many at a time
_ALIGNMENT = 16  # bytes: copies begin at words of any dtype

Slots = Sequence[torch.Tensor]
"""By KV group, the flat KV slot of each new token, [padded_tokens] int64; a slot of the null page for pad tokens."""


class Copies:
    """Copies of tensors by name, in one block of bytes, which grows where it must."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.views: dict[str, torch.Tensor] = {}
        self._layout: list[Any] = []

    def take(self, named: Mapping[str, torch.Tensor]) -> None:
        """Copy these tensors, which are on one device, and forget all others."""
        layout = [(name, t.shape, t.stride(), t.dtype, t.device) for name, t in named.items()]
        if layout != self._layout:
            self._lay_out(named)
            self._layout = layout
        _copy_each(self.views.values(), named.values())

    def give_back(self, named: Mapping[str, torch.Tensor]) -> None:
        """Write the copies back to the tensors that they were taken of."""
        _copy_each(named.values(), self.views.values())

    def _lay_out(self, named: Mapping[str, torch.Tensor]) -> None:
        """Cut the block into views, with the strides of the tensors where these are dense."""
        at, places = 0, []
        for tensor in named.values():
            places.append(at)
            at += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        device = next(iter(named.values())).device
        whole = self.block.untyped_storage()
        if whole.nbytes() < at or self.block.device != device:
            self.block = torch.empty(at, dtype=torch.uint8, device=device)
        self.block = torch.empty(0, dtype=torch.uint8, device=device).set_(self.block.untyped_storage(), 0, (at,), (1,))
        self.block.zero_()  # nothing is copied to what lies between the views
        self.views = {}
        for start, (name, tensor) in zip(places, named.items(), strict=True):
            words = self.block[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
            dense = tensor.is_contiguous()
            self.views[name] = words.as_strided(tensor.shape, tensor.stride()) if dense else words.view(tensor.shape)


def _copy_each(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """One launch per dtype, for tensors of equal strides. Of a mixed list torch would copy each by itself."""
    alike: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.dtype in _LISTED and target.stride() == source.stride():
            of_dtype = alike.setdefault(target.dtype, ([], []))
            of_dtype[0].append(target)
            of_dtype[1].append(source)
        else:
            target.copy_(source)
    for both in alike.values():
        torch._foreach_copy_(*both)


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
        of_step, of_rows = self._program.view(descriptor).buffers.once(_changed)
        given = {f"row tensor {name}": tensor for name, tensor in self._program.request_tensors.items()}
        return of_step | given | of_rows

    def written(self, slots: Slots) -> dict[str, torch.Tensor]:
        """A copy of what the cache holds in these slots, [tokens, bytes] uint8 by KV group."""
        return {
            f"kv of group {group}": packer.gather(at)
            for group, (packer, at) in enumerate(zip(self._packers, slots, strict=True))
        }


def _changed(buffers: StaticBuffers) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Buffers of a step that it changes, and those that survive it."""
    return dict(buffers.named(BufferKind.DERIVED, BufferKind.CARRIED)), dict(buffers.named(BufferKind.PERSISTENT))


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
        self._packer.pack(self._pages(slots), block)
        return block.view(len(slots), -1)

    def scatter(self, slots: torch.Tensor, block: torch.Tensor) -> None:
        """Write back what `gather` gave: a slot that is named twice gets the same twice."""
        self._packer.unpack(self._pages(slots), block.view(-1))

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self._page_size == 1 else slots // self._page_size
