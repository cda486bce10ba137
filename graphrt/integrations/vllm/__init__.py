"""vLLM plugin: `pip install` registers graphrt's kernels as the attention backend CUSTOM.

`register` is the entry point of the group `vllm.general_plugins`, which vLLM calls in every process. It imports
neither torch nor vLLM's kernels.
"""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import version

SUPPORTED_VERSIONS = ((0, 26), (0, 33))
"""First and last supported minor version of vLLM. scripts/check_vllm_interface.py compares a version's interface."""

_BACKEND = "graphrt.integrations.vllm.backend.GraphrtBackend"


def register() -> None:
    """Register the attention backend CUSTOM with vLLM, or log a warning if this version of vLLM is not supported."""
    found = version("vllm")
    minor = tuple(int(part) for part in found.split(".")[:2])
    oldest, newest = (".".join(map(str, bound)) for bound in SUPPORTED_VERSIONS)
    if not SUPPORTED_VERSIONS[0] <= minor <= SUPPORTED_VERSIONS[1]:
        logging.getLogger("vllm.graphrt").warning(
            "graphrt supports vLLM %s to %s, got %s; the attention backend CUSTOM is not registered",
            oldest,
            newest,
            found,
        )
        return
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, _BACKEND)
