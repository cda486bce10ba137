"""Register graphrt's operators, and choose between the Triton kernel and the PyTorch reference.

Every kernel is launched through a `torch.library` operator. A CUDA capture thus records the launch, and the op trace
on a CPU records one operator with its arguments. The module uses `torch.library.Library` directly, because
`torch.library.custom_op` takes several microseconds more per call, and a capture makes 10,000 calls.

CUDA tensors use the Triton kernel. CPU tensors use the PyTorch reference or, inside `interpreted()`, the Triton kernel
under the Triton interpreter.
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
"""True if TRITON_INTERPRET=1 was set before the first import of triton."""


def define_op(
    schema: str,
    *,
    triton_impl: Callable[..., Any],
    reference: Callable[..., Any] | None,
    fake: Callable[..., Any] | None = None,
) -> Any:
    """Register `graphrt::<schema>` and return the callable operator overload.

    triton_impl   launches the Triton kernel, for CUDA tensors, and for CPU tensors inside `interpreted()`
    reference     PyTorch implementation for CPU tensors; None: CPU tensors are supported only inside `interpreted()`
    fake          returns outputs of the right shape for torch.compile; None: the operator returns nothing
    """
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def cpu_impl(*args: Any, **kwargs: Any) -> Any:
        if _cpu_runs_triton:
            return triton_impl(*args, **kwargs)
        if reference is None:
            raise UnsupportedError(
                f"graphrt::{name}: has no CPU implementation; pass CUDA tensors, or use the backend 'torch_reference'"
            )
        return reference(*args, **kwargs)

    _library.impl(name, triton_impl, "CUDA")
    _library.impl(name, cpu_impl, "CPU")
    _library.impl(name, fake if fake is not None else lambda *args, **kwargs: None, "Meta")
    return getattr(torch.ops.graphrt, name).default


def define_composite(schema: str, impl: Callable[..., None]) -> Any:
    """Register `graphrt::<schema>`, an operator that calls other operators, and return the callable overload.

    torch.compile sees one opaque operator that mutates its arguments and returns nothing. A capture records the
    operators that `impl` calls.
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
    """Return the implementation of a `define_composite` operator; None for all other operators."""
    return _composites.get(op)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on CPU tensors through the Triton interpreter inside the context (slow; for tests).

    Permanently fixes bugs in this process's interpreter; see interpreter.py.
    Raises: UnsupportedError: if TRITON_INTERPRET=1 was not set before the first import of triton.
    """
    global _cpu_runs_triton
    if not INTERPRETER_AVAILABLE:
        raise UnsupportedError(
            "interpreted(): triton was imported without TRITON_INTERPRET=1; set it in the environment of a new process"
        )
    from graphrt.kernels.interpreter import install  # imports Triton's interpreter, which only tests need

    install()
    previous, _cpu_runs_triton = _cpu_runs_triton, True
    try:
        yield
    finally:
        _cpu_runs_triton = previous


def cpu_runs_triton() -> bool:
    """Return whether CPU tensors currently use interpreted Triton kernels."""
    return _cpu_runs_triton
