"""The environment report: versions, devices and variables, as `graphrt env` prints them and benchmarks record them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import graphrt
from graphrt import env
from graphrt.kernels.errors import ConfigError

PACKAGES = ("torch", "triton", "numpy", "cuda-bindings", "rich", "typer")
OPTIONAL_PACKAGES = (
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "flash-attn",
    "tokenspeed-fa3",
    "flashinfer-python",
    "matplotlib",
)


def environment_report() -> dict[str, Any]:
    """What this process runs on. Missing packages, devices and drivers are None or empty, never errors.

    The values are strings, numbers, None, and lists and dicts of these, so that the report is JSON as it is.
    """
    return {
        "graphrt": graphrt.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in (*PACKAGES, *OPTIONAL_PACKAGES)},
        "cuda": _torch_cuda_version(),
        "driver": driver_version(),
        "gpus": _gpus(),
        "variables": {
            "GRAPHRT_BACKEND": _variable(env.backend),
            "GRAPHRT_CACHE": _variable(env.cache_dir),
        },
    }


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The version of the NVIDIA driver, or None where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # present but without a device it exits with an error
        return None
    return result.stdout.split("\n", 1)[0].strip() or None


def _torch_cuda_version() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def _gpus() -> list[dict[str, Any]]:
    try:
        import torch
    except ImportError:
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "l2_bytes": properties.L2_cache_size,
            }
        )
    return gpus


def _variable(read: Callable[[], object]) -> str | bool | None:
    """The value in force; a malformed one is reported, since a report is asked for when something is wrong."""
    try:
        value = read()
    except ConfigError as error:
        return f"invalid: {error}"
    return value if value is None or isinstance(value, bool) else str(value)
