"""Runtime: sizing of the cache, and giving everything back."""

from __future__ import annotations

import gc

import pytest
import torch

from graphrt.batch import Batch
from graphrt.config import RuntimeConfig
from graphrt.kernels.errors import CapacityError, ConfigError
from graphrt.kernels.types import KVLayout
from graphrt.runtime import Runtime, resolve_device
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.runtime.toy import HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCAB, ToyModel

MIB = 1 << 20


def build(device: torch.device, *, max_seq_len: int = 64, head_dim: int = HEAD_DIM, **options) -> Runtime:
    dtype = torch.float32
    return Runtime(
        ToyModel(device, dtype, head_dim),
        AttentionSpec(HEADS, KV_HEADS, head_dim, dtype),
        KVCacheSpec(LAYERS, KV_HEADS, head_dim, 16, KVLayout.HND, dtype),
        vocab_size=VOCAB,
        device=device,
        config=RuntimeConfig(max_num_reqs=4, max_num_tokens=16, max_seq_len=max_seq_len),
        **options,
    )


def test_auto_takes_what_the_rows_can_use(device: torch.device) -> None:
    runtime = build(device)
    assert runtime.kv_cache.num_pages == 1 + 4 * 4
    assert runtime.allocator.num_free == 16
    runtime.capture()
    pages = runtime.allocator.allocate(1)
    batch = Batch(row_ids=[0], seq_lens=[1], tokens=[3], page_indptr=[0, 1], page_ids=pages)
    assert int(runtime.replay(batch).tokens()[0]) == int(runtime.manager._program.model.oracle([3]).argmax())
    runtime.close()


def test_a_cache_that_does_not_fit_raises_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphrt.runtime.os.sysconf", lambda name: 2)
    with pytest.raises(CapacityError, match=r"at least 2 pages of 8192 bytes, got \d+ bytes \(free 2, reserved 0"):
        build(torch.device("cpu"))


@pytest.mark.parametrize("value", [0.0, 1.5, -1.0])
def test_memory_utilization_is_a_share(value: float) -> None:
    with pytest.raises(ConfigError, match=r"memory_utilization: expected a share in \(0, 1\], got"):
        build(torch.device("cpu"), memory_utilization=value)


@pytest.mark.parametrize(("name", "text"), [("meta", "got 'meta'"), ("quantum", "quantum"), ("cuda:77", "cuda:77")])
def test_devices_that_are_not_there(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_device(name)


@pytest.mark.gpu
@pytest.mark.alone
def test_auto_predicts_the_free_memory_that_is_left() -> None:
    """A cache bounded by memory, not by use: what is free after capture is what was predicted, within 256 MiB."""
    device = torch.device("cuda", 0)
    build(device).close()
    free, total = torch.cuda.mem_get_info(device)
    runtime = build(device, max_seq_len=1 << 24, head_dim=64, memory_utilization=1 - (free - (6 << 30)) / total)
    runtime.capture()
    plan = runtime.memory_plan
    assert plan.num_pages < 1 + 4 * (1 << 20), "bounded by memory"
    assert plan.kv_bytes > 3 << 30
    assert abs(plan.actual_free - plan.predicted_free) < 256 * MIB, plan
    assert plan.actual_free >= plan.reserved - 256 * MIB, plan
    before = torch.cuda.memory_allocated()
    runtime.close()
    del runtime
    gc.collect()
    assert torch.cuda.memory_allocated() < before - plan.kv_bytes + MIB
