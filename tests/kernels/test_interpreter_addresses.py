"""`checked_addresses`: an interpreted kernel that accesses memory outside its tensors raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, InterpreterError

from graphrt.kernels.library import INTERPRETER_AVAILABLE
from tests.support.interpreter import checked_addresses

pytestmark = pytest.mark.skipif(not INTERPRETER_AVAILABLE, reason="compiled kernels are not checked")
F32, I32 = torch.float32, torch.int32
WILD = 1 << 44  # elements


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    with checked_addresses():
        yield


@triton.jit
def _copy_kernel(x_ptr, out_ptr, count, ahead, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at + ahead, mask=at < count), mask=at < count)


@triton.jit
def _take(x_ptr, at):
    return tl.load(x_ptr + at)


@triton.jit
def _take_one_kernel(x_ptr, out_ptr, at):
    tl.store(out_ptr, _take(x_ptr, at))


@triton.jit
def _atomic_kernel(x_ptr, count, ahead, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(x_ptr + at + ahead * (at >= count), 1, mask=at < count)
    tl.atomic_cas(x_ptr + ahead, 1, 7)


@triton.jit
def _sum_of_tuple_kernel(x_ptrs, out_ptr, at):
    total = tl.load(x_ptrs[0] + at)
    for i in tl.static_range(1, len(x_ptrs)):
        total += tl.load(x_ptrs[i] + at)
    tl.store(out_ptr, total)


@triton.jit
def _by_address_kernel(table_ptr, out_ptr, at):
    tl.store(out_ptr, tl.load(tl.load(table_ptr).to(tl.pointer_type(tl.float32)) + at))


@triton.jit
def _described_kernel(x_ptr, out_ptr, rows, start):
    described = tl.make_tensor_descriptor(x_ptr, shape=[rows, 16], strides=[16, 1], block_shape=[4, 16])
    at = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, described.load([start, 0]))


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_loads_and_stores_out_of_bounds_raise(dtype: torch.dtype) -> None:
    x, out = torch.ones(64, dtype=dtype), torch.zeros(64, dtype=dtype)
    size = dtype.itemsize
    _copy_kernel[(2,)](x, out, 64, 0, 32)
    assert torch.equal(out, x)
    program = r"program \(1, 0, 0\) at test_interpreter_addresses\.py:\d+"
    place = rf"byte {64 * size} of the storage of x_ptr, which has {64 * size} bytes"
    text = rf"^_copy_kernel: expected every lane of a load .* got 1 outside in {program}, the first at .*, {place};"
    with pytest.raises(AssertionError, match=text):
        _copy_kernel[(2,)](x, out, 64, 1, 32)
    with pytest.raises(AssertionError, match=rf"load .*, got 3 outside .* byte {-3 * size} of the storage of x_ptr, "):
        _copy_kernel[(2,)](x, out, 64, -3, 32)
    with pytest.raises(
        AssertionError, match=rf"lane of a store .*, got 4 outside .* byte {60 * size} of .* of out_ptr, "
    ):
        _copy_kernel[(2,)](x, out[:60].clone(), 64, 0, 32)


def test_a_partly_outside_lane_raises() -> None:
    x, out = torch.zeros(14, dtype=torch.uint8)[:12].view(I32), torch.zeros(4, dtype=I32)
    _copy_kernel[(1,)](x, out, 3, 0, 4)
    with pytest.raises(AssertionError, match=r"got 1 outside .* byte 12 of the storage of x_ptr, which has 14 bytes"):
        _copy_kernel[(1,)](x, out, 4, 0, 4)


@pytest.mark.parametrize("at", [4, -1, WILD, -WILD, -(1 << 61)])
def test_accesses_in_called_functions_are_checked(at: int) -> None:
    x, out = torch.arange(4.0), torch.zeros(1)
    _take_one_kernel[(1,)](x, out, 3)
    assert out.item() == 3
    with pytest.raises(AssertionError, match=r"^_take_one_kernel: expected every lane of a load"):
        _take_one_kernel[(1,)](x, out, at)


def test_a_null_pointer_raises() -> None:
    x = torch.zeros(4)
    at = -x.data_ptr() // 4
    with pytest.raises(AssertionError, match="the first at 0x0, byte"):
        _take_one_kernel[(1,)](x, torch.zeros(1), at)


@pytest.mark.parametrize("ahead", [WILD, -WILD])
def test_masked_lanes_may_have_any_address(ahead: int) -> None:
    x, out = torch.arange(8.0), torch.zeros(8)
    _copy_kernel[(4,)](x, out, 8, 0, 16)
    assert torch.equal(out, x)
    _copy_kernel[(1,)](x, out, 0, ahead, 16)
    assert torch.equal(out, x)


def test_atomics_are_checked() -> None:
    x = torch.zeros(8, dtype=I32)
    _atomic_kernel[(1,)](x, 8, 5, 8)
    assert x.tolist() == [1, 1, 1, 1, 1, 7, 1, 1]
    with pytest.raises(
        AssertionError, match=r"^_atomic_kernel: expected every lane of an atomic .* byte 32 of .* of x_ptr, which"
    ):
        _atomic_kernel[(1,)](x, 8, 8, 8)  # compares and swaps
    x.zero_()
    with pytest.raises(
        AssertionError, match=r"^_atomic_kernel: expected every lane of an atomic .* got 1 outside .* byte 32 of"
    ):
        _atomic_kernel[(1,)](x, 9, 0, 16)  # adds
    assert not x.any(), "the kernel ran partly"


def test_tuples_of_tensors_are_checked() -> None:
    tensors, out = (torch.arange(8.0), torch.arange(8.0, 14.0), torch.arange(8.0)), torch.zeros(1)
    _sum_of_tuple_kernel[(1,)](tensors, out, 5)
    assert out.item() == 23
    with pytest.raises(AssertionError, match=r"byte 24 of the storage of x_ptrs\[1\], which has 24 bytes"):
        _sum_of_tuple_kernel[(1,)](tensors, out, 6)


def test_arguments_may_access_their_shared_storage() -> None:
    whole = torch.zeros(96)
    _copy_kernel[(1,)](whole[:32], whole[64:], 32, 32, 32)  # inside the storage, outside of the tensor
    with pytest.raises(AssertionError, match="byte 384 of the storage of x_ptr, out_ptr, which has 384 bytes"):
        _copy_kernel[(1,)](whole[:32], whole[64:], 32, 65, 32)


def test_named_arguments_are_checked() -> None:
    with pytest.raises(AssertionError, match="byte 12 of the storage of out_ptr"):
        _copy_kernel[(1,)](torch.zeros(4), out_ptr=torch.zeros(3), count=4, ahead=0, N=4)


def test_storages_may_overlap() -> None:
    array = torch.zeros(8).numpy()
    whole, part = torch.from_numpy(array), torch.from_numpy(array[2:4])
    _copy_kernel[(1,)](whole, part, 6, 0, 8)
    with pytest.raises(
        AssertionError, match=r"lane of a store .* got 1 outside .* byte 32 of the storage of x_ptr, which has"
    ):
        _copy_kernel[(1,)](whole, part, 7, 0, 8)


def test_integer_pointers_to_live_tensors_are_allowed() -> None:
    x, out = torch.arange(4.0), torch.zeros(1)
    table = torch.tensor([x.data_ptr()])
    _by_address_kernel[(1,)](table, out, 3)
    assert out.item() == 3
    with pytest.raises(AssertionError, match="byte 16 of the storage of a live tensor, which has 16 bytes"):
        _by_address_kernel[(1,)](table, out, 4)
    with pytest.raises(AssertionError, match="the first at 0x10, "):
        _by_address_kernel[(1,)](torch.tensor([16]), out, 0)


def test_tensor_descriptors_are_checked() -> None:
    x, out = torch.randn(6, 16), torch.zeros(4, 16)
    _described_kernel[(1,)](x, out, 6, 4)
    assert torch.equal(out[:2], x[4:])
    assert not out[2:].any()
    with pytest.raises(
        AssertionError, match=r"got 16 outside .* byte 384 of the storage of x_ptr, which has 384 bytes"
    ):
        _described_kernel[(1,)](x, out, 7, 4)


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(InterpreterError):
        _sum_of_tuple_kernel[(1,)](torch.zeros(4), None, 0)


def test_checks_end_with_the_context() -> None:
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    before = [getattr(InterpreterBuilder, name) for name in names], GridExecutor.__call__
    with checked_addresses():
        assert GridExecutor.__call__ is not before[1]
    assert before == ([getattr(InterpreterBuilder, name) for name in names], GridExecutor.__call__)
