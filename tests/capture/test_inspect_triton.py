"""Names of arguments of Triton kernels, which Triton compiles for sm_90 here."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.view import Argument, Node
from tests.support.fake_graphs import FakeGraphs, install, word

BITS = re.compile(r"\.param \.(?:align \d+ )?\.?[a-z](\d+)(?: \.ptr[^,\n]*?)? \w+_param_\d+(?:\[(\d+)\])?")


def scale_rows(out_ptr, in_ptr, a, b, c, d, e, f, g, h, i, j, k, m, one, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = a.to(tl.float64) + b + c + d + e + f + g + h + i + j + k + m + one
    tl.store(out_ptr + at, tl.load(in_ptr + at) * total)


KINDS = ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp64")
NUMBERS = dict(zip("abcdefghijkm", KINDS, strict=True))
SIGNATURE = {"out_ptr": "*fp64", "in_ptr": "*bf16"} | NUMBERS | {"one": "constexpr", "BLOCK": "constexpr"}


@pytest.fixture(scope="module")
def compiled() -> CompiledKernel:
    source = ASTSource(JITFunction(scale_rows), SIGNATURE, {"one": 1, "BLOCK": 128})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module with kernels."""
    found = types.ModuleType("somebody_s_kernels")
    sys.modules[found.__name__] = found
    yield found
    del sys.modules[found.__name__]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return install(monkeypatch)


def sizes_of(kernel: CompiledKernel) -> list[int]:
    """Sizes of the arguments that the PTX declares."""
    header = kernel.asm["ptx"].split(".entry", 1)[1].split("{", 1)[0]
    return [int(bits) // 8 * int(count or 1) for bits, count in BITS.findall(header)]


def known(signature: dict, function: int) -> CompiledKernel:
    """A kernel that Triton has compiled and loaded."""
    kernel = object.__new__(CompiledKernel)
    kernel.src, kernel.function = types.SimpleNamespace(signature=signature), function
    kernel.module = kernel._module_pid = None
    return kernel


def jitted(*kernels: CompiledKernel) -> JITFunction:
    function = JITFunction(scale_rows)
    function.device_caches[0] = (dict(enumerate(kernels)), {}, None, None, None)
    return function


def launched(fake: FakeGraphs, function: int, arguments: list[bytes]) -> Node:
    graph = fake.graph()
    fake.kernel(graph, function, arguments)
    return inspect_graph(graph).nodes[0]


def test_arguments_are_named_as_in_the_signature(fake: FakeGraphs, module, compiled: CompiledKernel) -> None:
    sizes = sizes_of(compiled)
    assert len(sizes) == 2 + len(KINDS) + 2, "the launcher appends two pointers"
    function = fake.function("scale_rows", sizes)
    module.scale_rows = jitted(known(compiled.src.signature, function))
    data = [bytes([at]) * size for at, size in enumerate(sizes)]
    node = launched(fake, function, data)
    names = ["out_ptr", "in_ptr", *NUMBERS, "global_scratch", "profile_scratch"]
    assert [argument.name for argument in node.arguments] == names
    assert [argument.data for argument in node.arguments] == data
    assert [argument.pointers for argument in node.arguments] == [(0,), (0,), *[()] * len(KINDS), (0,), (0,)]
    inner = jitted(known(compiled.src.signature, function))
    module.scale_rows = types.SimpleNamespace(fn=types.SimpleNamespace(fn=inner))  # as autotuners wrap it
    assert launched(fake, function, data).arguments == node.arguments
    longer = fake.function("scale_rows", [*sizes, 8])
    module.scale_rows = jitted(known(compiled.src.signature, longer))
    node = launched(fake, longer, [*data, word(0)])
    assert {argument.name for argument in node.arguments} == {""}, "the launcher appends no third pointer"


def test_the_function_handle_decides_between_kernels_of_one_name(fake: FakeGraphs, module) -> None:
    functions = [fake.function("scale_rows", [8]) for _ in range(3)]
    module.scale_rows = jitted(known({"x": "*fp32"}, functions[0]), known({"n": "i64"}, functions[1]))
    found = [launched(fake, function, [word(5)]).arguments[0] for function in functions]
    assert [(argument.name, argument.pointers) for argument in found] == [("x", (0,)), ("n", ()), ("", None)]
    module.scale_rows = jitted(known({"x": "*fp32"}, 1), known({"x": "*bf16"}, 2), known({"x": "i32"}, 3))
    last = launched(fake, functions[2], [word(5)]).arguments[0]
    assert (last.name, last.pointers) == ("x", (0,)), "all fitting signatures are equal"


UNCERTAIN = {
    "descriptor": {"x": "tensordesc<fp32[16, 16]>"},
    "tuple": {"x": ("*fp32", "i32")},
    "unknown": {"x": "complex64"},
    "size": {"x": "i32"},
    "more": {"x": "*fp32", "n": "i32"},
    "numbered": {0: "*fp32"},
}


@pytest.mark.parametrize("case", UNCERTAIN)
def test_ambiguous_arguments_stay_unknown(fake: FakeGraphs, module, case: str) -> None:
    function = fake.function("scale_rows", [8])
    module.scale_rows = jitted(known(UNCERTAIN[case], function))
    assert launched(fake, function, [word(5)]).arguments == (Argument(0, word(5)),)
    for other in (None, "text", types.SimpleNamespace(fn=None)):
        module.scale_rows = other
        assert launched(fake, function, [word(5)]).arguments == (Argument(0, word(5)),)
