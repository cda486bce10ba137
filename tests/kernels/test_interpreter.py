"""An interpreted launch restores its changes of Triton's language."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from graphrt.kernels.interpreter import install
from graphrt.kernels.library import INTERPRETER_AVAILABLE

pytestmark = pytest.mark.skipif(not INTERPRETER_AVAILABLE, reason="compiled kernels change nothing of Triton")
PRINTED = ("__repr__", "__annotations__")


@triton.jit
def _within(x):
    return tl.max(x, 0) + tl.sum(x, 0)  # functions of Triton, which the interpreter patches too


@triton.jit
def _kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, _within(tl.load(x_ptr + tl.arange(0, N))))


def language() -> dict[tuple[str, str], object]:
    """Return everything that an interpreted launch may change, by name, except how tensors are printed."""
    owners = {"tl": tl, "core": tl.core, "tensor": tl.core.tensor, "math": tl.math}
    return {
        (owner, name): value for owner, at in owners.items() for name, value in vars(at).items() if name not in PRINTED
    }


def test_a_launch_restores_the_language() -> None:
    """This includes changes for functions that the kernel calls; otherwise the process could not compile kernels."""
    install()
    before, x, out = language(), torch.arange(8.0), torch.zeros(1)
    for _ in range(2):
        _kernel[(1,)](x, out, N=8)
    assert out.item() == 7 + 28
    after = language()
    assert [name for name in after if after[name] is not before.get(name)] == []
    assert before.keys() == after.keys()
