"""Memory that nobody may read before it is written, poisoned between replays.

On CUDA: every block of torch's allocator that is inactive, those of the graph's private pool too. A tensor that was
captured by its address and then freed shows as NaN. So does the memory of `torch.empty` and its kin, by a fill within
the graph: such memory is often that of an intermediate, which the graph has written by then.
On a CPU: the memory of `torch.empty` and its kin that the captured step asked for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphrt.capture.allocator import allocator_rows
from graphrt.capture.inspect.pool import blocks_of
from graphrt.capture.op_trace import UNWRITTEN_FACTORIES
from graphrt.kernels.errors import ReplayError

_UNWRITTEN = UNWRITTEN_FACTORIES - {"aten::lift_fresh"}  # whose values were written before
NAN_BYTE = 0xFF
"""NaN in every float format, -1 in integers."""


class _Unwritten(TorchDispatchMode):
    """Around a step: `_got` is called with the memory that the step got without contents."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _UNWRITTEN:
            for tensor in tree_leaves(result):
                self._got(tensor.untyped_storage())
        return result

    def _got(self, storage: torch.UntypedStorage) -> None:
        raise NotImplementedError


class UnwrittenMemory(_Unwritten):
    """Around a step on a CPU: remembers the memory that the step got without contents."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def _got(self, storage: torch.UntypedStorage) -> None:
        self._storages[storage.data_ptr()] = storage

    @property
    def count(self) -> int:
        return len(self._storages)

    def fill(self, byte: int) -> None:
        for storage in self._storages.values():
            storage_bytes(storage).fill_(byte)


class _BesideCompiled(_Unwritten):
    """Compiled functions run compiled beside it: what these allocate is not seen."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class UnwrittenInGraph(_BesideCompiled):
    """Around a step that is captured on CUDA: behind each allocation without contents the graph fills it with a byte.

    count   allocations that are filled
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._byte = torch.zeros(1, dtype=torch.uint8, device=device)
        self._device, self._filled = device, set[int]()

    def _got(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() and storage.device == self._device:
            self._filled.add(storage.data_ptr())
            storage_bytes(storage).copy_(self._byte)

    @property
    def count(self) -> int:
        return len(self._filled)

    def fill(self, byte: int) -> None:
        """With which byte later launches do it."""
        self._byte.fill_(byte)


class _Zeroed(_Unwritten):
    """Around an eager step: memory without contents holds zeros."""

    def _got(self, storage: torch.UntypedStorage) -> None:
        storage_bytes(storage).zero_()


class _ZeroedBesideCompiled(_Zeroed, _BesideCompiled):
    """The same where compiled functions run compiled."""


@contextlib.contextmanager
def zeroed(device: torch.device) -> Iterator[None]:
    """A block in which memory without contents holds zeros: an eager run that reads it gives the same each time.

    On a CPU compiled functions run as they were written, as they do on an op trace.
    """
    if device.type == "cuda":
        fill_inactive(device, 0)
        with _ZeroedBesideCompiled():
            yield
        return
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_Zeroed())
        yield


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as uint8."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return alias.set_(storage)


def inactive_blocks(device: torch.device) -> list[tuple[int, int]]:
    """Address and bytes of every block of torch's allocator on a CUDA device that nothing uses."""
    return [
        (address, block["size"])
        for segment, block, address in blocks_of(allocator_rows())
        if segment["device"] == device.index and block["state"] == "inactive"
    ]


def fill_inactive(device: torch.device, byte: int = NAN_BYTE) -> int:
    """Fill all inactive blocks with a byte, and return how many bytes that were. Waits for the device."""
    from cuda.bindings import driver

    torch.cuda.synchronize(device)
    blocks = inactive_blocks(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):  # a stream is one of the current device's context
        for address, size in blocks:
            (code,) = driver.cuMemsetD8Async(address, byte, size, stream)
            if code != driver.CUresult.CUDA_SUCCESS:
                raise ReplayError(
                    f"pool: expected a block of {size} bytes at {address:#x} to take poison, got {code.name}; the "
                    "allocator has given its memory back meanwhile, allocate on one thread"
                )
    torch.cuda.synchronize(device)
    return sum(size for _, size in blocks)
