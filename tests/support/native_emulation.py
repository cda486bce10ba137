"""Run the CUDA kernels' source on a CPU: compiled as C++, with emulation/primitives.cuh in place of instructions."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from graphrt.kernels.native import nvrtc
from graphrt.kernels.native.nvrtc import NativeVariant

COMPILER = shutil.which("g++")
injected: tuple[str, str] | None = None
"""A bug to inject: text of the sources, and its replacement."""
launches = itertools.count()
"""Numbers of launches, which seed the execution order of each launch."""
_DYNAMIC = "  extern __shared__ __align__(128) char memory[];\n"  # in emulation `memory` points to the running block's
_INSTRUCTIONS = Path(__file__).resolve().parent / "emulation" / "primitives.cuh"
_SOURCES = Path(nvrtc.__file__).resolve().parent


@functools.cache
def _build(variant: NativeVariant, bug: tuple[str, str] | None) -> Callable[..., bytes | None]:
    """Compile a variant and return the entry of its shared library, which stays loaded without its folder."""
    assert COMPILER is not None, "skip without a C++ compiler"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = {path.name: path.read_text() for path in (*_SOURCES.glob("*.cuh"), _SOURCES / variant.source)}
        if bug is not None:
            if not any(bug[0] in path.read_text() for path in _SOURCES.glob("*.cu*")):
                raise LookupError(f"the sources do not contain {bug[0]!r}")
            texts = {name: text.replace(*bug) for name, text in texts.items()}
        assert _DYNAMIC in texts[variant.source]
        texts[variant.source] = texts[variant.source].replace(_DYNAMIC, "")
        texts["primitives.cuh"] = _INSTRUCTIONS.read_text()  # replaces the device's
        for file_name, text in texts.items():
            (folder / file_name).write_text(text)
        main = folder / "main.cpp"
        main.write_text(
            f'#include "{variant.source}"\n'
            "}  // namespace\n"
            'extern "C" const char *run(const Params *p, int x, int y, const int *order, int count, int at_a_time, '
            "int seed) { return run_grid(p, x, y, order, count, at_a_time, seed); }\n"
        )
        library = folder / "kernel.so"
        settings = (*variant.macros, ("SHARED_BYTES", variant.shared_bytes), ("ENTRY", variant.entry))
        macros = [f"-D{key}={value}" for key, value in settings]
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
        subprocess.run([COMPILER, *flags, *macros, str(main), "-o", str(library)], check=True)
        run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run


def emulated_launch(
    variant: NativeVariant, grid: tuple[int, int], params: ctypes.Structure, device: torch.device, *, pdl: bool = False
) -> None:
    """Replace `nvrtc.launch` on CPU tensors.

    Clusters start in any order, which must not affect results. Blocks that wait for earlier blocks start in the order
    of a device. Every second launch runs the blocks one after another.

    Raises: AssertionError: if the emulation detects a fault, such as a deadlock.
    """
    seed = next(launches)
    clusters = list(range(grid[0] * grid[1] // variant.cluster))
    random.Random(seed).shuffle(clusters)
    macros = dict(variant.macros)
    if macros.get("CLUSTER") == 1 and not macros["FIXED_SPLITS"]:
        clusters.sort(key=lambda block: block % grid[1])
    count, at_a_time = len(clusters), 1 if seed % 2 else 2 * grid[0] + 4
    run = _build(variant, injected)
    fault = run(ctypes.byref(params), *grid, (ctypes.c_int * count)(*clusters), count, at_a_time, seed)
    assert fault is None, fault.decode()
