"""The CUDA kernel of few-token products: compiled variants, early loads, and races on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphrt.kernels.ops.linear_native import native_variants
from tests.support.native_usage import accesses_before_the_wait, assert_fits, compiled_within

WEIGHT, SCALE, ZERO = "LDG.E.NA.LTC128B.128.CONSTANT", "LDG.E.U16", "LDG.E.U8"


@pytest.mark.parametrize("name", native_variants())
def test_variants_compile_within_their_bounds(name: str, tmp_path: Path) -> None:
    """Two blocks of 8 warps, or one of 16, fit a multiprocessor. Before the wait, they load weights only."""
    variant = native_variants()[name]
    macros = dict(variant.macros)
    spills = macros["TOKEN_TILES"] == 2 and macros["BITS"] != 8
    registers, _ = compiled_within(variant, 72 if spills else 0)
    assert_fits(variant, 16 // macros["WARPS"], registers)
    loads = 2 * macros["ROW_TILES"] * macros["UNROLL"]
    kinds = (WEIGHT, SCALE, ZERO) if macros["BITS"] == 4 else (WEIGHT,)
    assert accesses_before_the_wait(variant, tmp_path) == dict.fromkeys(kinds, loads)
