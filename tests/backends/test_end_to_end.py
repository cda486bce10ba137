"""The toy runtime with each peer by name: replay is eager bitwise, and as near to float64 as with our own kernels."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt.backends.registry import backend_class
from graphrt.batch import Batch
from graphrt.kernels.types import KVLayout
from tests.runtime.test_replay import prompts, step_both_ways
from tests.runtime.toy import Rig, make_rig

PEERS = ("flash_attn2", "flash_attn3", "flashinfer")
CUDA = torch.device("cuda", 0)


def rig_of(backend: str, page_size: int, layout: KVLayout) -> Rig:
    sizes = {"max_num_tokens": 64, "mixed_sizes": (16, 64)}
    cache = {"page_size": page_size, "layout": layout}
    return make_rig(CUDA, dtype=torch.bfloat16, head_dim=128, backend=backend, **cache, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda x: x.value)
@pytest.mark.parametrize("name", PEERS)
def test_the_runtime_with_a_peer(name: str, layout: KVLayout) -> None:
    cls = backend_class(name)
    if (missing := cls.unavailable()) is not None:
        pytest.skip(f"backend {name}: {missing}")
    page_size = 256 if cls.capabilities.page_sizes else 16
    peer, ours = rig_of(name, page_size, layout), rig_of("triton", page_size, layout)
    assert peer.manager.stats().backend == name
    rng = random.Random(9)
    texts = prompts(rng, 6, 1, 9)
    worst = {"peer": 0.0, "ours": 0.0}
    lines = [(rig, [rig.start(i, text) for i, text in enumerate(texts)]) for rig in (peer, ours)]
    for rig, sequences in lines:
        rig.prefill(*sequences)
        for sequence, text in zip(sequences, texts, strict=True):  # both are fed the same tokens, whatever they sample
            sequence.tokens[len(text) :] = [int(rig.model.oracle(text).argmax())]
    for live in (6, 1, 3, 5, 2, 4, 6, 6):
        chosen = rng.sample(range(6), live)
        results = {}
        for key, (rig, sequences) in zip(worst, lines, strict=True):
            batch = Batch.from_rows([rig.row(sequences[i]) for i in chosen])
            results[key] = step_both_ways(rig, batch)
        for place, i in enumerate(chosen):
            fed = lines[0][1][i].tokens
            want = peer.model.oracle(fed)
            for key, (_, logits) in results.items():
                worst[key] = max(worst[key], (logits[place].double().cpu() - want).abs().max().item())
            first, second = want.topk(2).values
            if first - second > 4 * max(worst.values()):
                assert results["peer"][0][place] == results["ours"][0][place] == int(want.argmax())
            for _, sequences in lines:
                sequences[i].tokens.append(int(want.argmax()))
    assert worst["peer"] <= 2 * worst["ours"] + 1e-2, worst
    for rig, _ in lines:
        rig.manager.close()
