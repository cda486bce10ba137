"""What CUDA kernels use of a multiprocessor, and load before they wait, compiled without a GPU."""

from __future__ import annotations

import functools
import re
from collections import Counter

from graphrt.kernels.native.nvrtc import NativeVariant, compile_variant
from scripts import compile_check

_compile = functools.lru_cache(maxsize=1)(compile_variant)


def compiled_within(variant: NativeVariant, most_spilled: int) -> tuple[int, str]:
    """Compile a variant that may spill `most_spilled` bytes; return its registers and the assembler's report."""
    cubin, log = _compile(variant)
    assert cubin.startswith(b"\x7fELF")
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill", log)) <= most_spilled, log
    return int(re.search(r"Used (\d+) registers", log).group(1)), log


def accesses_before_the_wait(variant: NativeVariant) -> Counter[str]:
    """Return the instructions that access device memory before the kernel waits for earlier kernels, by name."""
    return compile_check.accesses_before_the_wait(_compile(variant)[0])


def assert_fits(variant: NativeVariant, blocks: int, registers: int, static: int = 0) -> None:
    """Check that `blocks` blocks fit a multiprocessor, each with `static` bytes of static shared memory."""
    assert blocks * (variant.shared_bytes + static + 1024) <= 228 * 1024, "does not fit a multiprocessor"
    assert blocks * variant.num_threads * -(-registers // 8) * 8 <= 65536, "does not fit a multiprocessor's registers"
