"""Launches of Triton kernels that cost the host little: Triton's binder looks at a launch only when it is a new one.

    first launch    rms_norm, bf16, aligned, strides 2048   ->  binder, compiler   ->  compiled kernel, kept
    next launches   the same, other addresses               ->  found by its key   ->  compiled kernel

The binder looks at every argument of every launch, and takes longer than the driver. A step has some 75 launches of
Triton kernels, and few of these are new.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes: Triton compiles another variant for addresses that are no multiple of it
_MOST_KNOWN = 4096  # launches that are kept per kernel: far more than a runtime has sizes

_Pointer = torch.Tensor | None
_Values = Callable[[tuple[Any, ...]], tuple[Any, ...]]


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel on this device can start before the one before it has ended, and wait for it (`launch_pdl`)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class KernelLauncher:
    """Launches one kernel: `launcher(grid, *args, **named)` for `kernel[grid](*args, **named)`.

    kernel   under `triton.jit`; names of its pointers end in `_ptr`, and of tuples of pointers in `_ptrs`
    args     all but the constexprs, which go by name, as Triton's options do

    Launches are alike, and take one compiled kernel, where grid, numbers, names and dtypes are equal, and the same
    tensors are aligned. So what Triton makes of an argument is never guessed. Its settings count at the first of them.

    Capture-safe, as launches are. Under the interpreter every launch is Triton's own.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        names = kernel.arg_names
        constexprs = {param.name for param in kernel.params if param.is_constexpr} if _is_compiled(kernel) else set()
        self._constexprs = [name for name in names if name in constexprs]
        places = range(len(names) - len(constexprs))
        self._pointers = _picked([at for at in places if names[at].endswith(("_ptr", "_ptrs"))])
        self._numbers = _picked([at for at in places if not names[at].endswith(("_ptr", "_ptrs"))])
        self._has_tuples = any(name.endswith("_ptrs") for name in names)
        self._known: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        if not _is_compiled(self._kernel):
            self._kernel[grid](*args, **named)
            return
        device, pointers = driver.active.get_current_device(), self._pointers(args)
        if self._has_tuples:
            pointers = _flat(pointers)
        kinds: list[Any] = [device]
        unaligned = 0  # a bit per tensor
        for tensor in pointers:
            if tensor is None:
                kinds.append(None)
            else:
                kinds.append(tensor.dtype)
                unaligned += unaligned + (tensor.data_ptr() % _ALIGNMENT > 0)
        key = (*grid, *kinds, unaligned, *self._numbers(args), *named, *named.values())
        found = self._known.get(key)
        if found is not None:
            launch, constexprs = found
            launch(*args, *constexprs, stream=driver.active.get_current_stream(device))
            return
        compiled = self._kernel[grid](*args, **named)
        if compiled is None:  # a hook of Triton's has refused it
            return
        x, y, z = (*grid, 1, 1)[:3]
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = compiled[x, y, z], tuple(named[name] for name in self._constexprs)


def _is_compiled(kernel: Any) -> bool:
    return isinstance(kernel, JITFunction)


def _picked(places: list[int]) -> _Values:
    """What picks the values at these places of a tuple, as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[at] for at in places)


def _flat(pointers: tuple[Any, ...]) -> tuple[_Pointer, ...]:
    """Pointers, those of tuples among them one by one."""
    return tuple(one for some in pointers for one in (some if isinstance(some, tuple) else (some,)))
