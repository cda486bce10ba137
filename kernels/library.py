"""Registration of graphrt's operators, and the choice between Triton kernel and torch reference.

Every kernel is launched through a `torch.library` operator, so that a capture on CUDA records its launch and the
op trace twin on CPU sees one op with frozen arguments. `torch.library.Library` is used directly because
`torch.library.custom_op` costs several microseconds more per call, which capture pays 10,000 times.

On CUDA the Triton kernel runs. On CPU the torch reference beside it runs, unless `interpreted()` is active: then
the Triton kernel itself runs under the Triton interpreter, on the same CPU tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from graphrt.kernels.errors import UnsupportedError

_library = torch.library.Library("graphrt", "DEF")
_cpu_runs_triton = False
_composites: dict[Any, Callable[..., None]] = {}

INTERPRETER_AVAILABLE: bool = bool(triton.knobs.runtime.interpret)
"""True when TRITON_INTERPRET=1 was set before triton was first imported."""


def define_op(
    schema: str,
    *,
    triton_impl: Callable[..., Any],
    reference: Callable[..., Any] | None,
    fake: Callable[..., Any] | None = None,
) -> Any:
    """Register `graphrt::<schema>` and return the callable operator overload.

    `triton_impl` launches the Triton kernel; it serves CUDA, and CPU under `interpreted()`. `reference` is the torch
    implementation that serves CPU; None means that on CPU the op exists under the interpreter only. `fake` gives the
    outputs' shapes to torch.compile; ops that only mutate their arguments need none.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def cpu_impl(*args: Any, **kwargs: Any) -> Any:
        if _cpu_runs_triton:
            return triton_impl(*args, **kwargs)
        if reference is None:
            raise UnsupportedError(
                f"graphrt::{name}: expected a CUDA tensor, got CPU; choose the backend 'torch_reference' on CPU"
            )
        return reference(*args, **kwargs)

    _library.impl(name, triton_impl, "CUDA")
    _library.impl(name, cpu_impl, "CPU")
    _library.impl(name, fake if fake is not None else lambda *args, **kwargs: None, "Meta")
    return getattr(torch.ops.graphrt, name).default


def define_composite(schema: str, impl: Callable[..., None]) -> Any:
    """Register `graphrt::<schema>`, an operator that calls other operators, and return the callable overload.

    To torch.compile it is one opaque operator, which writes what its schema says and returns nothing. A capture records
    the operators that `impl` calls.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for key in ("CUDA", "CPU"):
        _library.impl(name, impl, key)
    _library.impl(name, lambda *args, **kwargs: None, "Meta")
    op = getattr(torch.ops.graphrt, name).default
    _composites[op] = impl
    return op


def composite_impl(op: object) -> Callable[..., None] | None:
    """What an operator of `define_composite` calls; None for every other."""
    return _composites.get(op)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on CPU tensors through the Triton interpreter while active (slow, for tests).

    Repairs the interpreter of this process for good, by itself wrong for bfloat16 and fp8; see interpreter.py.

    Raises: UnsupportedError when TRITON_INTERPRET=1 was not set before triton was first imported.
    """
    global _cpu_runs_triton
    if not INTERPRETER_AVAILABLE:
        raise UnsupportedError(
            "interpreted(): expected TRITON_INTERPRET=1 in the environment before triton is imported, got none; "
            "set it and start a new process"
        )
    from graphrt.kernels.interpreter import install  # nobody else needs Triton's interpreter

    install()
    previous, _cpu_runs_triton = _cpu_runs_triton, True
    try:
        yield
    finally:
        _cpu_runs_triton = previous


def cpu_runs_triton() -> bool:
    """Whether CPU tensors currently go through interpreted Triton kernels."""
    return _cpu_runs_triton
