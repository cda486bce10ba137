"""The environment variables of graphrt, listed in docs/env.md. No other file of the library reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

from graphrt.kernels.errors import ConfigError


def backend() -> str | None:
    """GRAPHRT_BACKEND: name of the attention backend where a configuration names none; None when unset."""
    name = os.environ.get("GRAPHRT_BACKEND")
    if name is not None and not name.isidentifier():
        raise ConfigError(
            f"GRAPHRT_BACKEND: expected the name of a backend, got {name!r}; `graphrt env` lists them, "
            "unset it to have one chosen"
        )
    return name


def cache_dir() -> Path:
    """GRAPHRT_CACHE: folder for what may be kept between processes; by default `graphrt` in the user's cache folder.

    The folder is not created here.
    """
    folder = os.environ.get("GRAPHRT_CACHE")
    try:
        if folder is None:
            # The XDG specification: an empty or relative value counts as unset.
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            return (base if base.is_absolute() else Path.home() / ".cache") / "graphrt"
        path = Path(folder).expanduser().absolute()
        good = bool(folder) and (not path.exists() or path.is_dir())  # in this order: others may create it meanwhile
    except (OSError, RuntimeError) as error:  # a name too long, no permission, no such user, no home
        raise ConfigError(f"GRAPHRT_CACHE: expected a folder, got {folder!r} ({error}); name a folder") from error
    if not good:
        raise ConfigError(f"GRAPHRT_CACHE: expected a folder, got {folder!r}; name a folder, or unset it")
    return path


def debug() -> bool:
    """GRAPHRT_DEBUG: 1 has every step checked in full, and late kernels and memory raise; 0 and unset do not."""
    value = os.environ.get("GRAPHRT_DEBUG", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"GRAPHRT_DEBUG: expected 0 or 1, got {value!r}; set it to 1, or unset it")
    return value == "1"
