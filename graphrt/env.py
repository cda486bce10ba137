"""The environment variables of graphrt, documented in docs/env.md. No other file reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

from graphrt.kernels.errors import ConfigError


def backend() -> str | None:
    """Return GRAPHRT_BACKEND, the attention backend for configs that specify none; None if unset."""
    name = os.environ.get("GRAPHRT_BACKEND")
    if name is not None and not name.isidentifier():
        raise ConfigError(
            f"GRAPHRT_BACKEND: expected the name of a backend, got {name!r}; pass a name that `graphrt env` lists, "
            f"or unset the variable"
        )
    return name


def cache_dir() -> Path:
    """Return GRAPHRT_CACHE, the folder for files kept between processes; `graphrt` in the user's cache by default.

    Does not create the folder.
    """
    folder = os.environ.get("GRAPHRT_CACHE")
    try:
        if folder is None:
            # By the XDG specification, an empty or relative value counts as unset.
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            return (base if base.is_absolute() else Path.home() / ".cache") / "graphrt"
        path = Path(folder).expanduser().absolute()
        good = bool(folder) and (not path.exists() or path.is_dir())  # exists() first, as another process may create it
    except (OSError, RuntimeError) as error:  # name too long, no permission, no such user, no home
        raise ConfigError(f"GRAPHRT_CACHE: expected a folder, got {folder!r} ({error}); specify a folder") from error
    if not good:
        raise ConfigError(f"GRAPHRT_CACHE: expected a folder, got {folder!r}; specify a folder, or unset the variable")
    return path


def debug() -> bool:
    """Return whether GRAPHRT_DEBUG is 1. Every step is then checked in full, and memory growth and kernels loaded after
    capture raise errors."""
    value = os.environ.get("GRAPHRT_DEBUG", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"GRAPHRT_DEBUG: expected 0 or 1, got {value!r}; set it to 1, or unset the variable")
    return value == "1"


def linear_plans() -> Path | None:
    """Return GRAPHRT_LINEAR_PLANS, the file with plans of matrix products for this device; None if unset."""
    name = os.environ.get("GRAPHRT_LINEAR_PLANS")
    if name is None:
        return None
    try:
        path = Path(name).expanduser().absolute()
        good = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"GRAPHRT_LINEAR_PLANS: expected a file, got {name!r} ({error}); specify a file") from error
    if not good:
        raise ConfigError(f"GRAPHRT_LINEAR_PLANS: expected a file, got {name!r}; specify a file, or unset the variable")
    return path


def set_nccl_defaults() -> None:
    """Set NCCL_GRAPH_MIXING_SUPPORT to 0, NCCL_NVLS_ENABLE to 0 and TORCH_SYMM_MEM_DISABLE_MULTICAST to 1 if unset.

    NCCL reads them when a group first exchanges CUDA tensors. With graph mixing, captured collectives record events,
    which a loop of steps cannot contain. The other two variables disable NVLink multicast.
    """
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
