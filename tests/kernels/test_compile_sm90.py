"""Every kernel variant compiles for sm_90, without a GPU, within its bounds of registers, spills and shared memory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from graphrt.kernels.compile_spec import CompileSpec
from scripts import compile_check
from scripts.compile_check import Usage


def test_every_variant_compiles_within_its_bounds():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = compile_check.KERNELS.parent.parent
    command = [sys.executable, str(root / "scripts/compile_check.py")]
    environment["PYTHONPATH"] = str(root)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 problems" in result.stdout


def test_every_module_with_an_operator_declares_variants():
    declared = set(compile_check.variant_modules())
    for path in sorted(compile_check.KERNELS.rglob("*.py")):
        calls = {ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)}
        name = ".".join(["graphrt", "kernels", *path.relative_to(compile_check.KERNELS).with_suffix("").parts])
        if calls & {"define_op", "DeclaredOp"} and "@triton.jit" in path.read_text():
            assert name in declared, f"{name} launches kernels that no test compiles; add compile_variants()"


def test_loads_use_no_cache_modifier_that_triton_ignores():
    for path in sorted(compile_check.KERNELS.rglob("*.py")):
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            if ast.unparse(call.func) == "tl.load":
                modifiers = {k.value.value for k in call.keywords if k.arg == "cache_modifier"}
                assert modifiers <= {".ca", ".cg"}, f"{path}:{call.lineno}: Triton 3.6 ignores {modifiers}"


PROBLEMS = {
    "within": (Usage(registers=128, shared=1024), []),
    "registers": (Usage(registers=129), ["129 registers, bound 128"]),
    "stack": (Usage(stack=8), ["spills: 8 bytes of stack, 0 of local memory, bound 0"]),
    "local": (Usage(local=16), ["spills: 0 bytes of stack, 16 of local memory, bound 0"]),
    "shared": (Usage(shared=232449), ["232449 bytes of shared memory, the device has 232448"]),
    "error": (Usage(error="CompilationError: no"), ["CompilationError: no"]),
    "missing": (Usage(missing=("ld.volatile.global.b32",)), ["the PTX has no ld.volatile.global.b32"]),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problems(case):
    usage, expected = PROBLEMS[case]
    spec = CompileSpec("name", None, {}, {}, num_warps=4, num_stages=2, max_registers=128)
    assert compile_check.problems(spec, usage) == expected
