"""Checks of captured CUDA graphs: `audit` checks the memory that a graph addresses, `verify` checks its results.

`verify_runtime` is imported on first use, because the other checks do not need the runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphrt.capture.inspect.audit import audit, memory_of
from graphrt.capture.inspect.findings import Audit
from graphrt.capture.inspect.kept import kept_graphs
from graphrt.testing.verify import Subject, VerifyReport, verify

if TYPE_CHECKING:
    from graphrt.testing.verify.runtime import verify_runtime

__all__ = ["Audit", "Subject", "VerifyReport", "audit", "kept_graphs", "memory_of", "verify", "verify_runtime"]


def __getattr__(name: str) -> Any:
    if name == "verify_runtime":
        from graphrt.testing.verify.runtime import verify_runtime

        return verify_runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
