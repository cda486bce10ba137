"""Repairs of the Triton interpreter, which runs kernels on CPU tensors when TRITON_INTERPRET=1.

What is wrong in it:

- It keeps bfloat16 values as their bits in uint16 arrays. `tl.dot` and some arithmetic then compute with the bits,
  without an error.
- Its float conversions truncate where the hardware rounds to nearest even.
- It decodes the NaN of e4m3 as 480.
- In triton 3.6, `range` over a kernel's values asks NumPy for the integer of a one-element array, which newer
  NumPy refuses.

After `install()` conversions between float formats are those of torch. bfloat16 arithmetic computes in float32 and
rounds once, as the compiled kernels do. `interpreted()` of library.py calls `install()`.

Not repaired: atomics on bfloat16, inline assembly and libdevice calls, which the interpreter does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from graphrt.kernels.errors import UnsupportedError

_FLOAT_DTYPES: dict[Any, torch.dtype] = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_MAX_FINITE = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_NON_BIT_OPS = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_rsqrt", "create_erf")

_Handle: Any = triton_interpreter.TensorHandle
_installed = False


def install() -> None:
    """Repair the interpreter of this process. Calling it again does nothing.

    For kernels that bind `gdc_wait` by name, call it before they are imported.

    Raises: UnsupportedError when TRITON_INTERPRET=1 was not set before triton was first imported.
    """
    global _installed
    if not triton.knobs.runtime.interpret:
        raise UnsupportedError(
            "install(): expected TRITON_INTERPRET=1 in the environment before triton is imported, got none; "
            "set it and start a new process"
        )
    if _installed:
        return
    _installed = True
    builder = triton_interpreter.InterpreterBuilder
    triton_interpreter._convert_float = convert_float
    builder.cast_impl = _rounding_cast(builder.cast_impl)
    for name in _NON_BIT_OPS:
        setattr(builder, name, _computed_in_float32(getattr(builder, name)))
    builder.create_dot = _dot_in_float32(builder.create_dot)
    triton_interpreter.ReduceOps.sum = _sum_in_float32(triton_interpreter.ReduceOps.sum)
    triton_interpreter._patch_lang_tensor = _indexed_by_item(triton_interpreter._patch_lang_tensor)
    triton_interpreter._patch_lang = _restored_as_a_whole(triton_interpreter._patch_lang)
    builder.get_bf16 = lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)
    # Programs run one after another here, so there is nothing to wait for. Triton loads its package `cuda` twice: as an
    # attribute of the parent package, and as another object in sys.modules.
    for module in (tl.extra.cuda, sys.modules["triton.language.extra.cuda"]):
        for name in ("gdc_wait", "gdc_launch_dependents"):
            setattr(module, name, _no_op)


def _restored_as_a_whole(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A launch puts back what it changed of Triton's language: for its kernel, and for functions that the kernel calls.

    The original forgets the changes of functions. Nothing can be compiled in the process from then on.
    """
    restores: list[Callable[[], None]] = []  # of the kernel, and behind it of each function that it called

    def patch(fn: Any) -> Any:
        scope = patch_lang(fn)
        if scope is None:  # of a Triton that puts nothing back
            return None
        at = len(restores)
        restores.append(scope.restore)

        def restore() -> None:
            while len(restores) > at:
                restores.pop()()

        scope.restore = restore
        return scope

    return patch


def convert_float(data: Any, source: Any, target: Any, rounding: object = None) -> Any:
    """The bits of `data`, of Triton dtype `source`, as the bits of `target`, in an unsigned array of the same shape.

    Rounds to nearest even. Finite values beyond an 8-bit target saturate, as `cvt.rn.satfinite` does on the device.
    """
    values = torch.from_numpy(np.ascontiguousarray(data)).view(_FLOAT_DTYPES[source])
    if target in _MAX_FINITE:
        values = values.to(torch.float64 if source == tl.float64 else torch.float32)
        limit = _MAX_FINITE[target]
        clamped = values.clamp(-limit, limit)
        values = torch.where(values.isinf(), values, clamped) if target == tl.float8e5 else clamped
    converted = values.to(_FLOAT_DTYPES[target])
    return converted.view(_BITS[converted.element_size()]).numpy().reshape(np.shape(data))


def _rounding_cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Casts to and from bfloat16 by value. The original casts its bits unless the other side is float32."""

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == target.scalar == tl.bfloat16:
            return source
        if source.dtype.scalar == tl.bfloat16 and target.scalar != tl.float32:
            source = cast(self, source, tl.float32)
        elif target.scalar == tl.bfloat16 and source.dtype.scalar != tl.float32:
            source = _Handle(source.data.astype(np.float32), tl.float32)
        return cast(self, source, target)

    return cast_impl


def _computed_in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    """`operation` with its bfloat16 operands widened, and a float result rounded to bfloat16 once."""

    def compute(self: Any, *operands: Any) -> Any:
        if not any(_is_bfloat16(x) for x in operands):
            return operation(self, *operands)
        result = operation(self, *(self.cast_impl(x, tl.float32) if _is_bfloat16(x) else x for x in operands))
        if result.data.dtype == np.bool_:  # a comparison
            return _Handle(result.data, tl.int1)
        return self.cast_impl(_Handle(result.data.astype(np.float32), tl.float32), tl.bfloat16)

    return compute


def _dot_in_float32(dot: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if _is_bfloat16(x) else x for x in (a, b))
        return dot(self, a, b, *rest)

    return create_dot


def _sum_in_float32(reduce_sum: Callable[..., Any]) -> Callable[..., Any]:
    def sum_(self: Any, tensor: Any) -> Any:
        if not _is_bfloat16(tensor.handle):
            return reduce_sum(self, tensor)
        cast = triton_interpreter.interpreter_builder.cast_impl
        wide = self.to_tensor(cast(tensor.handle, tl.float32).data, tl.float32)
        return self.to_tensor(cast(reduce_sum(self, wide).handle, tl.bfloat16).data, tensor.dtype)

    return sum_


def _indexed_by_item(patch_tensor: Callable[..., None]) -> Callable[..., None]:
    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _is_bfloat16(value: Any) -> bool:
    """Whether `value` holds bits of bfloat16. The interpreter types a comparison's result like its operands."""
    return isinstance(value, _Handle) and value.dtype.scalar == tl.bfloat16 and value.data.dtype == np.uint16


def _no_op(**kwargs: object) -> None:
    pass
