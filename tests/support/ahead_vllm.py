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

REQS, PAGE, HEAD_DIM = 40, 16, 64


def main() -> None:
    cpu = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch, fake_triton.installed(patch) as fake:
        patch.setattr(library, "_cpu_runs_triton", True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda index: None)
        kind = LayerKind(4, 2, HEAD_DIM, None, 0)
        schedules = GroupSchedules([kind], torch.bfloat16, PAGE, cpu, max_num_tokens=256, max_query_len=2)
        cache = torch.empty(1, PAGE, 2, 2 * HEAD_DIM, dtype=torch.bfloat16)
        inputs = LayerInputs(*cache.split(HEAD_DIM, -1), AttentionOptions(HEAD_DIM**-0.5))
        lens, starts = torch.zeros(REQS, dtype=torch.int32), torch.zeros(REQS + 1, dtype=torch.int32)
        table = torch.zeros(REQS, 16, dtype=torch.int32)
        q = torch.empty(256, 4, HEAD_DIM, dtype=torch.bfloat16)
        with counting_compilations():
            with compiling_ahead(cpu):
                schedules.compile_ahead({kind: inputs}, REQS)
            ahead, launches = len(compiled), len(fake.launches)
            for decodes in range(REQS):
                for query_len in (1, 2):
                    tokens = decodes * query_len + 50
                    shape = StepShape(decodes + 1, tokens, decodes, query_len)
                    reqs = decodes + 1
                    schedules.write(shape, lens[:reqs], starts[: reqs + 1])
                    schedules.attend(
                        kind, shape, q[:tokens], inputs.k_cache, inputs.v_cache, q[:tokens], table[:reqs],
                        lens[:reqs], starts[: reqs + 1], inputs.options,
                    )  # fmt: skip
        late, ran = compiled[ahead:], len(fake.launches) - launches
        print(json.dumps({"ahead": ahead, "launched": launches, "late": late, "ran": ran}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # kernels ask the driver to unload them
