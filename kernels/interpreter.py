"""Fixes for the Triton interpreter, which runs kernels on CPU tensors with TRITON_INTERPRET=1.

Its bugs:

- It stores bfloat16 values as bits in uint16 arrays. `tl.dot` and some arithmetic silently compute with these bits.
- Its float conversions truncate, whereas the hardware rounds to nearest even.
- It decodes the NaN of e4m3 as 480.
- It computes an overflow check of integer arithmetic and ignores the result, which takes half of the time of a launch.
- It builds and compares the types and shapes of every operand again, which takes a third of the remaining time.
- In Triton 3.6, `range` over kernel values converts a one-element array to an int, which recent NumPy rejects.

After `install()`, floats convert as in torch. bfloat16 arithmetic is computed in float32 and rounded once, as in
compiled kernels. `interpreted()` in library.py calls `install()`.

Not fixed: atomics on bfloat16, inline assembly and libdevice calls, which the interpreter does not implement.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
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
_UINT16 = np.dtype(np.uint16)
_NON_BIT_OPS = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_rsqrt", "create_erf")

_Handle: Any = triton_interpreter.TensorHandle
_installed = False


def install() -> None:
    """Fix the interpreter of this process. Further calls do nothing.

    Call it before importing kernels that import `gdc_wait` by name.
    Raises: UnsupportedError: if TRITON_INTERPRET=1 was not set before the first import of triton.
    """
    global _installed
    if not triton.knobs.runtime.interpret:
        raise UnsupportedError(
            "install(): triton was imported without TRITON_INTERPRET=1; set it in the environment of a new process"
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
    triton_interpreter._get_np_dtype = _looked_up(triton_interpreter._get_np_dtype)
    triton_interpreter._patch_lang_tensor = _indexed_by_item(triton_interpreter._patch_lang_tensor)
    triton_interpreter._patch_lang = _changed_once(triton_interpreter._patch_lang)
    check = TritonSemantic.binary_op_sanitize_overflow_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = _only_with_debug(check)
    _reuse_shapes()
    builder.get_bf16 = lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)
    # Programs run one after another, so these functions do nothing. Triton loads its package `cuda` twice: as an
    # attribute of the parent package, and as a separate object in sys.modules.
    for module in (tl.extra.cuda, sys.modules["triton.language.extra.cuda"]):
        for name in ("gdc_wait", "gdc_launch_dependents"):
            setattr(module, name, _no_op)


def _only_with_debug(check: Callable[..., None]) -> Callable[..., None]:
    """Skip the overflow check of integer arithmetic where Triton would compute it and then ignore its result."""

    def checked(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            check(self, *arguments)

    return checked


def _reuse_shapes() -> None:
    """Build each shape once. Operands with the same shape object need no broadcast."""
    semantic = triton_interpreter.interpreter_semantic
    by_name, broadcast, unwrapped = tl.dtype.__eq__, semantic.broadcast_impl_value, tl.core._unwrap_if_constexpr

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.constexprs if type.is_block() else scalar

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, self.constexprs, text = _block_shape(tuple(tl.core._unwrap_shape(shape)))
        self.name = f"<{text}, {element_ty}>"

    def broadcast_if_different(lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    def unwrap(value: Any) -> Any:
        return value if value.__class__ in (int, tl.tensor, tl.dtype) else unwrapped(value)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        unchecked = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return unchecked(*args, **named)

        scope.set_attr(obj, name, call)

    scalar = (tl.tuple([]), tl.constexpr(1))
    tl.tensor.__init__ = init_tensor
    tl.block_type.__init__ = init_block_type
    tl.dtype.__eq__ = lambda self, other: self is other or by_name(self, other)
    _Handle.__post_init__ = _no_op
    tl.core._unwrap_if_constexpr = unwrap
    semantic.broadcast_impl_value = broadcast_if_different
    semantic.computation_type_impl = functools.cache(semantic.computation_type_impl)
    triton_interpreter._patch_attr = patch_attr


@functools.cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[Any, int, tuple[Any, Any], str]:
    """Return a block type's shape, the product of its sizes, both in the form that tensors store, and the shape as
    text."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    shape, numel = tl.tuple(sizes), validate_block_shape(sizes)
    return shape, numel, (tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel)), str(shape)


def _changed_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a launch patch Triton's language modules once, and undo all its patches.

    Triton patches them again in each call of a function, which takes longer than most functions. It undoes only the
    patches for the kernel itself, so the process could no longer compile kernels.
    """
    restores: dict[frozenset[str], Callable[[], None]] = {}  # keys: the patched modules

    def patch(fn: Any) -> Any:
        modules = _language_modules(fn)
        if modules in restores:
            return triton_interpreter._LangPatchScope()
        scope = patch_lang(fn)
        if scope is None:  # a Triton version that restores nothing
            return None
        at = len(restores)
        restores[modules] = scope.restore

        def restore() -> None:
            while len(restores) > at:
                restores.popitem()[1]()

        scope.restore = restore
        return scope

    return patch


@functools.cache
def _language_modules(fn: Any) -> frozenset[str]:
    """Return the names of Triton's modules among the globals of a function. `_patch_lang` patches these modules."""
    return frozenset(module.__name__ for module in (tl, tl.core) if any(v is module for v in fn.__globals__.values()))


def convert_float(data: Any, source: Any, target: Any, rounding: object = None) -> Any:
    """Convert the bits of `data` from Triton dtype `source` to `target`, in an unsigned array of the same shape.

    Rounds to nearest even. Finite values beyond the range of an 8-bit target saturate, like `cvt.rn.satfinite`.
    """
    values = torch.from_numpy(np.ascontiguousarray(data)).view(_FLOAT_DTYPES[source])
    if target in _MAX_FINITE:
        values = values.to(torch.float64 if source == tl.float64 else torch.float32)
        limit = _MAX_FINITE[target]
        clamped = values.clamp(-limit, limit)
        values = torch.where(values.isinf(), values, clamped) if target == tl.float8e5 else clamped
    converted = values.to(_FLOAT_DTYPES[target])
    return converted.view(_BITS[converted.element_size()]).numpy().reshape(np.shape(data))


def _looked_up(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Look up the NumPy dtype of scalars. Triton builds the table of all dtypes in each call, several times per op."""
    of_scalar = functools.cache(numpy_dtype)

    def look_up(dtype: Any) -> Any:
        return numpy_dtype(dtype) if isinstance(dtype.scalar, tl.pointer_type) else of_scalar(dtype.scalar)

    return look_up


def _rounding_cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Cast to and from bfloat16 by value. For dtypes other than float32, Triton's interpreter casts the bits
    instead."""

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
    """Run `operation` with bfloat16 operands widened to float32, and round a float result to bfloat16 once."""

    def compute(self: Any, *operands: Any) -> Any:
        if True not in map(_is_bfloat16, operands):
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
    """Return whether `value` contains bfloat16 bits. A comparison has its operands' dtype, so check the data too."""
    return isinstance(value, _Handle) and value.data.dtype == _UINT16 and value.dtype.scalar == tl.bfloat16


def _no_op(*args: object, **kwargs: object) -> None:
    pass
