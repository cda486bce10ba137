"""Poison memory that a step must write before it reads.

On CUDA, this is every inactive block of torch's allocator, including the graph's private pool, so a tensor that was
captured by address and then freed reads as NaN. A graph node fills the memory of `torch.empty`. This memory often
belonged to an earlier intermediate of the same graph, which would overwrite poison from before the launch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphrt.capture.allocator import allocator_rows
from graphrt.capture.inspect.pool import blocks_of
from graphrt.capture.op_trace import UNWRITTEN_FACTORIES
from graphrt.kernels.errors import ReplayError
from graphrt.testing.verify.compare import has_memory

_UNWRITTEN = UNWRITTEN_FACTORIES - {"aten::lift_fresh"}  # returns values that were written before
NAN_BYTE = 0xFF
"""NaN in all float formats, -1 in integers."""


class _Unwritten(TorchDispatchMode):
    """Call a function with each uninitialized allocation of the step that runs inside the mode."""

    def __init__(self, got: Callable[[torch.UntypedStorage], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._got = got

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _UNWRITTEN:
            for tensor in tree_leaves(result):
                self._got(tensor.untyped_storage())
        return result


class _UnwrittenOnCuda(_Unwritten):
    """Let compiled functions run inside the mode, which does not detect their allocations."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def _watching(device: torch.device, got: Callable[[torch.UntypedStorage], object]) -> _Unwritten:
    return (_UnwrittenOnCuda if device.type == "cuda" else _Unwritten)(got)


class UnwrittenInGraph:
    """Make a graph fill each uninitialized allocation of the step inside `watch` right after it.

    `count` is the number of allocations.
    """

    def __init__(self, device: torch.device) -> None:
        self._byte = torch.zeros(1, dtype=torch.uint8, device=device)
        self._filled = set[int]()
        self.watch = _watching(device, self._got)

    def _got(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() and storage.device == self._byte.device:
            self._filled.add(storage.data_ptr())
            storage_bytes(storage).copy_(self._byte)

    @property
    def count(self) -> int:
        return len(self._filled)

    def fill(self, byte: int) -> None:
        """Set the fill byte for subsequent launches."""
        self._byte.fill_(byte)


@contextlib.contextmanager
def zeroed(device: torch.device) -> Iterator[None]:
    """Fill uninitialized memory with zeros, so that eager runs that read it are deterministic.

    On a CPU, compiled functions run uncompiled, as in an op trace.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            fill_inactive(device, 0)
        elif "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_watching(device, lambda storage: storage_bytes(storage).zero_()))
        yield


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage as a uint8 tensor that shares its memory."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return alias.set_(storage)


def inactive_blocks(device: torch.device) -> list[tuple[int, int]]:
    """Return the address and size in bytes of each unused block of torch's allocator on a CUDA device."""
    return [
        (address, block["size"])
        for segment, block, address in blocks_of(allocator_rows())
        if segment["device"] == device.index and block["state"] == "inactive"
    ]


class CapturedMemory:
    """Keeps the memory of the step's tensors at capture, and poisons it once the step has dropped them.

    Otherwise the allocator could reuse the memory for a tensor created by a later refresh(). The graph would then read
    correct values by chance.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._aliases = [tensor.detach() for tensor in tensors if has_memory(tensor) and tensor.is_cuda]

    def poison_dropped(self) -> None:
        """Fill the memory that no tensor of the step uses."""
        alone = _owners(torch.empty(1, device="cpu"))
        for alias in self._aliases:
            if _owners(alias) == alone:
                torch.empty(0, dtype=torch.uint8, device=alias.device).set_(alias.untyped_storage()).fill_(NAN_BYTE)


def _owners(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def fill_inactive(device: torch.device, byte: int = NAN_BYTE) -> int:
    """Fill all inactive blocks with a byte and return their size in bytes. Waits for the device.

    Raises:
        ReplayError: if the allocator released a block during the call.
    """
    from cuda.bindings import driver

    torch.cuda.synchronize(device)
    blocks = inactive_blocks(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):  # the stream belongs to the current device's context
        for address, size in blocks:
            (code,) = driver.cuMemsetD8Async(address, byte, size, stream)
            if code != driver.CUresult.CUDA_SUCCESS:
                raise ReplayError(
                    f"pool: cannot poison a block of {size} bytes at {address:#x}: {code.name}; another thread made "
                    "the allocator release it, so allocate on one thread during verify"
                )
    torch.cuda.synchronize(device)
    return sum(size for _, size in blocks)
