"""Compile the kernels of a step for sm_90 without a GPU, run the step with launches that do nothing, and print both.

A process of its own, without the Triton interpreter. The step runs on CPU tensors; a fake driver replaces the device.
The last line is JSON: the number of kernels compiled ahead, the number of launches then, and the names of kernels that
the step compiled afterwards, the launches that this took, and packages that take seconds to import.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace

import pytest
import torch

import graphrt.backends.triton as triton_backend
from graphrt.cache.kv_cache import KVCache
from graphrt.config import RuntimeConfig
from graphrt.draft_model import DraftModel
from graphrt.engine.ahead import compile_ahead
from graphrt.kernels import library
from graphrt.kernels.compile_ahead import compiled, counting_compilations
from graphrt.kernels.types import KVLayout
from graphrt.models.loading import load_model
from graphrt.replay import ReplayManager
from tests.support import fake_triton
from tests.support.cli import TINY


def main() -> None:
    with pytest.MonkeyPatch.context() as patch, fake_triton.installed(patch) as fake:
        patch.setattr(library, "_cpu_runs_triton", True)
        patch.setattr(triton_backend, "INTERPRETER_AVAILABLE", True)
        patch.setattr(triton_backend, "kernels_on", lambda device: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda index: None)
        model = load_model(TINY, device="cpu", dtype=torch.bfloat16).model
        config = RuntimeConfig(
            max_num_reqs=4, max_num_tokens=32, max_seq_len=64, decode_sizes=(4,), mixed_sizes=(32,), max_logprobs=2,
            penalties=True, backend="triton", num_speculative_tokens=2, rejection_sampling=True,
        )  # fmt: skip
        shape = replace(TINY, hidden_size=64)
        draft = DraftModel(
            load_model(shape, device="cpu", dtype=torch.bfloat16).model, shape.attention_specs(torch.bfloat16),
            vocab_size=shape.vocab_size,
        )  # fmt: skip
        groups = draft.kv_groups(TINY.kv_groups(16, KVLayout.NHD, torch.bfloat16))
        cache = KVCache.allocate(groups, (8, 8), torch.device("cpu"))
        specs = TINY.attention_specs(torch.bfloat16)
        manager = ReplayManager(model, cache, specs, vocab_size=TINY.vocab_size, config=config, proposer=draft)
        manager._backend.allocate()
        sizes = manager.descriptors
        with torch.inference_mode(), counting_compilations():
            compile_ahead(manager._program, sizes)
            ahead, launches = len(compiled), len(fake.launches)
            for size in sizes:
                manager._program.run(size)
        late, ran = compiled[ahead:], len(fake.launches) - launches
        slow = sorted({"torch._dynamo", "transformers", "sympy"} & sys.modules.keys())
        print(json.dumps({"ahead": ahead, "launched": launches, "late": late, "ran": ran, "slow": slow}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # kernels ask the driver to unload them
