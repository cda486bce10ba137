"""Launch Triton kernels with little host overhead by caching the compiled kernel of each kind of launch.

    first launch    rms_norm, bf16, aligned, strides 2048   ->  binder, compiler   ->  compiled kernel, cached
    next launches   the same, other addresses               ->  cache key          ->  compiled kernel

Triton's binder inspects every argument of every launch, which takes longer than the driver call. A step makes about
75 launches of Triton kernels, few of which are new.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from graphrt.kernels.compile_ahead import compile_threads

_ALIGNMENT = 16  # in bytes; Triton compiles a different variant for unaligned addresses
_MOST_KNOWN = 4096  # cached launches per kernel, more than a runtime has sizes

_Pointer = torch.Tensor | None
_Values = Callable[[tuple[Any, ...]], tuple[Any, ...]]


@cache
def overlaps(device: torch.device) -> bool:
    """Return whether kernels on `device` support programmatic dependent launch (`launch_pdl`)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class KernelLauncher:
    """Launcher of one kernel. `launcher(grid, *args, **named)` replaces `kernel[grid](*args, **named)`.

    kernel   a `triton.jit` function; names of pointers end with `_ptr`, names of tuples of pointers with `ptrs`
    args     all arguments except constexprs, which are passed by name, as are Triton's options

    Two launches share a compiled kernel if their grid, numbers, named arguments, dtypes and the alignment of each
    tensor are equal. So the cache does not depend on how Triton specializes arguments. Triton's global settings take
    effect at the first launch of each kind.

    Capture-safe. Under the interpreter, every launch goes through Triton. In a `compiling_ahead` block, a launch only
    starts the compilation of its kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        names = kernel.arg_names
        constexprs = {param.name for param in kernel.params if param.is_constexpr} if _is_compiled(kernel) else set()
        self._constexprs = [name for name in names if name in constexprs]
        indices = range(len(names) - len(constexprs))
        self._pointers = _picked([at for at in indices if names[at].endswith(("_ptr", "ptrs"))])
        self._numbers = _picked([at for at in indices if not names[at].endswith(("_ptr", "ptrs"))])
        self._has_tuples = any(name.endswith("ptrs") for name in names)
        self._known: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        if not _is_compiled(self._kernel):
            self._kernel[grid](*args, **named)
            return
        if compile_threads() is not None:
            self._kernel.run(*args, grid=grid, warmup=True, **named)
            return
        device, pointers = driver.active.get_current_device(), self._pointers(args)
        if self._has_tuples:
            pointers = _flat(pointers)
        kinds: list[Any] = [device]
        unaligned = 0  # one bit per tensor
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
        if compiled is None:  # a Triton hook rejected the launch
            return
        x, y, z = (*grid, 1, 1)[:3]
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = compiled[x, y, z], tuple(named[name] for name in self._constexprs)


def _is_compiled(kernel: Any) -> bool:
    return isinstance(kernel, JITFunction)


def _picked(indices: list[int]) -> _Values:
    """Return a function that selects these indices of a tuple, as a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: tuple(values[at] for at in indices)


def _flat(pointers: tuple[Any, ...]) -> tuple[_Pointer, ...]:
    """Flatten pointers and tuples of pointers into one tuple."""
    return tuple(one for some in pointers for one in (some if isinstance(some, tuple) else (some,)))
