"""Compile the kernels of the plugin for vLLM for sm_90 without a GPU, then run steps with launches that do nothing.

A process of its own, without the Triton interpreter, as in ahead_program.py. The last line is JSON: the number of
kernels compiled ahead, the launches then, the names of kernels that the steps compiled afterwards, and their launches.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from graphrt.integrations.vllm.schedules import GroupSchedules, LayerInputs, LayerKind, StepShape
from graphrt.kernels import library
from graphrt.kernels.attention.options import AttentionOptions
from graphrt.kernels.compile_ahead import compiled, compiling_ahead, counting_compilations
from tests.support import fake_triton

REQS, TOKENS, PAGE = 40, 512, 16
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CASES = [(64, None, 16), (64, E4M3, 24), (128, E4M3, 9), (264, None, 24)]
"""Head size, dtype of an fp8 cache, and stride of the block table."""


def run(head_dim: int, kv_dtype: torch.dtype | None, table_stride: int, fake: fake_triton.FakeTriton) -> int:
    """Compile all kernels of a kind of layers ahead. Then run steps. Return how many launches were made too early."""
    cpu, kind = torch.device("cpu"), LayerKind(4, 2, head_dim, kv_dtype, 0)
    schedules = GroupSchedules([kind], BF16, PAGE, cpu, max_num_tokens=TOKENS, max_query_len=2)
    cache = torch.empty(1, PAGE, 2, 2 * head_dim, dtype=kv_dtype or BF16)
    scale = None if kv_dtype is None else torch.ones(1)
    inputs = LayerInputs(*cache.split(head_dim, -1), AttentionOptions(head_dim**-0.5, k_scale=scale, v_scale=scale))
    before = len(fake.launches)
    with compiling_ahead(cpu):
        schedules.compile_ahead({kind: inputs}, max_num_reqs=REQS, max_num_tokens=TOKENS, table_stride=table_stride)
    early, num_compiled = len(fake.launches) - before, len(compiled)
    shapes = [
        StepShape(n + prompts, n * query_len + 50 * prompts, n, query_len)
        for n in range(1, REQS)
        for query_len in (1, 2)
        for prompts in (0, 1)
    ]
    if not schedules.serves_prompts:
        shapes = [
            shape if shape.num_reqs == shape.num_decodes else shape._replace(num_decodes=shape.num_reqs, query_len=0)
            for shape in shapes
        ]
    lens, starts = torch.zeros(REQS, dtype=torch.int32), torch.zeros(REQS + 1, dtype=torch.int32)
    table = torch.empty(REQS, table_stride, dtype=torch.int32)
    q = torch.empty(TOKENS, 4, head_dim, dtype=BF16)
    for shape in shapes:
        reqs, tokens = shape.num_reqs, q[: shape.num_tokens]
        schedules.write(shape, lens[:reqs], starts[: reqs + 1])
        schedules.attend(
            kind, shape, tokens, inputs.k_cache, inputs.v_cache, tokens, table[:reqs], lens[:reqs], starts[: reqs + 1],
            inputs.options,
        )  # fmt: skip
    late.extend(compiled[num_compiled:])
    return early


late: list[str] = []


def main() -> None:
    with pytest.MonkeyPatch.context() as patch, fake_triton.installed(patch) as fake, counting_compilations():
        patch.setattr(library, "_cpu_runs_triton", True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda index: None)
        early = sum(run(*case, fake) for case in CASES)
        found = {"ahead": len(compiled) - len(late), "launched": early, "late": late, "ran": len(fake.launches) - early}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # kernels ask the driver to unload them
