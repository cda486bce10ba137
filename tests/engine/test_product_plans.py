"""Plans of matrix products with few tokens: `Stats.products`, and plans of the user's own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graphrt.config import RuntimeConfig
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.ops.linear_call import End, LinearPlan
from graphrt.kernels.ops.linear_plans import linear_plan, use_plans
from graphrt.runtime import Runtime
from graphrt.spec import AttentionSpec, KVCacheSpec

CPU = torch.device("cpu")


def runtime_of(dtype: torch.dtype) -> Runtime:
    return Runtime(
        torch.nn.Identity(), AttentionSpec(2, 1, 16, dtype), KVCacheSpec(1, 1, 16, 4, dtype=dtype), vocab_size=8,
        device="cpu", num_pages=9, config=RuntimeConfig(4, 16, 32),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_stats_say_which_products_the_kernel_computes(dtype: torch.dtype) -> None:
    with runtime_of(dtype) as runtime:
        said = runtime.stats().products
    if dtype is torch.bfloat16:
        assert said == "reference on a CPU, with the plans of NVIDIA H200"
    else:
        assert said.startswith(f"PyTorch, or Triton for quantized weights: {dtype} activations; load the model with")


def test_plans_of_a_file_replace_those_of_its_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size, own = (1, 16, End.ADD, 4096, 4096, 0, 0), LinearPlan(1, 2, 1, False)
    shipped = linear_plan(CPU, *size)
    assert shipped not in (None, own)
    file = tmp_path / "plans.json"
    file.write_text(json.dumps({"NVIDIA H200": [[1, 16, "ADD", 4096, 4096, own.ints]], "NVIDIA Z1": []}))
    try:
        monkeypatch.setenv("GRAPHRT_LINEAR_PLANS", str(file))
        runtime_of(torch.bfloat16).close()
        assert linear_plan(CPU, *size) == own
        assert linear_plan(CPU, 1, 16, End.PLAIN, 4096, 4096, 0, 0) is None
        for text in (
            "{",
            "[]",
            '{"A": [1]}',
            '{"A": [[1, 16, "SUM", 8, 64, null]]}',
            '{"A": [[1, 16, "ADD", 8, 64, 1]]}',
        ):
            broken = tmp_path / "broken.json"
            broken.write_text(text)
            monkeypatch.setenv("GRAPHRT_LINEAR_PLANS", str(broken))
            with pytest.raises(ConfigError, match=r"^plans of products: '.*broken\.json' cannot be read"):
                runtime_of(torch.bfloat16)
            assert linear_plan(CPU, *size) == own
        monkeypatch.delenv("GRAPHRT_LINEAR_PLANS")
        runtime_of(torch.bfloat16).close()
        assert linear_plan(CPU, *size) == shipped
    finally:
        use_plans(None)
