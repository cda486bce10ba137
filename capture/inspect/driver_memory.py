"""Look up allocations in the CUDA driver."""

from __future__ import annotations

from typing import Protocol

import torch
from cuda.bindings import driver

from graphrt.capture.inspect.memory import Owner, Region
from graphrt.kernels.native.nvrtc import ensure_context

_ATTRIBUTE = driver.CUpointer_attribute


class Driver(Protocol):
    """Looks up memory that torch's allocator does not manage."""

    def memory_at(self, address: int) -> Region | None:
        """Return the allocation that contains an address, with owner HOST or LIBRARY; None if there is none."""


class CudaDriver:
    """The CUDA driver of this process."""

    def __init__(self) -> None:
        torch.cuda.init()
        ensure_context(torch.cuda.current_device())

    def memory_at(self, address: int) -> Region | None:
        """Does not synchronize. For an invalid address one call fails, which sets no sticky error."""
        status, kind = driver.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        if int(status) != 0 or not int(kind):
            return None
        host = int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
        start = _attribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address, address)
        nbytes = _attribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address, 1)
        if not start <= address < start + nbytes:  # the driver does not report the range
            start, nbytes = address, 1
        name = "pinned memory" if host else "memory of the driver or of a library"
        return Region(name, Owner.HOST if host else Owner.LIBRARY, start, nbytes)


class NoDriver:
    """Knows no memory. For graphs of another process, and for op traces."""

    def memory_at(self, address: int) -> Region | None:
        return None


def _attribute(attribute: object, address: int, otherwise: int) -> int:
    status, value = driver.cuPointerGetAttribute(attribute, address)
    return int(value) if int(status) == 0 else otherwise
