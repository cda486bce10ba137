"""Run the source of the CUDA prompt kernel on a CPU: compiled as C++, with emulation/warpgroups.cuh for
instructions."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from graphrt.kernels.native import nvrtc
from graphrt.kernels.native.nvrtc import NativeVariant

COMPILER = shutil.which("g++")
injected: tuple[str, str] | None = None
"""A bug to inject: text of the source, and its replacement."""
launches = itertools.count()
"""Numbers of launches, which seed the execution order of each launch."""
_DYNAMIC = "  extern __shared__ __align__(1024) char memory[];\n"  # in emulation `memory` points to the running block's
_INSTRUCTIONS = Path(__file__).resolve().parent / "emulation" / "warpgroups.cuh"
_SOURCES = Path(nvrtc.__file__).resolve().parent


@functools.cache
def _build(variant: NativeVariant, bug: tuple[str, str] | None) -> Callable[..., bytes | None]:
    """Compile a variant and return the entry of its shared library, which stays loaded without its folder."""
    assert COMPILER is not None, "skip without a C++ compiler"
    text = (_SOURCES / variant.source).read_text()
    if bug is not None:
        if bug[0] not in text:
            raise LookupError(f"the source does not contain {bug[0]!r}")
        text = text.replace(*bug)
    assert _DYNAMIC in text
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / variant.source).write_text(text.replace(_DYNAMIC, ""))
        (folder / "warpgroups.cuh").write_text(_INSTRUCTIONS.read_text())
        main = folder / "main.cpp"
        main.write_text(
            f'#include "{variant.source}"\n'
            "}  // namespace\n"
            'extern "C" const char *run(const Params *p, int x, int seed) { return run_grid(p, x, seed); }\n'
        )
        library = folder / "kernel.so"
        macros = [f"-D{key}={value}" for key, value in (*variant.macros, ("SHARED_BYTES", variant.shared_bytes))]
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
        subprocess.run([COMPILER, *flags, *macros, str(main), "-o", str(library)], check=True)
        run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run


def emulated_launch(
    variant: NativeVariant, grid: tuple[int, int], params: ctypes.Array, device: torch.device, *, pdl: bool = False
) -> None:
    """Replace `nvrtc.launch` on CPU tensors.

    Raises: AssertionError: if the emulation detects a fault, such as a deadlock.
    """
    buffer = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)  # the struct is aligned to 64 bytes
    at = -(-ctypes.addressof(buffer) // 64) * 64
    ctypes.memmove(at, params, ctypes.sizeof(params))
    fault = _build(variant, injected)(ctypes.c_void_p(at), grid[0], next(launches))
    assert fault is None, fault.decode()


def emulated_map(tensor: torch.Tensor, box_rows: int) -> bytes:
    """Replace `encode_map`: return the emulation's TensorMap."""
    pages = tensor if tensor.dim() == 4 else tensor[None]
    num_pages, num_slots, num_heads, head_dim = pages.shape
    steps = [pages.stride(dim) * pages.element_size() for dim in (1, 2, 0)]
    extents = (head_dim, num_slots, num_heads, num_pages)
    return struct.pack("q4q3qi", tensor.data_ptr(), *extents, *steps, box_rows).ljust(128, b"\0")
