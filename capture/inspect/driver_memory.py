"""Look up allocations through the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cuda.bindings import driver

from graphrt.capture.inspect.memory import Owner, Region
from graphrt.kernels.native.nvrtc import ensure_context

_ATTRIBUTE = driver.CUpointer_attribute


LookUp = Callable[[int], Region | None]
"""Returns the allocation that contains an address, with owner HOST or LIBRARY; None if there is none."""


def driver_memory() -> LookUp:
    """Return the lookup function of this process's CUDA driver."""
    torch.cuda.init()
    ensure_context(torch.cuda.current_device())
    return _memory_at


def _memory_at(address: int) -> Region | None:
    """Return the region at an address, without synchronizing. An invalid address causes no sticky error."""
    status, kind = driver.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    if int(status) != 0 or not int(kind):
        return None
    host = int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
    start = _attribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address, address)
    nbytes = _attribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address, 1)
    if not start <= address < start + nbytes:  # the driver does not report this range
        start, nbytes = address, 1
    name = "pinned memory" if host else "memory of the driver or of a library"
    return Region(name, Owner.HOST if host else Owner.LIBRARY, start, nbytes)


def _attribute(attribute: object, address: int, otherwise: int) -> int:
    status, value = driver.cuPointerGetAttribute(attribute, address)
    return int(value) if int(status) == 0 else otherwise
