"""Top-k, top-p and min-p of every row, from `Batch`, `SamplingParams`, sessions and the command line to the tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from graphrt.batch import Batch
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from tests.support.toy import VOCAB, Rig, make_rig, make_runtime

SEEDS = 400
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 2


class Fixed(torch.nn.Module):
    """The same logits in every row and step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.logits = LOGITS.to(device)

    def forward(self, step: Step) -> torch.Tensor:
        return self.logits.expand(step.descriptor.padded_reqs, VOCAB).contiguous()


def rig_of(device: torch.device) -> Rig:
    return make_rig(device, model=Fixed(device), max_num_reqs=8, decode_sizes=(8,), mixed_sizes=(), num_pages=20)


def expected(temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Probabilities after the processors of transformers, in the order of vLLM: min-p, top-k, top-p."""
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None].double())
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0]


def draws(rig: Rig, **values: float) -> torch.Tensor:
    """How often each token is drawn with so many seeds, eight rows at a time, all with the same values."""
    counts = torch.zeros(VOCAB)
    for first in range(0, SEEDS, 8):
        batch = Batch(
            req_indices=range(8), seq_lens=[1] * 8, tokens=[1] * 8, page_indptr=range(9), page_ids=range(1, 9),
            seeds=range(first, first + 8), **{name: [value] * 8 for name, value in values.items()},
        )  # fmt: skip
        counts += torch.bincount(torch.from_numpy(rig.manager.replay(batch).tokens()).long(), minlength=VOCAB)
    return counts


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (1.5, 5, 1.0, 0.0), (2.0, 0, 0.6, 0.0), (1.5, 0, 1.0, 0.2), (3.0, 12, 0.7, 0.05)],
)
def test_draws_follow_the_distribution_of_transformers(
    device: torch.device, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    counts = draws(rig_of(device), temperatures=temperature, top_ks=top_k, top_ps=top_p, min_ps=min_p)
    p = expected(temperature, top_k, top_p, min_p)
    assert not counts[p == 0].any(), "a token that was dropped"
    likely = p * SEEDS >= 5  # rarer tokens are taken together
    together = [(counts[likely], p[likely]), (counts[~likely].sum()[None], p[~likely].sum()[None])]
    seen, want = (torch.cat(parts) for parts in zip(*together, strict=True))
    want = want * SEEDS
    statistic = float(((seen - want) ** 2 / want.clamp(min=1e-9))[want > 0].sum())
    freedom = int((want > 0).sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * max(freedom, 1)) + 4


def test_requests_of_one_step_have_their_own_truncation(device: torch.device) -> None:
    """Beside a hot row: the best token, by three ways to ask for it."""
    rig, best = rig_of(device), int(LOGITS.argmax())
    hot = set()
    for seed in range(12):
        batch = Batch(
            req_indices=range(4), seq_lens=[1] * 4, tokens=[1] * 4, page_indptr=range(5), page_ids=range(1, 5),
            temperatures=[9.0] * 4, seeds=[seed] * 4, top_ks=[0, 1, 0, 0], top_ps=[1, 1, 1e-6, 1], min_ps=[0, 0, 0, 1],
        )  # fmt: skip
        first, *others = rig.manager.replay(batch).tokens().tolist()
        assert others == [best] * 3
        hot.add(first)
    assert len(hot) > 6


def test_generators_and_sessions_sample_alike(device: torch.device) -> None:
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5]]
    params = [
        SamplingParams(12, temperature=30.0, seed=7, top_k=3),
        SamplingParams(12, temperature=30.0, seed=8, top_p=0.1, min_p=0.01),
    ]
    runtime = make_runtime(device, num_pages=60)
    runtime.capture()
    outputs: list[list[int]] = [[], []]
    for event in TextGenerator(runtime).generate(prompts, params):
        outputs[event.prompt].append(event.token)
    with DecodeSession(runtime) as session:
        rows = [session.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        while session.running:
            session.run(4)
            session.collect(wait=True)
        assert [row.tokens for row in rows] == outputs
    free = [SamplingParams(12, temperature=30.0, seed=7), SamplingParams(12, temperature=30.0, seed=8)]
    wild: list[list[int]] = [[], []]
    for event in TextGenerator(runtime).generate(prompts, free):
        wild[event.prompt].append(event.token)
    assert wild[0] != outputs[0]
    assert wild[1] != outputs[1]


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("top_ks", [-1], "batch.top_ks: expected numbers >= 0"),
        ("top_ks", [1.5], "batch.top_ks: expected int32 values"),
        ("top_ps", [0.0], r"batch.top_ps: expected numbers in \(0, 1\]"),
        ("top_ps", [1.01], r"batch.top_ps: expected numbers in \(0, 1\]"),
        ("top_ps", [np.nan], r"batch.top_ps: expected numbers in \(0, 1\]"),
        ("min_ps", [-0.1], r"batch.min_ps: expected numbers in \[0, 1\]"),
        ("min_ps", [np.inf], r"batch.min_ps: expected numbers in \[0, 1\]"),
        ("min_ps", [0.1, 0.1], "batch.min_ps: expected shape"),
    ],
)
def test_wrong_values_of_a_batch_are_named(name: str, values: list[float], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        Batch(req_indices=[0], seq_lens=[1], tokens=[1], **{name: values})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"top_k": -1}, "top_k: expected an int >= 0|top_k: expected"),
        ({"top_k": 2.0}, "top_k: expected"),
        ({"top_p": 0}, "top_p: expected a finite number from"),
        ({"top_p": 2}, "top_p: expected a finite number from"),
        ({"min_p": -0.5}, "min_p: expected a finite number from 0 to 1"),
        ({"min_p": float("nan")}, "min_p: expected a finite number from 0 to 1"),
    ],
)
def test_wrong_params_are_named(values: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(**values)


def test_params_take_numpy_numbers_and_refuse_others() -> None:
    params = SamplingParams(
        np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_ids=np.array([4, 9]),  # type: ignore[arg-type]
        logit_bias={np.int32(7): np.float32(-np.inf), 8: -np.inf, 9: np.float16(2)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(3, 0.5, stop_ids=frozenset({9, 4}), logit_bias={7: -math.inf, 8: -math.inf, 9: 2.0})
    assert all(type(value) is float for value in params.logit_bias.values())
    for stop_ids in ([1 << 31], [(1 << 32) + 5], [-1], [True], [1.0], torch.tensor([3])):
        with pytest.raises(ConfigError, match="stop_ids: expected an int from 0 to 2147483647, got"):
            SamplingParams(stop_ids=stop_ids)  # type: ignore[arg-type]
    for stop_ids in (3, "abc", {3: 4}, None, (token for token in [3])):
        with pytest.raises(ConfigError, match="stop_ids: expected a collection of token ids, got"):
            SamplingParams(stop_ids=stop_ids)  # type: ignore[arg-type]
