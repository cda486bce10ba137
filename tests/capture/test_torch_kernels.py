"""Uninitialized bytes in arguments of PyTorch's kernels are not taken for addresses, and real addresses are kept."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graphrt.capture.inspect.audit import Audit, FindingKind, audit, memory_of
from graphrt.capture.inspect.cuda import inspect_graph
from graphrt.capture.inspect.memory import MemoryMap
from graphrt.capture.inspect.torch_kernels import no_addresses
from graphrt.capture.inspect.view import Node
from graphrt.capture.raw_graph import check
from tests.support.audit_examples import GONE, LEAK, POOL, REGIONS, graph, kernel, words

STALE, REAL = LEAK.address, POOL.address
INDEX = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<>>(long, at::native::{lambda})"
CASTING = "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3>>"
LOOP = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::Functor<float>>>"
TAKE = "void at::native::index_elementwise_kernel<128, 4, at::native::cuda_take_put_kernel<float, unsigned int>>"
REDUCE = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxNanFunctor<float>>>"
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<float, unsigned int, 2, 128, 1>"
TOP_K = "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(at::cuda::detail::TensorInfo<float>)"


def divider(size: int) -> tuple[int, int, int]:
    """An at::cuda::detail::IntDivider: size, multiplier, shift."""
    shift = next(shift for shift in range(32) if (1 << shift) >= size)
    return size, ((1 << 32) * ((1 << shift) - size)) // size + 1, shift


def calculator(tensors: int, *sizes: int, stale: int = STALE) -> bytes:
    """An OffsetCalculator whose unused entries hold addresses at every possible offset."""
    data = bytearray(struct.pack("<Q", stale) * 200)[: 304 + 100 * tensors]
    struct.pack_into("<i", data, 0, len(sizes))
    for dim, size in enumerate(sizes):
        struct.pack_into("<3I", data, 4 + 12 * dim, *divider(size))
        struct.pack_into(f"<{tensors}I", data, 304 + 4 * tensors * dim, *range(4, 4 + tensors))
    return bytes(data)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def run(*nodes: Node) -> Audit:
    return audit(graph(*nodes), MemoryMap(REGIONS))


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 7), (1000, 2, 65537, 9)])
@pytest.mark.parametrize("functor", [1, 8, 40, 64])
@pytest.mark.parametrize("tensors", [1, 2, 3, 4, 5])
def test_entries_of_unused_dimensions_are_not_addresses(tensors: int, functor: int, sizes: tuple[int, ...]) -> None:
    """All addresses after a calculator are found."""
    data = padded(calculator(tensors, *sizes))
    addresses = words(*[REAL] * (tensors - 1), LEAK.address) + b"\x07" * functor
    (finding,) = run(kernel(words(5), data + addresses, name=LOOP)).findings
    assert finding.where == f"argument 1, byte {len(data) + 8 * (tensors - 1)}"
    behind = padded(b"\x07" * min(functor, 24)) + words(*[REAL] * tensors)  # a functor before them
    assert run(kernel(words(5), data + behind, name=LOOP)).ok
    gone = kernel(words(5), data + words(*[GONE.address + 8] * tensors) + b"\x07" * functor, name=LOOP)
    assert len(run(gone).findings) == tensors


def test_stale_words_of_a_calculator_before_known_memory() -> None:
    """The third row of strides of an index kernel with two dimensions."""
    data = bytearray(padded(calculator(3, 16, 4, stale=0)))
    struct.pack_into("<Q", data, 336, STALE)
    struct.pack_into("<Q", data, 512, STALE)
    plain = bytes(data) + words(REAL, REAL + 64)
    gather = data + words(*[REAL] * 5, STALE, *[REAL] * 9)  # eleven tensors; one address is where four would end
    assert [f.where for f in run(kernel(words(5), bytes(gather), name=INDEX)).findings] == ["argument 1, byte 648"]
    assert run(kernel(words(64), plain, name=INDEX)).ok
    assert sum(run(kernel(words(64), plain, name=INDEX)).counts.values()) == 2, "stale words are not counted"
    other = run(kernel(words(64), plain, name="my_own_kernel"))
    assert {f.where for f in other.findings} == {"argument 1, byte 336", "argument 1, byte 512"}
    assert run(kernel(words(REAL), calculator(3, 16, 4), calculator(1, 16, 4), name=CASTING)).ok, "nothing else"
    no_calculator = bytes(4) + plain[4:]
    assert not run(kernel(words(64), no_calculator, name=INDEX)).ok


REDUCTIONS = {
    "some": (calculator(1, 16, 4), calculator(2, 7, 3)),
    "all": (calculator(1, 64), calculator(2)),
    "over a size of 1": (calculator(1), calculator(2, 64)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_calculators_in_a_reduction(name: str) -> None:
    """Two calculators after numbers that look like one: 1, 1, 1, 0 as in the ReduceConfig of a full sum."""
    config = struct.pack("<if16i", 0, 0.0, 4, 64, 1, 32, 1, 1, 1, 0, 0, 0, 1, 32, 1, 32, 0, 1)
    data = padded(config + b"".join(REDUCTIONS[name]))
    behind = struct.pack("<qiii", 0, 0, 1, 1)[:16]
    assert run(kernel(data + words(REAL, REAL, 0, 0, REAL, REAL + 8) + behind, name=REDUCE)).ok
    wrong = words(STALE, STALE + 64, 0, GONE.address, STALE + 128, STALE + 192)
    found = run(kernel(data + wrong + behind, name=REDUCE)).findings
    assert [f.where for f in found] == [f"argument 0, byte {len(data) + at}" for at in (0, 8, 24, 32, 40)]


def test_a_second_calculator_after_addresses() -> None:
    """torch.take: its stale words do not hide the addresses before it."""
    for at in (None, 608, 704, 808):
        data = bytearray(calculator(2, 16, 4) + words(LEAK.address, LEAK.address + 64, 64) + bytes(4))
        data += calculator(1, 8, 8, stale=0) + words(REAL)
        if at is not None:
            struct.pack_into("<Q", data, at, REAL)
        found = run(kernel(words(64), bytes(data), name=TAKE)).findings
        assert [f.where for f in found] == ["argument 1, byte 504", "argument 1, byte 512"], at


def test_the_grid_gives_the_length_of_an_input_list() -> None:
    node = kernel(words(REAL), words(REAL, REAL + 64, *[STALE] * 126) + bytes(1700), name=CAT)
    assert run(replace(node, grid=(264, 2, 1))).ok
    assert not run(replace(node, grid=(264, 3, 1))).ok
    wrong = kernel(words(REAL), words(REAL, STALE, *[STALE] * 126) + bytes(1700), name=CAT)
    (finding,) = run(replace(wrong, grid=(264, 2, 1))).findings
    assert (finding.where, finding.kind) == ("argument 1, byte 8", FindingKind.FOREIGN)


@pytest.mark.parametrize("stale_words", [26, 51])
def test_sizes_in_a_tensor_info_are_not_addresses(stale_words: int) -> None:
    assert run(kernel(words(REAL, *[STALE] * stale_words), words(8), name=TOP_K)).ok
    (finding,) = run(kernel(words(STALE, *[STALE] * stale_words), words(8), name=TOP_K)).findings
    assert finding.where == "argument 0, byte 0"
    assert not run(kernel(words(REAL, *[STALE] * (stale_words + 1)), name=TOP_K)).ok, "another structure"
    for name in ("quat::native::f<x::TensorInfo<g>>", "x::at::native::CatArrayBatchedCopy", "f<TensorInfo<g>>"):
        of_another_library = kernel(words(REAL, *[STALE] * stale_words), name=f"void {name}")
        assert len(run(of_another_library).findings) == stale_words


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_elementwise_kernel": lambda x, rows: x[rows[:, None], rows[None, :4]],
    "gpu_kernel_impl_nocast": lambda x, rows: x.t() + x,
    "gpu_kernel_impl<": lambda x, rows: x.t() + rows,  # casts its input
    "multi_outputs": lambda x, rows: torch.frexp(x[:, ::2]).mantissa,
    "reduce_kernel": lambda x, rows: x.view(4, 8, 8, 4).sum(dim=(0, 2)),
    "sum_functor": lambda x, rows: x.sum(),
    "func_wrapper": lambda x, rows: x[:1].amax(0),
    "cuda_take_put_kernel": lambda x, rows: torch.take(x.t(), rows.view(4, 8).t()),
    "CatArrayBatchedCopy": lambda x, rows: torch.cat((x, x[:, :7], x), dim=1),
    "gatherTopK": lambda x, rows: torch.topk(x, 5).values,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_kernels_do_not_read_the_ignored_bytes(name: str) -> None:
    """Filled with addresses of an unregistered tensor, the graph computes the same, and has no findings."""
    x = torch.randn(32, 32, device="cuda")
    rows = torch.randperm(32, device="cuda")
    stranger = torch.zeros(64, device="cuda")
    expected = STEPS[name](x, rows)
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(captured):
        got = STEPS[name](x, rows)
    view = inspect_graph(captured)
    memory = memory_of(static={"x": x, "rows": rows, "got": got}, pool=captured)
    assert audit(view, memory).ok, str(audit(view, memory))
    named = [node for node in view.nodes if name in node.name]
    assert len(named) == 1, [node.name for node in view.nodes]
    node = named[0]
    unused = _unused(node, memory)
    assert sum(end - first for _, first, end in unused) > 150, (node.name, [len(a.data) for a in node.arguments])
    _fill(captured, node, unused, stranger.data_ptr())
    filled = audit(inspect_graph(captured), memory)
    assert filled.ok, str(filled)
    got.zero_()
    captured.instantiate()
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, expected)


def _unused(node: Node, memory: MemoryMap) -> list[tuple[int, int, int]]:
    """The parts of the ranges without addresses that hold no numbers either."""

    def is_known(index: int, at: int) -> bool:
        data = node.arguments[index].data[at : at + 8]
        return len(data) == 8 and memory.find(int.from_bytes(data, "little")) is not None

    unused = []
    for index, first, end in no_addresses(node, is_known):
        data = node.arguments[index].data
        if "CatArrayBatchedCopy" in node.name:
            unused.append((index, first, 64 * 8))
        elif "TensorInfo<" in node.name and first == 8:
            (dims,) = struct.unpack_from("<i", data, 208)
            unused += [(index, 8 + 4 * dims, 108), (index, 108 + 4 * dims, 208)]
        elif "reduce_kernel" in node.name:
            at = next(
                at for at in (end - 908, end - 912) if _begins_with_dims(data, at) and _begins_with_dims(data, at + 404)
            )
            unused += [(index, *part) for part in (*_parts(data, at, 1), *_parts(data, at + 404, 2))]
        else:
            unused += [(index, *part) for part in _parts(data, first, (end - first - 304) // 100)]
    return unused


def _begins_with_dims(data: bytes, at: int) -> bool:
    dims, *first = struct.unpack_from("<4I", data, at)
    return dims == 0 or (dims <= 25 and tuple(first) == divider(max(first[0], 1)))


def _parts(data: bytes, at: int, tensors: int) -> list[tuple[int, int]]:
    (dims,) = struct.unpack_from("<i", data, at)
    strides = at + 304
    return [(at + 4 + 12 * dims, strides), (strides + 4 * dims * tensors, strides + 100 * tensors)]


def _fill(captured: torch.cuda.CUDAGraph, node: Node, unused: list[tuple[int, int, int]], address: int) -> None:
    """Write an address to every word of these parts of a node's arguments."""
    from cuda.bindings import driver

    raw = driver.CUgraph(captured.raw_cuda_graph())
    _, count = check(driver.cuGraphGetNodes(raw))[1:]
    handles = check(driver.cuGraphGetNodes(raw, count))[1]
    arguments = [bytearray(argument.data) for argument in node.arguments]
    for index, first, end in unused:
        for at in range(-(-first // 8) * 8, end - 7, 8):
            struct.pack_into("<Q", arguments[index], at, address)
    for handle in handles:
        if check(driver.cuGraphNodeGetType(handle))[1] != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            continue
        params = check(driver.cuGraphKernelNodeGetParams(handle))[1]
        if _bytes_of(params, node) != [argument.data for argument in node.arguments]:
            continue
        buffers = [(ctypes.c_char * len(data)).from_buffer(data) for data in arguments]
        places = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        params.kernelParams = ctypes.addressof(places)
        check(driver.cuGraphKernelNodeSetParams(handle, params))
        return
    raise AssertionError(f"no node with the arguments of {node.name}")


def _bytes_of(params: object, node: Node) -> list[bytes] | None:
    sizes = [len(argument.data) for argument in node.arguments]
    grid = (params.gridDimX, params.gridDimY, params.gridDimZ)
    if grid != node.grid or not params.kernelParams:
        return None
    places = (ctypes.c_void_p * len(sizes)).from_address(int(params.kernelParams))
    return [ctypes.string_at(at, size) for at, size in zip(places, sizes, strict=True)]
