"""CUDA C++ kernels compiled at run time, for features that Triton lacks, such as clusters of blocks.

A variant is a source file of this folder and its compile-time macros. Triton's cache stores compiled variants.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from triton.runtime.cache import get_cache_manager

from graphrt.kernels.compile_ahead import compile_threads, compiled
from graphrt.kernels.errors import ConfigError, GraphRTError

_FOLDER = Path(__file__).resolve().parent
_MIN_CAPABILITY = (9, 0)  # clusters, programmatic dependent launch
_OPTIONS = ("--std=c++17", "--ptxas-options=-v")

SMALL_CARVEOUT = 43
"""`carveout` of kernels that overlap with products of few tokens: 98 KB of 228. A multiprocessor changes the division
only when no block runs on it. The products read weights through L1, so they are slow on a multiprocessor that still has
the division of an earlier kernel with more shared memory. Measured: docs/dev/log.md "One division of L1"."""

MIN_SHARED_BYTES = 227 << 10
"""Bytes of shared memory per block that plans require. sm_90 and sm_100 have this much, sm_120 does not."""


@dataclass(frozen=True, slots=True)
class NativeVariant:
    """One variant of a kernel.

    source        a file of this folder; it may include the .cuh files of the folder
    entry         name of the kernel, extern "C"
    macros        compile-time macros, sorted by name
    num_threads   threads per block
    shared_bytes  dynamic shared memory per block
    cluster       blocks per cluster, along the second dimension of the grid
    carveout      preferred percentage of a multiprocessor's L1 cache that is shared memory; -1: the driver's choice
    arch_specific whether the variant uses instructions of only one compute capability, such as sm_90a
    """

    source: str
    entry: str
    macros: tuple[tuple[str, int], ...]
    num_threads: int
    shared_bytes: int
    cluster: int = 1
    carveout: int = -1
    arch_specific: bool = False


def runs_native(device: torch.device) -> bool:
    """Return whether `device` runs these kernels (compute capability 9.0 or newer, 227 KB of shared memory)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    shared = int(_check(driver.cuDeviceGetAttribute(attribute, _check(driver.cuDeviceGet(_index(device))))))
    return shared >= MIN_SHARED_BYTES


def nvrtc_fault() -> str | None:
    """Return the reason why this process cannot compile kernels; None if it can."""
    try:
        _compiler_version()
    except ConfigError as error:
        return str(error)
    return None


def compile_variant(variant: NativeVariant, arch: str = "sm_90") -> tuple[bytes, str]:
    """Return the cubin of a variant, and the assembler's report of registers and spills. Requires no GPU.

    arch   compute capability; for an `arch_specific` variant the suffix "a" is appended

    Raises: ConfigError: if there is no NVRTC library. GraphRTError, with the compiler's log: if the source does not
    compile.
    """
    _compiler_version()
    arch += "a" if variant.arch_specific else ""
    headers = {path.name: path.read_bytes() for path in sorted(_FOLDER.glob("*.cuh"))}
    text = (_FOLDER / variant.source).read_bytes()
    options = [f"--gpu-architecture={arch}", *_OPTIONS, *(f"-D{name}={value}" for name, value in variant.macros)]
    names = [name.encode() for name in headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(text, variant.source.encode(), len(headers), list(headers.values()), names)
    )
    try:
        encoded = [option.encode() for option in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        text_of_log = log.decode(errors="replace").rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise GraphRTError(f"{variant.source}: does not compile for {arch}: {text_of_log}; report this as a bug")
        cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin), text_of_log


# The CPU build of torch lacks this function.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""Return the handle of the calling thread's current stream on the device with this index."""


def launch(
    variant: NativeVariant,
    grid: tuple[int, int],
    params: ctypes.Structure | ctypes.Array[Any],
    device: torch.device,
    *,
    pdl: bool = False,
) -> None:
    """Launch on the current stream of `device`, with one struct as parameter.

    Capture-safe: if the first launch of a variant is in a capture, its module is loaded in relaxed capture mode. In a
    `compiling_ahead` block, a launch only starts the compilation of its variant.

    Raises: see `compile_variant`, and GraphRTError: if the driver rejects the launch.
    """
    index = _index(device)
    if (threads := compile_threads()) is not None:
        threads.load_once((variant, index), functools.partial(load, variant, index))
        return
    config = _config(variant, grid, raw_stream(index), pdl)
    with contextlib.nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index):
        function = load(variant, index)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0))


@functools.lru_cache(maxsize=1024)
def _config(variant: NativeVariant, grid: tuple[int, int], stream: int, pdl: bool) -> Any:
    """Return the launch configuration, cached because each layer of a step uses the same one."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = variant.num_threads, 1, 1
    config.sharedMemBytes = variant.shared_bytes
    config.hStream = stream
    attributes = []
    if variant.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 1, variant.cluster, 1
        attribute.value = value
        attributes.append(attribute)
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def load(variant: NativeVariant, device_index: int) -> Any:
    """Return the variant's function on the current device, for launches and graph nodes. It is never unloaded.

    Capture-safe under the same conditions as `launch`, and raises the same errors.
    """
    ensure_context(device_index)
    return _function(variant, device_index)


def ensure_context(device_index: int) -> None:
    """Set torch's CUDA context for the current device in the calling thread, unless the thread has a context."""
    if int(_check(driver.cuCtxGetCurrent())) == 0:  # this is the thread's first CUDA call
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(device_index))))


load_hooks: list[Callable[[str], None]] = []
"""Called with the name of each kernel before it is loaded. A hook that raises prevents the load."""


@functools.cache
def _function(variant: NativeVariant, device_index: int) -> Any:
    """Load a variant. Modules are never unloaded, because graphs reference their kernels."""
    for hook in tuple(load_hooks):
        hook(variant.entry)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device_index))
    cubin = _cached_cubin(variant, arch)
    with _relaxed_capture():
        module = _check(driver.cuModuleLoadData(cubin))
        function = _check(driver.cuModuleGetFunction(module, variant.entry.encode()))
        attributes = driver.CUfunction_attribute
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, variant.shared_bytes),
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, variant.carveout),
        ):
            _check(driver.cuFuncSetAttribute(function, attribute, value))
    return function


def _cached_cubin(variant: NativeVariant, arch: str) -> bytes:
    digest = hashlib.sha256(repr((variant, arch, _OPTIONS, _compiler_version())).encode())
    for path in sorted(_FOLDER.glob("*.cu*")):
        digest.update(path.read_bytes())
    cache, name = get_cache_manager(digest.hexdigest()), f"{variant.entry}.cubin"
    found = cache.get_file(name)
    if found is not None:
        return Path(found).read_bytes()
    cubin, _ = compile_variant(variant, arch)
    compiled.append(variant.entry)
    cache.put(cubin, name)
    return cubin


def _compiler_version() -> tuple[int, int]:
    """Return the version of NVRTC. Raises: ConfigError: if the library, which the first call loads, is missing."""
    try:
        result = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise ConfigError(
            f"nvrtc: NVIDIA's run-time compiler is missing ({error}); run pip install nvidia-cuda-nvrtc"
        ) from error
    major, minor = _check(result)
    return major, minor


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Allow module loads during a capture. They use no stream, but require relaxed capture mode in this thread."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    outer = _check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(outer))


def _check(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise GraphRTError(
            f"CUDA: a call returned {result[0].name}; the traceback shows the call, but an earlier kernel may have "
            f"caused the error; rerun with CUDA_LAUNCH_BLOCKING=1 to find it"
        )
    if len(result) <= 2:
        return result[1] if len(result) == 2 else None
    return result[1:]
