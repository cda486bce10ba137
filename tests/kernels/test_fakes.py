"""Fake implementations of operators return the shapes, dtypes and strides of the real ones."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

import graphrt.kernels
from graphrt.kernels.ops.activation import silu_mul
from graphrt.kernels.ops.collectives import VocabShards, all_gather, all_to_all
from graphrt.kernels.ops.norm import add_rms_norm, rms_norm
from graphrt.kernels.ops.rejection import kept_logprobs
from graphrt.kernels.ops.sampling import Truncation, sample
from graphrt.kernels.ops.sampling_shards import sample_shards

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.fixture(autouse=True, scope="module")
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def sample_of_one(*draws: torch.Tensor) -> torch.Tensor:
    truncation = Truncation(*(zeros(3, dtype=dtype).to(draws[0].device) for dtype in (I32, F32, F32)))
    return sample_shards(*draws, shards=VocabShards(8, group()), req_indices=zeros(3, dtype=I32), truncation=truncation)


DRAWS = [zeros(3, 8), zeros(3).float(), zeros(3).long(), zeros(3).int()]
CALLS: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "graphrt::sample": (sample, DRAWS),
    "graphrt::sample_shards": (sample_of_one, DRAWS),
    "graphrt::kept_logprobs": (kept_logprobs, DRAWS),
    "graphrt::all_gather": (lambda x: all_gather(x, group()), [zeros(3, 8)]),
    "graphrt::all_to_all": (lambda x: all_to_all(x, group()), [zeros(1, 3, 8)]),
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
