"""Memory that nobody may read before it is written, poisoned between replays.

On CUDA: every block of torch's allocator that is inactive, those of the graph's private pool too. An intermediate that
a graph reads before it writes it, and a tensor that was captured by its address and then freed, show as NaN.
On a CPU: the memory of `torch.empty` and its kin that the captured step asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphrt.kernels.errors import ReplayError

_UNWRITTEN = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)
_NAN_BYTE = 0xFF
"""NaN in every float format but integers, in which it is -1."""


class UnwrittenMemory(TorchDispatchMode):
    """Around the captured step: remembers the memory that the step got without contents.

    keep   addresses of storages that stay as they are
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _UNWRITTEN:
            for tensor in tree_leaves(result):
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = storage
        return result

    @property
    def count(self) -> int:
        return len(self._storages)

    def poison(self) -> None:
        for storage in self._storages.values():
            storage_bytes(storage).fill_(_NAN_BYTE)


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


def poison_inactive(device: torch.device) -> int:
    """Fill all inactive blocks with bytes 0xff, and return how many bytes that were. Waits for the device."""
    from cuda.bindings import driver

    torch.cuda.synchronize(device)
    blocks = inactive_blocks(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    for address, size in blocks:
        (code,) = driver.cuMemsetD8Async(address, _NAN_BYTE, size, stream)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise ReplayError(
                f"pool: expected a block of {size} bytes at {address:#x} to take poison, got {code.name}; the "
                "allocator has given its memory back meanwhile, allocate on one thread"
            )
    torch.cuda.synchronize(device)
    return sum(size for _, size in blocks)
