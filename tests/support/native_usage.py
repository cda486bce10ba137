"""What CUDA kernels use of a multiprocessor, and load before they wait, compiled without a GPU."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter

import triton

from graphrt.kernels.native.nvrtc import NativeVariant, compile_variant

_compile = functools.lru_cache(maxsize=1)(compile_variant)


def compiled_within(variant: NativeVariant, most_spilled: int) -> tuple[int, str]:
    """Compile a variant that may spill `most_spilled` bytes; return its registers and the assembler's report."""
    cubin, log = _compile(variant)
    assert cubin.startswith(b"\x7fELF")
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill", log)) <= most_spilled, log
    return int(re.search(r"Used (\d+) registers", log).group(1)), log


def accesses_before_the_wait(variant: NativeVariant) -> Counter[str]:
    """Return the instructions that access device memory before griddepcontrol.wait, which is ACQBULK, by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_compile(variant)[0])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "ACQBULK" in code, "the kernel does not wait"
    before = code[: code.index("ACQBULK")]
    return Counter(re.findall(r"\b(?:LDG|LD|STG|ST|ATOM|ATOMG|RED|REDG|LDGSTS|UBLKCP|UTMALDG)\b[.\w]*", before))


def assert_fits(variant: NativeVariant, blocks: int, registers: int, static: int = 0) -> None:
    """Check that `blocks` blocks fit a multiprocessor, each with `static` bytes of static shared memory."""
    assert blocks * (variant.shared_bytes + static + 1024) <= 228 * 1024, "does not fit a multiprocessor"
    assert blocks * variant.num_threads * -(-registers // 8) * 8 <= 65536, "does not fit a multiprocessor's registers"
