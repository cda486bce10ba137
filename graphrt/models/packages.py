"""Import optional packages that only models need."""

from __future__ import annotations

import importlib
from typing import Any

from graphrt.kernels.errors import ConfigError

INSTALL = 'pip install "graphrt[models]"'


def require(module: str, purpose: str) -> Any:
    """Import `module`, or raise ConfigError with the pip command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module}: the package is needed {purpose} ({error}); run {INSTALL}") from error
