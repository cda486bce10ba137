"""TextGenerator with drafts of every source: the tokens of plain decoding, also with few pages."""

from __future__ import annotations

import random

import pytest
import torch

from graphrt.cache.groups import kv_groups
from graphrt.draft_model import DraftModel
from graphrt.engine.stats import Stats
from graphrt.generate.generator import TextGenerator
from graphrt.proposer import Proposer, ngram_drafts
from graphrt.sampling_params import SamplingParams
from graphrt.session.pages import pages_needed
from graphrt.spec import AttentionSpec
from graphrt.step import Step
from tests.support.drafts import ByHistory
from tests.support.layered import MAX_LEN, WIDTH, LayeredModel, build, prompts_of
from tests.support.layered import VOCAB as LAYERED_VOCAB
from tests.support.sampling_cases import generated
from tests.support.toy import captured

MOST = 4


@pytest.mark.parametrize("num_pages", [80, 17], ids=["many_pages", "preemption"])
@pytest.mark.parametrize("swap_bytes", [0, 1 << 20], ids=["recompute", "swap"])
def test_tokens_are_those_of_plain_decoding(device: torch.device, num_pages: int, swap_bytes: int) -> None:
    common = [8, 9, 10, 11, 8, 9, 10, 11]
    prompts = [[*common, 12], [*common, 13], [7] * 5, [3, 1, 4, 1, 5], [*common, 14, 15], [2]]
    params = [
        SamplingParams(30, temperature=0.5 * (i % 2), seed=i, stop_ids=frozenset(range(i))) for i in range(len(prompts))
    ]
    found = []
    for most in (0, 1, 3):
        proposer = ngram_drafts if most else None
        runtime = captured(
            device=device, num_pages=num_pages, proposer=proposer, num_speculative_tokens=most, max_num_tokens=32
        )
        generator = TextGenerator(runtime, swap_bytes=swap_bytes)
        found.append(generated(generator, prompts, params))
        assert bool(generator.stats.preemptions) == (num_pages == 17)
        assert generator.stats.shared_tokens
        runtime.close()
    assert found[1] == found[2] == found[0]


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20], ids=["recompute", "swap"])
@pytest.mark.parametrize("source", ["ngram", "draft_model"])
def test_drafts_need_no_more_pages_than_plain_decoding(device: torch.device, source: str, swap_bytes: int) -> None:
    """As few pages as one prompt needs, of a layer that keeps fewer tokens than a step with all drafts has."""
    specs = [AttentionSpec(4, 2, 16, torch.float32, sliding_window=6)]
    groups, prompts, params = kv_groups(specs, page_size=4), prompts_of([9, 9]), [SamplingParams(30)] * 2
    least, found = max(pages_needed(groups, 9 + 30 - 1, 1)), []
    for most in (0, 8):
        proposer: Proposer | None = ngram_drafts if most else None
        if most and source == "draft_model":
            proposer = DraftModel(LayeredModel(specs, device), specs, vocab_size=LAYERED_VOCAB)
        _, runtime = build(
            specs, groups, 1 + least, device, proposer, num_speculative_tokens=most, max_num_tokens=4 * 9
        )
        found.append(generated(TextGenerator(runtime, swap_bytes=swap_bytes), prompts, params))
        runtime.close()
    assert found[1] == found[0]


class Drafter(LayeredModel):
    """Drafts the tokens of an equal model, except at positions that 5 divides, and after a token that the hidden state
    before it did not predict."""

    def forward(self, step: Step) -> torch.Tensor:
        logits, ends = super().forward(step), step.logits_indices
        wrong = step.positions[ends] % 5 == 0
        if step.previous_hidden is not None:
            wrong |= (step.previous_hidden @ self.embed.t()).argmax(1)[ends] != step.input_ids[ends]
        return torch.where(wrong[:, None], logits.roll(1, 1), logits)


@pytest.fixture(scope="module")
def plain_tokens() -> dict[torch.device, list[list[int]]]:
    """Tokens without drafts, by device."""
    return {}


@pytest.mark.parametrize(
    ("source", "swap_bytes"),
    [("ngram", 0), ("chain", 0), ("tree", 0), ("tree", 1 << 20), ("draft_model", 0), ("head", 0), ("head", 1 << 20)],
)
def test_every_source_with_all_features(
    device: torch.device, source: str, swap_bytes: int, plain_tokens: dict[torch.device, list[list[int]]]
) -> None:
    """Windows, shared KV, fp8 KV, preemption, shared prefixes, stop tokens, penalties, temperatures, loops, shadows."""
    specs = [
        AttentionSpec(4, 2, 16, torch.float32, sliding_window=6),
        AttentionSpec(4, 2, 16, torch.float32),
        AttentionSpec(4, 2, 16, torch.float32, kv_shared_with=1),
    ]
    groups = kv_groups(specs, page_size=4, dtype=torch.float8_e4m3fn)
    common = prompts_of([8])[0]
    prompts = [*(common + tail for tail in prompts_of([3, 9, 14, 2])), *prompts_of([5, 11], seed=1)]
    params = [
        SamplingParams(25, stop_ids={7}),
        SamplingParams(25, temperature=0.8, seed=3, frequency_penalty=0.3, min_tokens=5, stop_ids={1, 2, 3}),
    ] * 3

    def run(proposer: Proposer | None, **options: int) -> tuple[list[list[int]], Stats]:
        _, runtime = build(
            specs, groups, 30, device, proposer, loop_sizes=(2, 4), penalties=True, max_logit_bias=3, shadow_every=8,
            max_num_tokens=4 * (1 + MOST), **options,
        )  # fmt: skip
        generator = TextGenerator(runtime, swap_bytes=swap_bytes)
        tokens, stats = generated(generator, prompts, params), runtime.stats()
        assert generator.stats.preemptions
        assert generator.stats.shared_tokens
        assert stats.shadow_steps
        assert not stats.shadow_differences
        runtime.close()
        return tokens, stats

    if device not in plain_tokens:
        plain_tokens[device] = run(None)[0]
    want = plain_tokens[device]
    known = [prompt + tokens for prompt, tokens in zip(prompts, want, strict=True)]
    proposer: Proposer = ngram_drafts
    if source in ("chain", "tree"):
        proposer = ByHistory(known, MOST, source == "tree", MAX_LEN, random.Random(0), device)
    elif source != "ngram":
        width = WIDTH if source == "head" else None
        proposer = DraftModel(Drafter(specs, device), specs, vocab_size=LAYERED_VOCAB, hidden_size=width)
    tokens, stats = run(proposer, num_speculative_tokens=MOST, tree_depth=3 if source == "tree" else 0)
    assert tokens == want
    assert source == "ngram" or stats.tokens_per_step[4 if source == "tree" else 1 + MOST] > 1
