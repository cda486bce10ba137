"""All default capture sizes on a GPU in bfloat16: bitwise equal to eager steps, and within the float64 bound."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import GraphKind, default_decode_sizes
from tests.support.replay_scenarios import step_both_ways
from tests.support.toy import LAYERS, MAX_LEN, VOCAB, ToyModel, make_rig

pytestmark = pytest.mark.gpu

ROWS = 256


def plain_bf16(model: ToyModel, tokens: list[int]) -> torch.Tensor:
    """The oracle's computation in plain torch bfloat16 on the device. Its error sets the bound."""
    ids = torch.tensor(tokens, device=model.embed.device)
    x = model.embed[ids] + model.where[: len(tokens)]
    for layer in range(LAYERS):
        q, k, v = (t.transpose(0, 1) for t in model.project(layer, x))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=ids.device).tril()
        scores = (q @ k.transpose(1, 2) * model.head_dim**-0.5).masked_fill(~mask, float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ model.out[layer].t()
    return x[-1] @ model.embed.t()


def test_every_default_capture_size() -> None:
    rig = make_rig(
        torch.device("cuda", 0), dtype=torch.bfloat16, page_size=16, head_dim=64, num_pages=1 + ROWS * 4,
        max_num_reqs=ROWS, max_num_tokens=2048, decode_sizes=None, mixed_sizes=None,
    )  # fmt: skip
    rng = random.Random(1)
    sequences = [rig.start(i, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 31))]) for i in range(ROWS)]
    for first in range(0, ROWS, 64):
        rig.prefill(*sequences[first : first + 64])
    sizes = default_decode_sizes(ROWS)
    errors, plain_errors = [], []
    order = [*reversed(range(len(sizes))), *range(len(sizes))]
    for turn, index in enumerate(order):
        low = sizes[index - 1] + 1 if index else 1
        live = sizes[index] if turn % 3 == 0 else rng.randint(low, sizes[index])
        candidates = [s for s in sequences if s.cached < MAX_LEN - 1]
        chosen = rng.sample(candidates, min(live, len(candidates)))
        tokens, logits = step_both_ways(rig, Batch.from_requests([rig.row(s) for s in chosen]))
        for sequence, token in zip(chosen, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
        probe = chosen[-1]
        exact = rig.model.oracle(probe.tokens[:-1])
        errors.append((logits[-1].double().cpu() - exact).abs().max().item())
        plain_errors.append((plain_bf16(rig.model, probe.tokens[:-1]).double().cpu() - exact).abs().max().item())
    assert max(errors) <= 2 * max(plain_errors) + 1e-5, (max(errors), max(plain_errors))
    replayed = {d.padded_reqs for d in rig.manager.stats().replays if d.kind is GraphKind.DECODE}
    assert replayed == set(sizes)
    assert not rig.manager.stats().eager_steps
