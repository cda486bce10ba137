"""Asks the CUDA driver whose memory an address lies in: never guess what a call can tell."""

from __future__ import annotations

from typing import Protocol

import torch
from cuda.bindings import driver

from graphrt.capture.inspect.memory import Owner, Region
from graphrt.kernels.native.nvrtc import ensure_context

_ATTRIBUTE = driver.CUpointer_attribute


class Driver(Protocol):
    """Who knows memory that torch's allocator does not."""

    def memory_at(self, address: int) -> Region | None:
        """The allocation that holds the byte at an address, as HOST or LIBRARY; None where there is none."""


class CudaDriver:
    """The CUDA driver of this process."""

    def __init__(self) -> None:
        torch.cuda.init()
        ensure_context(torch.cuda.current_device())

    def memory_at(self, address: int) -> Region | None:
        """Synchronises nothing. An address that is none costs one call, which fails and leaves no error behind."""
        status, kind = driver.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        if int(status) != 0 or not int(kind):
            return None
        host = int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
        start = _attribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address, address)
        nbytes = _attribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address, 1)
        if not start <= address < start + nbytes:  # a driver that does not tell the range
            start, nbytes = address, 1
        name = "pinned memory" if host else "memory of the driver or of a library"
        return Region(name, Owner.HOST if host else Owner.LIBRARY, start, nbytes)


class NoDriver:
    """Knows no memory: for graphs of another process, and for twins on a CPU."""

    def memory_at(self, address: int) -> Region | None:
        return None


def _attribute(attribute: object, address: int, otherwise: int) -> int:
    status, value = driver.cuPointerGetAttribute(attribute, address)
    return int(value) if int(status) == 0 else otherwise
