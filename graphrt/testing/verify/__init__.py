"""Verify a step that is captured as a CUDA graph. Eager, padded and replayed runs must agree after any history.

    report = verify(step, make_inputs)              # step(**inputs) -> tensors; make_inputs(case) -> inputs
    report.raise_if_any()

`step` is a function of tensors or a `Subject`, which is an object with static buffers, host code that fills them, and
a body to capture. On CUDA, the body is captured as a graph. On a CPU, it is captured as an op trace, which freezes
numbers and addresses in the same way. The package does not use graphrt's runtime, except for `verify_runtime` in
`graphrt.testing.verify.runtime`, which verifies a captured `ReplayManager`.
"""

from __future__ import annotations

from graphrt.testing.verify.api import verify
from graphrt.testing.verify.compare import Difference
from graphrt.testing.verify.report import VerifyFinding, VerifyReport
from graphrt.testing.verify.subject import Inputs, Subject

__all__ = ["Difference", "Inputs", "Subject", "VerifyFinding", "VerifyReport", "verify"]
