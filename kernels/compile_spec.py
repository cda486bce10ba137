"""How to compile one variant of a Triton kernel without launching it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One variant of a kernel, as a test compiles it for a GPU that is not there.

    signature       Triton type of each argument, in order: "*bf16", "i32", "fp32", ...; "constexpr" for those below
    constexprs      values of the constexpr arguments
    max_registers   bound of registers per thread
    divisible       arguments whose value or address is a multiple of 16
    max_spill       bound of spilled bytes per thread
    maxnreg         registers that the launch limits a thread to; None: it does not
    ptx             what the PTX must contain: Triton leaves out some of what a kernel asks for
    """

    name: str
    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    max_registers: int = 255
    divisible: tuple[str, ...] = ()
    max_spill: int = 0
    maxnreg: int | None = None
    ptx: tuple[str, ...] = ()
