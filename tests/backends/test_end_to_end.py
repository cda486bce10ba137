"""The toy runtime with each wrapped package by name: replay equals eager bitwise, with the accuracy of our kernels."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt.backends.registry import backend_class
from graphrt.batch import Batch
from graphrt.kernels.types import KVLayout
from tests.support.replay_scenarios import prompts, step_both_ways
from tests.support.toy import Rig, make_rig

PEERS = ("flash_attn2", "flash_attn3", "flashinfer")
CUDA = torch.device("cuda", 0)


def rig_of(backend: str, page_size: int, layout: KVLayout, **config: int) -> Rig:
    sizes = {"max_num_tokens": 64, "mixed_sizes": (16, 64), **config}
    cache = {"page_size": page_size, "layout": layout}
    of_one = {"backend": backend, "prefill_backend": "none"}  # its own mixed steps, not those of two parts
    return make_rig(CUDA, dtype=torch.bfloat16, head_dim=128, **of_one, **cache, **sizes)


def run_ahead(rig: Rig, *, busy: bool) -> None:
    """Run steps of several sizes and lengths, first eagerly one by one, then submitted at once to a busy device."""
    rng = random.Random(4)
    sequences = [rig.start(i, text) for i, text in enumerate(prompts(rng, 6, 1, 30))]
    for sequence in sequences:
        rig.prefill(sequence)
    rows = [rig.row(sequence) for sequence in sequences]  # the last token of each; to feed it again changes nothing
    chosen = [rng.sample(range(6), live) for live in (6, 1, 4, 2, 6, 3, 1, 5, 2, 6)]
    batches = [Batch.from_requests([rows[i] for i in each]) for each in chosen]
    wanted = [rig.manager.replay(batch, eager=True).logits(copy=True).cpu() for batch in batches]
    if busy:
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
    got = [rig.manager.replay(batch).logits(copy=True) for batch in batches]
    for number, (have, want) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(have.cpu(), want), f"step {number}, rows {chosen[number]}"
    rig.manager.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", PEERS)
def test_steps_submitted_to_a_busy_device(name: str) -> None:
    """Pinned memory, such as FlashInfer's plan, is not overwritten before its upload."""
    cls = backend_class(name)
    if (missing := cls.unavailable()) is not None:
        pytest.skip(f"backend {name}: {missing}")
    run_ahead(rig_of(name, 256 if cls.capabilities.page_sizes else 16, KVLayout.NHD, ring_depth=12), busy=True)


def test_steps_submitted_at_once_on_cpu() -> None:
    run_ahead(make_rig(torch.device("cpu"), ring_depth=12), busy=False)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda x: x.value)
@pytest.mark.parametrize("name", PEERS)
def test_runtime_with_a_wrapped_package(name: str, layout: KVLayout) -> None:
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
            batch = Batch.from_requests([rig.row(sequences[i]) for i in chosen])
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
