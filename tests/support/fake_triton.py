"""Triton with a fake driver: kernels are compiled for sm_90, but not loaded or launched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class FakeTriton:
    """`launch(block)` runs the launch path of a kernel: look-up, compilation, load. Each block size is a variant.

    launched   block sizes, in order
    launches   grids of all launches, of any kernel
    """

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.launches: list[tuple[int, ...]] = []
        self._functions: list[JITFunction[Any]] = []
        self.kernel = self.new_kernel()

    def new_kernel(self) -> JITFunction[Any]:
        self._functions.append(JITFunction(add_one))  # with TRITON_INTERPRET=1, triton.jit returns another type
        return self._functions[-1]

    def launch(self, block: int) -> None:
        self.kernel[(1,)](torch.zeros(8), 8, BLOCK=block)
        self.launched.append(block)

    def forget(self) -> None:
        """Drop module handles, so that freed kernels do not ask the real driver to unload them."""
        for function in self._functions:
            for kernels, *_ in function.device_caches.values():
                for kernel in kernels.values():
                    kernel.module = None


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    """Make the fake driver the active one."""
    fake = FakeTriton()
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda source, metadata: lambda x, y, z, *arguments: fake.launches.append((x, y, z)),
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, kernel, shared, device: (1, 2, 16, 0, 1024),
            unload_module=lambda module: None,
        ),
    )
    monkeypatch.setattr(driver, "_active", active)
    yield fake
    fake.forget()


def add_one(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) + 1, mask=offsets < n)
