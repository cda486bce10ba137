"""Descriptions of kernel variants that tests compile without launching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One variant of a Triton kernel, which a test compiles for sm_90 without a GPU.

    signature       Triton types of arguments by name: "*bf16", "fp32" or, for a tuple, a tuple of types, in which
                    "constexpr" stands for None. An argument without a type is a constexpr if `constexprs` has its
                    value, "*i32" if its name ends in `_ptr`, else "i32"
    constexprs      values of the constexpr arguments
    max_registers   maximum registers per thread
    divisible       shell patterns for arguments whose value or address is a multiple of 16; for a tuple, every element
    max_spill       maximum spilled bytes per thread
    maxnreg         register limit per thread set at launch; None: no limit
    ptx             strings that the PTX must contain, because Triton ignores some hints
    """

    name: str
    kernel: Any
    signature: Mapping[str, Any]
    constexprs: Mapping[str, object]
    num_warps: int
    num_stages: int
    max_registers: int = 255
    divisible: tuple[str, ...] = ()
    max_spill: int = 0
    maxnreg: int | None = None
    ptx: tuple[str, ...] = ()

    def types(self) -> dict[str, Any]:
        """Return the type of each argument of the kernel, in order."""
        return {name: "constexpr" if name in self.constexprs else self._type(name) for name in self.kernel.arg_names}

    def _type(self, name: str) -> Any:
        return self.signature.get(name, "*i32" if name.endswith("_ptr") else "i32")
