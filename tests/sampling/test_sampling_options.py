"""Top-k, top-p and min-p of every row, from `Batch`, `SamplingParams`, sessions and the command line to the tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from graphrt.batch import Batch
from graphrt.generate.generator import TextGenerator
from graphrt.kernels.errors import ConfigError, ShapeError
from graphrt.sampling_params import SamplingParams
from graphrt.session.session import DecodeSession
from graphrt.step import Step
from tests.support.sampling_cases import finish, generated
from tests.support.toy import VOCAB, make_rig, make_runtime

LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 2


class Fixed(torch.nn.Module):
    """The same logits in every row and step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.logits = LOGITS.to(device)

    def forward(self, step: Step) -> torch.Tensor:
        return self.logits.expand(step.descriptor.padded_reqs, VOCAB).contiguous()


def test_requests_of_one_step_have_their_own_truncation(device: torch.device) -> None:
    """Beside a hot row: the best token, by three ways to ask for it."""
    rig = make_rig(device, model=Fixed(device), max_num_reqs=8, decode_sizes=(8,), mixed_sizes=(), num_pages=20)
    best = int(LOGITS.argmax())
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
    outputs = generated(TextGenerator(runtime), prompts, params)
    with DecodeSession(runtime) as session:
        rows = [session.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        finish(session, 4)
        assert [row.tokens for row in rows] == outputs
    free = [SamplingParams(12, temperature=30.0, seed=7), SamplingParams(12, temperature=30.0, seed=8)]
    wild = generated(TextGenerator(runtime), prompts, free)
    assert wild[0] != outputs[0]
    assert wild[1] != outputs[1]


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("top_ks", [-1], "expected numbers >= 0"),
        ("top_ks", [1.5], "expected int32 values"),
        *(("top_ps", [value], r"expected numbers in \(0, 1\]") for value in (0.0, 1.01, np.nan)),
        *(("min_ps", [value], r"expected numbers in \[0, 1\]") for value in (-0.1, np.inf)),
        ("min_ps", [0.1, 0.1], "expected shape"),
        ("repetition_penalties", [0.0], "expected finite numbers > 0, got 0.0 for request 0; 1 is off"),
        ("repetition_penalties", [np.inf], "expected finite numbers > 0"),
        ("presence_penalties", [np.nan], "expected finite numbers, got nan for request 0; 0 is off"),
        ("frequency_penalties", [np.inf], "expected finite numbers"),
        ("prompt_lens", [-1], "expected lengths >= 0"),
        ("prompt_lens", [1.5], "expected int32 values"),
        ("logprobs", [-2], "expected numbers >= -1"),
        ("logprob_tokens", [-2], "expected token ids, or -1"),
    ],
)
def test_wrong_values_of_a_batch_are_named(name: str, values: list[float], text: str) -> None:
    with pytest.raises(ShapeError, match=f"batch.{name}: {text}"):
        Batch(req_indices=[0], seq_lens=[1], tokens=[1], **{name: values})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("top_k", -1, "expected"),
        ("top_k", 2.0, "expected"),
        ("top_p", 0, "expected a finite number from"),
        ("top_p", 2, "expected a finite number from"),
        ("min_p", -0.5, "expected a finite number from 0 to 1"),
        ("min_p", math.nan, "expected a finite number from 0 to 1"),
        ("repetition_penalty", 0, "expected"),
        ("repetition_penalty", "1", "expected"),
        ("presence_penalty", math.nan, "expected"),
        ("frequency_penalty", 1e39, "expected"),
        ("logprobs", -1, "expected an int"),
        ("min_tokens", 129, "expected an int from 0 to 128, got 129"),
        ("min_tokens", -1, "expected an int from 0 to 128"),
        ("min_tokens", 1.5, "expected"),
        ("prompt_logprobs", 1.0, "expected an int"),
    ],
)
def test_wrong_params_are_named(name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: {text}"):
        SamplingParams(**{name: value})


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
