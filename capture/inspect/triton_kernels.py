"""Argument names of Triton kernels, and which arguments are pointers.

A graph contains a kernel's name and bytes. Triton keeps the signature of each compiled kernel with its function, and
functions are looked up by name in all modules. Kernels that are not module attributes, such as kernels of torch.compile
and of closures, have no argument names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

KernelArguments = tuple[tuple[str, "tuple[int, ...] | None"], ...]
"""Name of each argument, and offsets of its addresses."""

_BYTES = {
    "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8,
    "fp16": 2, "bf16": 2, "fp32": 4, "f32": 4, "fp64": 8,
}  # fmt: skip
_SCRATCH = ("global_scratch", "profile_scratch")
"""Pointers that Triton's launcher appends to the arguments."""

_WRAPPERS = 8
"""Maximum number of nested autotuners and heuristics around a kernel. The attribute `fn` of each holds the next
object."""


class TritonKernels:
    """The kernels that Triton has compiled. Modules are searched once, at the first possible Triton kernel."""

    def __init__(self) -> None:
        self._modules: list[dict[str, Any]] | None = None

    def arguments(self, symbol: str, handle: int, sizes: Sequence[int]) -> KernelArguments | None:
        """Return the arguments of a kernel; None if Triton did not compile it, or if several signatures match.

        symbol   name of the kernel
        handle   handle of its function
        sizes    bytes of each argument; the signature must match
        """
        if "triton" not in sys.modules or symbol.startswith("_Z"):
            return None
        fits: dict[KernelArguments, bool] = {}
        for kernel in self._compiled(symbol):
            arguments = _from_signature(getattr(kernel.src, "signature", {}), sizes)
            if arguments is not None:
                fits[arguments] = fits.get(arguments, False) or kernel.function == handle
        exact = [arguments for arguments, same in fits.items() if same] or list(fits)
        return exact[0] if len(exact) == 1 else None

    def _compiled(self, symbol: str) -> Iterator[Any]:
        """Yield the compiled kernels of all functions with this name in any module."""
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction

        if self._modules is None:
            self._modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
        named = [_untuned(names[symbol], JITFunction) for names in self._modules if symbol in names]
        for function in {id(one): one for one in named if isinstance(one, JITFunction)}.values():
            for kernels, *_ in list(getattr(function, "device_caches", {}).values()):
                yield from (kernel for kernel in list(kernels.values()) if isinstance(kernel, CompiledKernel))


def _untuned(function: Any, kind: type) -> Any:
    """Return the first object of type `kind` among `function`, `function.fn`, `function.fn.fn` and so on."""
    for _ in range(_WRAPPERS):
        if function is None or isinstance(function, kind):
            break
        function = getattr(function, "fn", None)
    return function


def _from_signature(signature: Any, sizes: Sequence[int]) -> KernelArguments | None:
    """Return the arguments; None if a type is neither a number nor a pointer, or if the sizes do not match."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, type_ in signature.items():
        if type_ == "constexpr":
            continue
        if not isinstance(name, str) or not isinstance(type_, str) or not (type_.startswith("*") or type_ in _BYTES):
            return None
        found.append((name, (0,) if type_.startswith("*") else ()))
    expected = [8 if at else _BYTES[signature[name]] for name, at in found]
    scratch = _SCRATCH[: max(len(sizes) - len(found), 0)]
    if list(sizes) != expected + [8] * len(scratch):
        return None
    return (*found, *((name, (0,)) for name in scratch))
