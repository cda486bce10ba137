"""Undo a step. The state that it changes is copied before it and restored after it, on the stream of the steps.

undo = StepUndo(program)
with undo.undone(descriptor) as slots:      # the next entry of the input ring has the inputs of the step
    ...                                     # run the step, copy its results
                                            # request state, derived buffers and cache are restored, even after an error
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

_LISTED = (torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.uint8)  # copied in batches
_ALIGNMENT = 16  # bytes, so that copies begin at words of any dtype

Slots = Sequence[torch.Tensor]
"""Per KV group, the KV slots that a step may write, int64; a slot of the null page for padding."""


class Copies:
    """Copies of tensors by name, in one block of bytes that grows as needed."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.views: dict[str, torch.Tensor] = {}
        self._layout: list[Any] = []

    def take(self, named: Mapping[str, torch.Tensor]) -> None:
        """Copy these tensors, all on one device, and drop all earlier copies."""
        layout = [(name, t.shape, t.stride(), t.dtype, t.device) for name, t in named.items()]
        if layout != self._layout:
            self._lay_out(named)
            self._layout = layout
        _copy_each(self.views.values(), named.values())

    def restore(self, named: Mapping[str, torch.Tensor]) -> None:
        """Write the copies back to the tensors."""
        _copy_each(named.values(), self.views.values())

    def _lay_out(self, named: Mapping[str, torch.Tensor]) -> None:
        """Divide the block into views. Views of dense tensors have the same strides."""
        at, places = 0, []
        for tensor in named.values():
            places.append(at)
            at += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        device = next(iter(named.values())).device
        whole = self.block.untyped_storage()
        if whole.nbytes() < at or self.block.device != device:
            self.block = torch.empty(at, dtype=torch.uint8, device=device)
        self.block = torch.empty(0, dtype=torch.uint8, device=device).set_(self.block.untyped_storage(), 0, (at,), (1,))
        self.block.zero_()  # gaps between views are never written, but compared
        self.views = {}
        for start, (name, tensor) in zip(places, named.items(), strict=True):
            words = self.block[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
            dense = tensor.is_contiguous()
            self.views[name] = words.as_strided(tensor.shape, tensor.stride()) if dense else words.view(tensor.shape)


def _copy_each(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy with one launch per dtype if the strides are equal. For mixed dtypes, torch would launch one copy each."""
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
    """Undoes steps of a program, except for state that the model keeps outside of graphrt's buffers."""

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
        """Return a context that restores the state changed by one step. It yields the KV slots that are written.

        All work is queued on the current stream, and the host does not wait. Use it in inference mode.
        """
        state = self.state(descriptor) | {
            f"backend's {name}": tensor for name, tensor in self._program.backend.tensors().items()
        }
        self._copies.take(state)
        try:
            # The refresh computes the KV slots that the step writes.
            mappings = self._program.slots(self._program.refresh(descriptor))
            slots = [
                mapping.where(mapping >= 0, null) for mapping, null in zip(mappings, self._null_slots, strict=True)
            ]
            written = self.written(slots)
            self._copies.restore(state)
            try:
                yield slots
            finally:
                for packer, at, block in zip(self._packers, slots, written.values(), strict=True):
                    packer.scatter(at, block)
        finally:
            self._copies.restore(state)

    def state(self, descriptor: BatchDescriptor) -> dict[str, torch.Tensor]:
        """Return the tensors that a step writes, except the cache, in execution order. Request state is last."""
        of_step, of_rows = self._program.view(descriptor).buffers.once(_changed)
        given = {f"request tensor {name}": tensor for name, tensor in self._program.request_tensors.items()}
        return of_step | given | of_rows

    def written(self, slots: Slots) -> dict[str, torch.Tensor]:
        """Return a copy of the cache in these KV slots, [tokens, bytes] uint8 per KV group."""
        return {
            f"kv of group {group}": packer.gather(at)
            for group, (packer, at) in enumerate(zip(self._packers, slots, strict=True))
        }


def _changed(buffers: StaticBuffers) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the buffers that are valid within a step, and the buffers that keep state between steps."""
    return dict(buffers.named(BufferKind.DERIVED, BufferKind.CARRIED)), dict(buffers.named(BufferKind.PERSISTENT))


class _SlotPacker:
    """Packs single tokens of a KV group, from all its layers; whole pages if their tokens are not contiguous (HND)."""

    def __init__(self, tensors: Sequence[torch.Tensor], page_size: int) -> None:
        by_token = all(t.stride(0) == page_size * t.stride(1) for t in tensors)
        self._page_size = 1 if by_token else page_size
        if by_token:
            tensors = [
                t.as_strided((len(t) * page_size, 1, *t.shape[2:]), (t.stride(1), *t.stride()[1:])) for t in tensors
            ]
        self._packer = PagePacker(tensors)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the bytes of KV slots, [slots, bytes per slot] uint8."""
        block = torch.empty(len(slots) * self._packer.page_bytes, dtype=torch.uint8, device=slots.device)
        self._packer.pack(self._pages(slots), block)
        return block.view(len(slots), -1)

    def scatter(self, slots: torch.Tensor, block: torch.Tensor) -> None:
        """Write back the result of `gather`. A KV slot that occurs twice has the same bytes twice."""
        self._packer.unpack(self._pages(slots), block.view(-1))

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self._page_size == 1 else slots // self._page_size
