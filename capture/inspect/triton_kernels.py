"""Names of the arguments of Triton kernels, and which of them are pointers.

A graph holds a kernel's name and bytes. Triton keeps the signature of each kernel that it compiled with the function
that it was compiled from, and functions are found by name in the modules that have them. So kernels that are no
module's, as those of torch.compile and of closures, stay without names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

KernelArguments = tuple[tuple[str, "tuple[int, ...] | None"], ...]
"""Name of each argument, and offsets of the addresses in it."""

_BYTES = {
    "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8,
    "fp16": 2, "bf16": 2, "fp32": 4, "f32": 4, "fp64": 8,
}  # fmt: skip
_SCRATCH = ("global_scratch", "profile_scratch")
"""Pointers that the launcher of Triton puts behind the arguments."""

_WRAPPERS = 8
"""Around a kernel there may be so many objects that tune it, each with the next in `fn`."""


class TritonKernels:
    """What Triton has compiled. Modules are looked through once, at the first name that may be one of Triton's."""

    def __init__(self) -> None:
        self._modules: list[dict[str, Any]] | None = None

    def arguments(self, symbol: str, handle: int, sizes: Sequence[int]) -> KernelArguments | None:
        """The arguments of a kernel, or None where Triton did not make it or it is not certain how.

        symbol   name of the kernel
        handle   of its function
        sizes    bytes of each argument, which the signature must fit
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
        """Every compiled kernel of the functions that modules have under a name."""
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction

        if self._modules is None:
            self._modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
        named = [_untuned(names[symbol], JITFunction) for names in self._modules if symbol in names]
        for function in {id(one): one for one in named if isinstance(one, JITFunction)}.values():
            for kernels, *_ in list(getattr(function, "device_caches", {}).values()):
                yield from (kernel for kernel in list(kernels.values()) if isinstance(kernel, CompiledKernel))


def _untuned(function: Any, kind: type) -> Any:
    """The first of a kind: `function`, what stands in its `fn`, in the `fn` of that, and so on."""
    for _ in range(_WRAPPERS):
        if function is None or isinstance(function, kind):
            break
        function = getattr(function, "fn", None)
    return function


def _from_signature(signature: Any, sizes: Sequence[int]) -> KernelArguments | None:
    """None where a type is not one of a plain number or pointer, or the sizes are not those of the signature."""
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
