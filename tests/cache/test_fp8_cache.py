"""The toy runtime over an fp8 cache, with keys and values that fp8 can represent, so that results are exact."""

from __future__ import annotations

import pytest
import torch

from graphrt.batch import Batch
from graphrt.cache.kv_cache import KVCache
from graphrt.kernels.errors import ConfigError, ReplayError
from graphrt.kernels.types import KVLayout
from graphrt.spec import KVCacheSpec
from tests.support.replay_scenarios import step_both_ways
from tests.support.toy import HEAD_DIM, KV_HEADS, LAYERS, Rig, ToyModel, make_rig

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
K_SCALES = [[0.25, 3.0], [1.0, 0.37]]
V_SCALES = [[0.02, 1.0], [0.7, 5.0]]
PROMPTS = ([3, 1, 4, 1, 5, 9], [2, 7], [1, 8, 2, 8])


class RepresentableModel(ToyModel):
    """Rounds keys and values to scale times fp8 numbers."""

    def __init__(self, device: torch.device, kv_dtype: torch.dtype) -> None:
        super().__init__(device, torch.float32)
        self.kv_dtype = kv_dtype
        self.k_scales = torch.tensor(K_SCALES, device=device)
        self.v_scales = torch.tensor(V_SCALES, device=device)

    def project(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = super().project(layer, x)
        return q, self.rounded(k, self.k_scales[layer]), self.rounded(v, self.v_scales[layer])

    def rounded(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(self.kv_dtype).max
        return (x / scale[:, None]).clamp(-limit, limit).to(self.kv_dtype).float() * scale[:, None]


def fill_scales(rig: Rig) -> None:
    cache = rig.manager.kv_cache
    for layer in range(LAYERS):
        cache.k_scales[layer].copy_(torch.tensor(K_SCALES[layer]))
        cache.v_scales[layer].copy_(torch.tensor(V_SCALES[layer]))


def logits(rig: Rig, steps: int = 6) -> torch.Tensor:
    """Logits of a prefill and some decode steps."""
    sequences = [rig.start(i, list(p)) for i, p in enumerate(PROMPTS)]
    found = []
    for _ in range(steps):
        handle = rig.manager.replay(Batch.from_requests([rig.row(s) for s in sequences]))
        found.append(handle.logits(copy=True).clone())
        for sequence, token in zip(sequences, handle.tokens().tolist(), strict=True):
            sequence.tokens.append(token)
    return torch.stack(found)


@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda x: x.value)
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_cache_equals_a_wide_cache(device: torch.device, kv_dtype: torch.dtype, layout: KVLayout) -> None:
    """Scales are filled in after the capture: graphs read them in every replay."""
    rig = make_rig(device, model=RepresentableModel(device, kv_dtype), kv_dtype=kv_dtype, layout=layout)
    fill_scales(rig)
    wide = make_rig(device, model=RepresentableModel(device, kv_dtype), layout=layout)
    assert rig.manager.kv_cache.k[0].dtype == kv_dtype
    assert 4 * rig.manager.kv_cache.nbytes == wide.manager.kv_cache.nbytes
    actual, expected = logits(rig), logits(wide)
    assert rig.manager.stats().eager_steps == wide.manager.stats().eager_steps
    assert (actual - expected).abs().max() < 2e-4


def test_replay_over_fp8_equals_eager(device: torch.device) -> None:
    rig = make_rig(device, kv_dtype=E4M3)
    sequences = [rig.start(i, list(p)) for i, p in enumerate(PROMPTS)]
    for _ in range(4):
        tokens, _ = step_both_ways(rig, Batch.from_requests([rig.row(s) for s in sequences]))
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.tokens.append(token)


def test_values_beyond_the_range_saturate(device: torch.device) -> None:
    """A scale that is far too small loses accuracy, but gives no infinity and no NaN."""
    rig = make_rig(device, kv_dtype=E5M2, fill=0.0)
    for scale in (*rig.manager.kv_cache.k_scales, *rig.manager.kv_cache.v_scales):
        scale.fill_(1e-7)
    assert bool(logits(rig, steps=2).isfinite().all())
    assert float(rig.manager.kv_cache.k[0].float().max()) == torch.finfo(E5M2).max


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_capture_raises_for_scales_of_zero(name: str, wrong: float) -> None:
    """Zeros, as in a buffer that was never filled, would lose all keys."""
    scales = {n: [torch.ones(KV_HEADS) for _ in range(LAYERS)] for n in ("k_scales", "v_scales")}
    scales[name][1][1] = wrong
    spec = KVCacheSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, dtype=E4M3)
    k, v = ([torch.zeros(9, 4, KV_HEADS, HEAD_DIM, dtype=E4M3) for _ in range(LAYERS)] for _ in "kv")
    cache = KVCache(spec, k, v, **scales)
    with pytest.raises(ConfigError, match=rf"kv_cache.{name}\[1\]: expected finite numbers other than 0, got {wrong}"):
        cache.check_contents()
    scales[name][1].fill_(-0.5)
    cache.check_contents()
    rig = make_rig(torch.device("cpu"), kv_dtype=E4M3, capture=False)
    rig.manager.kv_cache.k_scales[0].zero_()
    with pytest.raises(ConfigError, match=r"k_scales\[0\]: expected finite numbers other than 0, got 0.0"):
        rig.manager.capture()
    rig.manager.kv_cache.k_scales[0].fill_(1.0)
    rig.manager.capture()


def test_moved_scale_raises(device: torch.device) -> None:
    rig = make_rig(device, kv_dtype=E4M3)
    scale = rig.manager.kv_cache.v_scales[1]
    scale.data = torch.ones(KV_HEADS, device=device)
    with pytest.raises(ReplayError, match=r"kv_cache.v_scales\[1\]: expected at address"):
        rig.manager.replay(Batch.from_requests([rig.row(rig.start(0, [1]))]))
