"""Fake implementations of operators return the shapes, dtypes and strides of the real ones."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch

import graphrt.kernels
from graphrt.kernels.ops.activation import silu_mul
from graphrt.kernels.ops.norm import add_rms_norm, rms_norm
from graphrt.kernels.ops.sampling import sample

BF16 = torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


CALLS: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "graphrt::sample": (sample, [zeros(3, 8), zeros(3).float(), zeros(3).long(), zeros(3).int()]),
    "graphrt::rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), [zeros(3, 8), zeros(8)]),
    "graphrt::add_rms_norm": (
        lambda r, x, w: add_rms_norm(r, x, w, 1e-5),
        [zeros(3, 8).float(), zeros(3, 8), zeros(8)],
    ),
    "graphrt::silu_mul": (silu_mul, [zeros(3, 8)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_fake_result_matches_the_real_one(name: str) -> None:
    call, arguments = CALLS[name]
    real, fake = call(*arguments), call(*(tensor.to("meta") for tensor in arguments))
    assert fake.device.type == "meta"
    assert (fake.dtype, fake.shape, fake.stride()) == (real.dtype, real.shape, real.stride())


def test_all_operators_with_results_are_tested() -> None:
    for module in pkgutil.walk_packages(graphrt.kernels.__path__, "graphrt.kernels."):
        importlib.import_module(module.name)
    every = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("graphrt::")]
    assert {schema.name for schema in every if schema.returns} == set(CALLS)
    assert len(every) > len(CALLS)
