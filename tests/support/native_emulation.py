"""Run the CUDA kernels' source on a CPU: compiled as C++, with the headers of emulation/ in place of instructions."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime.cache import get_cache_manager

from graphrt.kernels.native import nvrtc
from graphrt.kernels.native.nvrtc import NativeVariant

COMPILER = shutil.which("g++")
injected: tuple[str, str] | None = None
"""A bug to inject: text of the sources, and its replacement."""
launches = itertools.count()
"""Numbers of launches, which seed the execution order of each launch."""
_late: list[tuple[torch.Tensor, torch.Tensor]] = []
_DYNAMIC = re.compile(r"  extern __shared__ __align__\(\d+\) char memory\[\];\n")
"""The declaration of shared memory. In emulation `memory` points to that of the running block."""
_INSTRUCTIONS = Path(__file__).resolve().parent / "emulation"
_SOURCES = Path(nvrtc.__file__).resolve().parent
_FLAGS = ["-std=c++17", "-Og", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
"""With -O1, compilation takes a third longer than all launches of the tests save."""


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Emulate the launches of a module, in the same execution orders in every test."""
    if COMPILER is None:
        pytest.skip("needs the C++ compiler g++")
    monkeypatch.setattr(module, "launch", emulated_launch)
    monkeypatch.setattr(sys.modules[__name__], "launches", itertools.count())


@functools.cache
def _build(variant: NativeVariant, bug: tuple[str, str] | None) -> ctypes.CDLL:
    """Load the library of a variant, with `run` and `write_late`. Triton's cache keeps it for other processes."""
    texts = {path.name: path.read_text() for path in (*_SOURCES.glob("*.cuh"), _SOURCES / variant.source)}
    if bug is not None:
        if not any(bug[0] in path.read_text() for path in _SOURCES.glob("*.cu*")):
            raise LookupError(f"the sources do not contain {bug[0]!r}")
        texts = {name: text.replace(*bug) for name, text in texts.items()}
    texts[variant.source], declared = _DYNAMIC.subn("", texts[variant.source])
    assert declared == 1
    texts |= {path.name: path.read_text() for path in _INSTRUCTIONS.glob("*.cuh")}  # replace the device's
    texts["main.cpp"] = (
        f'#include "{variant.source}"\n'
        "}  // namespace\n"
        'extern "C" const char *run(const Params *p, int x, int y, const int *order, int count, int at_a_time, '
        "int seed) { return run_grid(p, x, y, order, count, at_a_time, seed); }\n"
        "#ifdef RANKS\n"
        'extern "C" const char *run_ranks(const Params *const *p, const int *blocks, const int *counts, int ranks, '
        "int seed) { return run_streams(p, blocks, counts, ranks, seed); }\n"
        "#endif\n"
    )
    sizes = {"WARPS": variant.num_threads // 32, "SHARED_BYTES": variant.shared_bytes, "ENTRY": variant.entry}
    command = [COMPILER, *_FLAGS, *(f"-D{key}={value}" for key, value in (sizes | dict(variant.macros)).items())]
    cache = get_cache_manager(hashlib.sha256(repr((sorted(texts.items()), command)).encode()).hexdigest())
    library = cache.get_file("kernel.so")
    if library is None:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                Path(folder, name).write_text(text)
            subprocess.run([*command, "main.cpp", "-o", "kernel.so"], cwd=folder, check=True)
            library = cache.put(Path(folder, "kernel.so").read_bytes(), "kernel.so")
    loaded = ctypes.CDLL(library)
    loaded.run.restype = ctypes.c_char_p
    return loaded


def write_late(tensor: torch.Tensor) -> None:
    """Let a contiguous tensor arrive when the next launch waits for earlier kernels. Until then its bytes are 0xff."""
    _late.append((tensor, tensor.clone()))
    tensor.view(torch.uint8).fill_(0xFF)


def emulated_launch(
    variant: NativeVariant,
    grid: tuple[int, int],
    params: ctypes.Structure | ctypes.Array[Any],
    device: torch.device,
    *,
    pdl: bool = False,
) -> None:
    """Replace `nvrtc.launch` on CPU tensors.

    Clusters start in any order, which must not affect results. Blocks that wait for earlier blocks start in the order
    of a device. Every second launch, and every launch of warpgroups, runs the blocks one after another.

    Raises: AssertionError: if the emulation detects a fault, such as a deadlock.
    """
    seed = next(launches)
    clusters = list(range(grid[0] * grid[1] // variant.cluster))
    random.Random(seed).shuffle(clusters)
    macros = dict(variant.macros)
    if macros.get("FIXED_SPLITS") == 0 and macros["CLUSTER"] == 1:
        clusters.sort(key=lambda block: block % grid[1])
    count, at_a_time = len(clusters), 1 if seed % 2 or variant.arch_specific else 2 * grid[0] + 4
    buffer = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)  # the struct may be aligned to 64 bytes
    at = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(at, ctypes.byref(params), ctypes.sizeof(params))
    library = _build(variant, injected)
    late = [_late.pop() for _ in range(len(_late))]
    for tensor, value in late:
        addresses = (ctypes.c_void_p(t.data_ptr()) for t in (tensor, value))
        library.write_late(*addresses, ctypes.c_long(value.nbytes))
    fault = library.run(ctypes.c_void_p(at), *grid, (ctypes.c_int * count)(*clusters), count, at_a_time, seed)
    assert fault is None, fault.decode()


class Ranks:
    """Runs the launches of several ranks concurrently, where `launch` is `Ranks.launch`.

    Ranks call their operators one after another, as their hosts would; `run` then runs all launches.
    """

    def __init__(self, ranks: int) -> None:
        self.launches: list[list[tuple[ctypes.Structure, int]]] = [[] for _ in range(ranks)]
        self.rank = 0  # of the next launches
        self.variant: NativeVariant | None = None  # of all launches

    def launch(
        self,
        variant: NativeVariant,
        grid: tuple[int, int],
        params: ctypes.Structure,
        device: torch.device,
        *,
        pdl: bool = False,
    ) -> None:
        assert self.variant in (None, variant)
        self.variant = variant
        self.launches[self.rank].append((params, grid[0]))

    def run(self, seed: int) -> None:
        """Run all launches, in an order derived from the seed. Raises: AssertionError: see `emulated_launch`."""
        every = [launch for launches in self.launches for launch in launches]
        counts = [len(launches) for launches in self.launches]
        addresses = (ctypes.c_void_p * len(every))(*(ctypes.addressof(params) for params, _ in every))
        blocks = (ctypes.c_int * len(every))(*(count for _, count in every))
        assert self.variant is not None
        library = _build(self.variant, injected)
        library.run_ranks.restype = ctypes.c_char_p
        fault = library.run_ranks(addresses, blocks, (ctypes.c_int * len(counts))(*counts), len(counts), seed)
        self.launches = [[] for _ in counts]
        assert fault is None, fault.decode()


def emulated_map(tensor: torch.Tensor, box_rows: int) -> bytes:
    """Replace `encode_map`: return the emulation's TensorMap."""
    pages = tensor if tensor.dim() == 4 else tensor[None]
    num_pages, num_slots, num_heads, head_dim = pages.shape
    steps = [pages.stride(dim) * pages.element_size() for dim in (1, 2, 0)]
    extents = (head_dim, num_slots, num_heads, num_pages)
    return struct.pack("q4q3qi", tensor.data_ptr(), *extents, *steps, box_rows).ljust(128, b"\0")
