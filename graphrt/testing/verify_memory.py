"""Memory that nobody may read before it is written, poisoned between replays.

On CUDA: every block of torch's allocator that is inactive, those of the graph's private pool too. An intermediate that
a graph reads before it writes it, and a tensor that was captured by its address and then freed, show as NaN.
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

from graphrt.kernels.errors import ReplayError

_UNWRITTEN = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)
NAN_BYTE = 0xFF
"""NaN in every float format, -1 in integers."""


class UnwrittenMemory(TorchDispatchMode):
    """Around a step on a CPU: remembers the memory that the step got without contents, or fills it with zeros."""

    def __init__(self, *, zero: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._zero = zero
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _UNWRITTEN:
            for tensor in tree_leaves(result):
                storage = tensor.untyped_storage()
                if self._zero:
                    storage_bytes(storage).zero_()
                else:
                    self._storages[storage.data_ptr()] = storage
        return result

    @property
    def count(self) -> int:
        return len(self._storages)

    def fill(self, byte: int) -> None:
        for storage in self._storages.values():
            storage_bytes(storage).fill_(byte)


@contextlib.contextmanager
def zeroed(device: torch.device) -> Iterator[None]:
    """A block in which memory without contents holds zeros: an eager run that reads it gives the same each time.

    On a CPU compiled functions run as they were written, as they do on an op tape.
    """
    if device.type == "cuda":
        fill_inactive(device, 0)
        yield
        return
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(UnwrittenMemory(zero=True))
        yield


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as uint8."""
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return alias.set_(storage)


def inactive_blocks(device: torch.device) -> list[tuple[int, int]]:
    """Address and bytes of every block of torch's allocator on a CUDA device that nothing uses."""
    found = []
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device.index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                found.append((address, block["size"]))
            address += block["size"]
    return found


def fill_inactive(device: torch.device, byte: int = NAN_BYTE) -> int:
    """Fill all inactive blocks with a byte, and return how many bytes that were. Waits for the device."""
    from cuda.bindings import driver

    torch.cuda.synchronize(device)
    blocks = inactive_blocks(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    for address, size in blocks:
        (code,) = driver.cuMemsetD8Async(address, byte, size, stream)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise ReplayError(
                f"pool: expected a block of {size} bytes at {address:#x} to take poison, got {code.name}; the "
                "allocator has given its memory back meanwhile, allocate on one thread"
            )
    torch.cuda.synchronize(device)
    return sum(size for _, size in blocks)
