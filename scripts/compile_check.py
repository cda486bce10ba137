"""Compile every kernel variant without a GPU, and check bounds of registers, spills and shared memory.

    python scripts/compile_check.py                     all variants, for sm_90
    python scripts/compile_check.py --only attention

Modules of `graphrt.kernels` return their variants from `compile_variants()`. Exits with 1 if a variant does not compile
or exceeds a bound.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import graphrt
from graphrt.kernels.compile_spec import CompileSpec

KERNELS = Path(graphrt.__file__).parent / "kernels"
MAX_SHARED_BYTES = 232448  # limit of a block on sm_90, with opt-in


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a compiled variant, or the compile error."""

    registers: int = 0
    stack: int = 0
    local: int = 0
    shared: int = 0
    seconds: float = 0.0
    error: str = ""
    missing: tuple[str, ...] = ()  # texts that the PTX must contain and lacks


def variant_modules() -> Iterator[str]:
    """Yield the names of the modules in graphrt.kernels that define compile_variants()."""
    for path in sorted(KERNELS.rglob("*.py")):
        if re.search(r"^def compile_variants\(", path.read_text(), re.MULTILINE):
            yield ".".join(["graphrt", "kernels", *path.relative_to(KERNELS).with_suffix("").parts])


def compile_variant(spec: CompileSpec, arch: int) -> Usage:
    """Compile one variant and return its resource usage."""
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "maxnreg": spec.maxnreg}
    start = time.perf_counter()
    try:
        compiled = triton.compile(source_of(spec), target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # compilers raise many types; the run reports the error and fails
        return Usage(error=f"{type(error).__name__}: {str(error).strip()}")
    seconds = time.perf_counter() - start
    usage = resource_usage(compiled.asm["cubin"])
    missing = tuple(text for text in spec.ptx if text not in compiled.asm["ptx"])
    return Usage(usage["REG"], usage["STACK"], usage["LOCAL"], compiled.metadata.shared, seconds, missing=missing)


def source_of(spec: CompileSpec) -> ASTSource:
    """Return the kernel with the types and the divisibility of its arguments. Elements of a tuple have a path each."""
    types, constexprs = spec.types(), dict[Any, object](spec.constexprs)
    attributes = {}
    for at, (name, kind) in enumerate(types.items()):
        elements = {(at, i): each for i, each in enumerate(kind)} if isinstance(kind, tuple) else {(at,): kind}
        constexprs |= {path: None for path, each in elements.items() if each == "constexpr" and len(path) == 2}
        if any(fnmatchcase(name, pattern) for pattern in spec.divisible):
            attributes |= {path: [["tt.divisibility", 16]] for path, each in elements.items() if each != "constexpr"}
    return ASTSource(spec.kernel, types, constexprs=constexprs, attrs=attributes)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Return the resources that cuobjdump reports for the kernel of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", result.stdout + result.stderr)}


def problems(spec: CompileSpec, usage: Usage) -> list[str]:
    """Return every problem of a variant: a compile error, exceeded bounds, missing PTX."""
    if usage.error:
        return [usage.error]
    found = []
    if usage.registers > spec.max_registers:
        found.append(f"{usage.registers} registers, bound {spec.max_registers}")
    if usage.stack + usage.local > spec.max_spill:
        found.append(f"spills: {usage.stack} bytes of stack, {usage.local} of local memory, bound {spec.max_spill}")
    if usage.shared > MAX_SHARED_BYTES:
        found.append(f"{usage.shared} bytes of shared memory, the device has {MAX_SHARED_BYTES}")
    found += [f"the PTX has no {text}" for text in usage.missing]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="variants whose name contains TEXT")
    parser.add_argument("--arch", type=int, default=90, help="compute capability to compile for (default: 90)")
    arguments = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so nothing can be compiled; unset it")

    specs = [spec for name in variant_modules() for spec in importlib.import_module(name).compile_variants()]
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        parser.error(f"compile_variants(): expected distinct names, got {sorted(names)}")
    specs = [spec for spec in specs if arguments.only in spec.name]
    if not specs:
        parser.error(f"--only: expected a part of one of {', '.join(names)}, got {arguments.only!r}")
    table = Table()
    table.add_column("variant", no_wrap=True)
    for heading in ("registers", "stack", "local", "shared", "s"):
        table.add_column(heading, justify="right")
    failures = []
    for spec in specs:
        usage = compile_variant(spec, arguments.arch)
        found = problems(spec, usage)
        failures += [f"{spec.name}: {problem}" for problem in found]
        figures = (usage.registers, usage.stack, usage.local, usage.shared, f"{usage.seconds:.1f}")
        table.add_row(spec.name, *(str(figure) for figure in figures), style="red" if found else None)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for failure in failures:
        print(failure)
    print(f"{len(specs)} variants compiled for sm_{arguments.arch}, {len(failures)} problems")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
