"""Descriptions of kernel variants that tests compile without launching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One variant of a Triton kernel, which a test compiles for sm_90 without a GPU.

    signature       Triton type of each argument, in order: "*bf16", "i32", "fp32" or "constexpr"
    constexprs      values of the constexpr arguments
    max_registers   most registers per thread
    divisible       arguments whose value or address is a multiple of 16
    max_spill       most spilled bytes per thread
    maxnreg         register limit per thread of the launch; None: no limit
    ptx             strings that the PTX must contain: Triton ignores some requests of a kernel
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
