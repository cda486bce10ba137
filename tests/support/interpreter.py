"""Run Triton programs in the interpreter in random order, and check that they access only the launch's tensors.

Fixes for the interpreter itself are in kernels/interpreter.py.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

_Storages = dict[int, tuple[int, str]]  # by start address: end address and names of the arguments in it

# The builder's memory access methods: a description, and the argument indices of the pointers and the mask.
_ACCESSES: dict[str, tuple[str, int, int | None]] = {
    "create_masked_load": ("a load", 0, 1),
    "create_masked_store": ("a store", 0, 2),
    "create_atomic_rmw": ("an atomic", 1, 3),
    "create_atomic_cas": ("an atomic", 0, None),
}


@contextmanager
def shuffled_programs() -> Iterator[None]:
    """Make the interpreter run the programs of each launch in random order, one after another.

    By default they run in id order, which hides races. Kernels whose programs wait for each other never
    finish.
    """
    set_grid_dim, set_grid_idx = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    chance = random.Random(0)
    order: dict[tuple[int, ...], tuple[int, ...]] = {}

    def draw(self: Any, *dim: int) -> None:
        set_grid_dim(self, *dim)
        programs = list(itertools.product(*(range(n) for n in dim)))
        order.clear()
        order.update(zip(programs, chance.sample(programs, len(programs)), strict=True))

    def move(self: Any, *program: int) -> None:
        set_grid_idx(self, *order[program])

    with mock.patch.multiple(InterpreterBuilder, set_grid_dim=draw, set_grid_idx=move):
        yield


@contextmanager
def checked_addresses() -> Iterator[None]:
    """Make a launch raise an error if a load, store or atomic accesses memory outside the launch's tensors.

    By default the interpreter accesses any address, where a device could fail. Masked lanes may point anywhere. All
    other lanes must point to the storage of a tensor argument, including tensors in tuples. A pointer that a kernel
    computes from an integer may point to any live tensor. Only one thread may launch at a time.

    Raises:
        AssertionError: in the launch, with the kernel, the nearest argument and the line.
    """
    start, call = GridExecutor._init_args_hst, GridExecutor.__call__
    make_pointer = InterpreterBuilder.create_int_to_ptr
    memory, failure = _Memory("", {}), None

    def started(self: Any, args: Any, named: dict[str, Any]) -> Any:
        nonlocal memory  # the arguments of the kernel may be copies
        host_args, host_named = start(self, args, named)
        given = itertools.chain(zip(self.arg_names, host_args, strict=False), host_named.items())
        memory = _Memory(self.fn.__name__, _storages_of(given))
        return host_args, host_named

    def called(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal memory, failure
        outer = memory
        try:
            return call(self, *args, **named)
        except InterpreterError:  # once for each function of the kernel
            if failure is None:
                raise
            raise failure from None
        finally:
            memory, failure = outer, None

    def pointer_made(self: Any, source: Any, target: Any) -> Any:
        memory.admit(np.unique(source.data))
        return make_pointer(self, source, target)

    def checked(access: str, what: str, pointers_at: int, mask_at: int | None) -> Callable[..., Any]:
        make = getattr(InterpreterBuilder, access)

        def method(self: Any, *args: Any, **named: Any) -> Any:
            nonlocal failure
            mask = None if mask_at is None else args[mask_at].data
            pointers = args[pointers_at]
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)  # a bool takes a byte
            outside = memory.outside(pointers.data, mask, size)
            if len(outside):
                failure = AssertionError(memory.complaint(what, outside, size, self.grid_idx))
                raise failure
            return make(self, *args, **named)

        return method

    methods: dict[str, Any] = {access: checked(access, *places) for access, places in _ACCESSES.items()}
    with (
        mock.patch.multiple(GridExecutor, _init_args_hst=started, __call__=called),
        mock.patch.multiple(InterpreterBuilder, **methods, create_int_to_ptr=pointer_made),
    ):
        yield


class _Memory:
    """The storages of a launch's tensor arguments, which it may access."""

    def __init__(self, kernel: str, storages: _Storages) -> None:
        self._kernel, self._storages = kernel, storages
        self._alive: _Storages | None = None
        self._sort()

    def outside(
        self, addresses: npt.NDArray[np.uint64], mask: npt.ArrayLike | None, size: int
    ) -> npt.NDArray[np.uint64]:
        """Return the unmasked addresses, [any], whose `size` bytes are not inside one storage."""
        if not addresses.size or self._in_one(addresses, size):
            return addresses[:0]
        used = addresses.ravel()
        if mask is not None:
            # Descriptors in Triton 3.6 pass an array instead of a handle.
            used = used[np.asarray(mask).ravel().astype(np.bool_, copy=False)]
            if not used.size or self._in_one(used, size):
                return used[:0]
        ends = self._end_array[np.searchsorted(self._start_array, used, side="right") - 1]
        return used[(used >= ends) | (ends - used < size)]  # a sum could wrap around

    def admit(self, addresses: npt.NDArray[Any]) -> None:
        """Also allow the storages of live tensors that contain these addresses."""
        for address in (int(value) for value in addresses):
            if address < self._ends[bisect_right(self._starts, address) - 1]:
                continue
            if self._alive is None:
                self._alive = _live_storages()
            for begin, (end, names) in self._alive.items():
                if begin <= address < end:
                    self._storages[begin] = (end, names)
            self._sort()

    def complaint(self, what: str, outside: npt.NDArray[np.uint64], size: int, program: tuple[int, ...]) -> str:
        """Return the error text for the addresses in `outside`."""
        address, text = int(outside[0]), "; the launch has no tensor"
        if self._storages:
            gap = {begin: max(begin - address, address + size - end) for begin, (end, _) in self._storages.items()}
            begin = min(gap, key=lambda place: gap[place])
            end, names = self._storages[begin]
            text = f", byte {address - begin} of the storage of {names}, which has {end - begin} bytes"
        return (
            f"{self._kernel}: expected every lane of {what} to be within the launch's tensors, got {len(outside)} "
            f"outside in program {program} at {_line()}, the first at {address:#x}{text}; mask such lanes off"
        )

    def _in_one(self, addresses: npt.NDArray[np.uint64], size: int) -> bool:
        low, high = int(addresses.min()), int(addresses.max())
        return high + size <= self._ends[bisect_right(self._starts, low) - 1]

    def _sort(self) -> None:
        # Start with an empty storage, so that every address has a storage that starts before it.
        self._starts, self._ends = [0], [0]
        for begin, (end, _) in sorted(self._storages.items()):
            self._starts.append(begin)
            self._ends.append(max(end, self._ends[-1]))  # arrays may share memory
        self._start_array, self._end_array = np.array(self._starts, np.uint64), np.array(self._ends, np.uint64)


def _line() -> str:
    """Return the file and line of the innermost frame outside Triton, its fixes and this file."""
    frame = sys._getframe()
    others = ("triton.", "graphrt.kernels.interpreter", __name__)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(others):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _storages_of(arguments: Iterable[tuple[str, Any]]) -> _Storages:
    """Return the storages of the tensors in a launch's arguments."""
    found: _Storages = {}
    for argument, value in arguments:
        for name, tensor in _tensors_of(argument, value):
            begin, end = _extent(tensor)
            if begin < end:
                found[begin] = (end, f"{found[begin][1]}, {name}" if begin in found else name)
    return found


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an argument by name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for at, one in enumerate(value):
            yield from _tensors_of(f"{name}[{at}]", one)
    elif hasattr(value, "base"):  # a descriptor of a tensor, or a tensor viewed as a different dtype
        yield from _tensors_of(name, value.base)


def _live_storages() -> _Storages:
    """Return the storages of all live Python tensors on the CPU."""
    found: _Storages = {}
    for value in gc.get_objects():
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)  # others may have no memory
        if plain and value.device.type == "cpu" and value.layout == torch.strided:
            begin, end = _extent(value)
            found[begin] = (end, "a live tensor")
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and end address of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
