"""CUDA C++ kernels compiled at run time: only what Triton cannot say, such as clusters of blocks.

A variant is a source of this folder and its compile-time macros. Compiled variants are kept in Triton's cache.
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

from graphrt.kernels.errors import ConfigError, GraphRTError

_FOLDER = Path(__file__).resolve().parent
_MIN_CAPABILITY = (9, 0)  # clusters, programmatic dependent launch
_OPTIONS = ("--std=c++17", "--ptxas-options=-v")

MIN_SHARED_BYTES = 227 << 10
"""Shared memory per block that plans count on: sm_90 and sm_100 have it, sm_120 does not."""


@dataclass(frozen=True, slots=True)
class NativeVariant:
    """One variant of a kernel.

    source        file of this folder; the .cuh files beside it can be included
    entry         name of the kernel, extern "C"
    macros        compile-time macros in order of name
    num_threads   per block
    shared_bytes  dynamic shared memory per block
    cluster       blocks of a cluster, along the second dimension of the grid
    arch_specific its instructions belong to one compute capability alone, as those of sm_90a do
    """

    source: str
    entry: str
    macros: tuple[tuple[str, int], ...]
    num_threads: int
    shared_bytes: int
    cluster: int = 1
    arch_specific: bool = False


def runs_native(device: torch.device) -> bool:
    """Whether the kernels of this folder run on `device`: compute capability 9.0 or newer, 227 KB of shared memory."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return False
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    shared = int(_check(driver.cuDeviceGetAttribute(attribute, _check(driver.cuDeviceGet(_index(device))))))
    return shared >= MIN_SHARED_BYTES


def nvrtc_fault() -> str | None:
    """Why nothing can be compiled in this process, or None."""
    try:
        _compiler_version()
    except ConfigError as error:
        return str(error)
    return None


def compile_variant(variant: NativeVariant, arch: str = "sm_90") -> tuple[bytes, str]:
    """The cubin of a variant, and what the assembler says about registers and spills. Needs no GPU.

    arch   compute capability; of a variant that is `arch_specific` it gets the letter that says so

    Raises: ConfigError without the NVRTC library; GraphRTError, with the compiler's log, for a source that is wrong.
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
            raise GraphRTError(
                f"{variant.source}: expected a source that compiles for {arch}, got {text_of_log}; report this"
            )
        cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin), text_of_log


# The CPU build of torch lacks it, and needs it not.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""The handle of the stream that is current on a device, in the calling thread, by the device's index."""


def launch(
    variant: NativeVariant,
    grid: tuple[int, int],
    params: ctypes.Structure | ctypes.Array[Any],
    device: torch.device,
    *,
    pdl: bool = False,
) -> None:
    """Launch on the current stream of `device`, the parameters being one struct.

    Capture-safe: a variant that is met for the first time in a capture is loaded in a relaxed mode.

    Raises: as `compile_variant`; GraphRTError where the driver refuses.
    """
    index = _index(device)
    config = _config(variant, grid, raw_stream(index), pdl)
    with contextlib.nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index):
        function = load(variant, index)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0))


@functools.lru_cache(maxsize=1024)
def _config(variant: NativeVariant, grid: tuple[int, int], stream: int, pdl: bool) -> Any:
    """How a launch is made. Each layer of a step makes the same one."""
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
    """The variant's function on the current device, for launches and graph nodes; it stays loaded.

    Capture-safe, and raises, as `launch`.
    """
    ensure_context(device_index)
    return _function(variant, device_index)


def ensure_context(device_index: int) -> None:
    """Give the calling thread the context that torch uses on the current device, unless it has one."""
    if int(_check(driver.cuCtxGetCurrent())) == 0:  # a thread whose first CUDA call this is
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(device_index))))


load_hooks: list[Callable[[str], None]] = []
"""Each is called with the name of a kernel that is about to be loaded. What it raises refuses the kernel."""


@functools.cache
def _function(variant: NativeVariant, device_index: int) -> Any:
    """Modules stay loaded: graphs hold their kernels."""
    for hook in tuple(load_hooks):
        hook(variant.entry)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device_index))
    cubin = _cached_cubin(variant, arch)
    with _relaxed_capture():
        module = _check(driver.cuModuleLoadData(cubin))
        function = _check(driver.cuModuleGetFunction(module, variant.entry.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, attribute, variant.shared_bytes))
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
    cache.put(cubin, name)
    return cubin


def _compiler_version() -> tuple[int, int]:
    """Raises: ConfigError where the library, which the first call loads, is missing."""
    try:
        result = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise ConfigError(
            f"nvrtc: expected NVIDIA's run-time compiler, got none ({error}); run pip install nvidia-cuda-nvrtc"
        ) from error
    major, minor = _check(result)
    return major, minor


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Loading a module touches no stream, but while one captures, only a relaxed mode of this thread allows it."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    outer = _check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(outer))


def _check(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise GraphRTError(f"cuda: expected success, got {result[0]!r}; the call's inputs or the device are at fault")
    if len(result) <= 2:
        return result[1] if len(result) == 2 else None
    return result[1:]
