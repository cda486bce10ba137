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
from tests.session.test_draft_model import drafter
from tests.support.drafts import ByHistory
from tests.support.layered import MAX_LEN, WIDTH, LayeredModel, build, prompts_of
from tests.support.layered import VOCAB as LAYERED_VOCAB
from tests.support.sampling_cases import generated
from tests.support.toy import VOCAB as TOY_VOCAB
from tests.support.toy import LivelyModel, captured, greedy

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


@pytest.mark.parametrize("source", ["chain", "tree", "draft_model"])
def test_sequences_as_long_as_the_runtime(device: torch.device, source: str) -> None:
    """Right drafts up to the end. The last page is not full, and the models have no embedding of later positions."""
    longest, most, model, draft = 62, 3, LivelyModel(device), LivelyModel(device)
    for each in (model, draft):
        each.where.data = each.where.data[:longest].clone()
    prompts = [[(7 * at + length) % TOY_VOCAB for at in range(length)] for length in (1, 30, 61, 62)]
    params = [SamplingParams(longest + 1 - len(prompt)) for prompt in prompts]
    want = [greedy(model, prompt, each.max_new_tokens) for prompt, each in zip(prompts, params, strict=True)]
    known = [prompt + tokens for prompt, tokens in zip(prompts, want, strict=True)]
    proposer: Proposer = drafter(draft)
    if source != "draft_model":
        proposer = ByHistory(known, most, source == "tree", longest + 1, random.Random(0), device)
    runtime = captured(
        model, device, 80, proposer=proposer, num_speculative_tokens=most, max_seq_len=longest,
        tree_depth=most if source == "tree" else 0,
    )  # fmt: skip
    assert generated(TextGenerator(runtime), prompts, params) == want
    assert runtime.stats().tokens_per_step[1 + most] > 9
    runtime.close()


class Drafter(LayeredModel):
    """Drafts the tokens of an equal model, except at positions that `every` divides, and after a token that the hidden
    state before it did not predict."""

    every = 5

    def forward(self, step: Step) -> torch.Tensor:
        logits, ends = super().forward(step), step.logits_indices
        wrong = step.positions[ends] % self.every == 0
        if step.previous_hidden is not None:
            wrong |= (step.previous_hidden @ self.embed.t()).argmax(1)[ends] != step.input_ids[ends]
        return torch.where(wrong[:, None], logits.roll(1, 1), logits)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 20], ids=["recompute", "swap"])
@pytest.mark.parametrize("hidden_size", [None, WIDTH], ids=["draft_model", "head"])
def test_drafts_are_right_after_preemption_and_sharing(
    device: torch.device, hidden_size: int | None, swap_bytes: int
) -> None:
    """The KV and the hidden states of an equal draft model follow the requests, so few steps accept no draft."""
    specs = [AttentionSpec(4, 2, 16, torch.float32, sliding_window=6), AttentionSpec(4, 2, 16, torch.float32)]
    draft, common = Drafter(specs, device), prompts_of([8])[0]
    draft.every = MAX_LEN
    proposer = DraftModel(draft, specs, vocab_size=LAYERED_VOCAB, hidden_size=hidden_size)
    prompts = [*(common + tail for tail in prompts_of([3, 9, 14, 2])), *prompts_of([5, 11], seed=1)]
    _, runtime = build(
        specs, kv_groups(specs, page_size=4), 30, device, proposer, num_speculative_tokens=MOST,
        max_num_tokens=4 * (1 + MOST),
    )  # fmt: skip
    generator = TextGenerator(runtime, swap_bytes=swap_bytes)
    tokens, stats = generated(generator, prompts, [SamplingParams(25)] * 6), generator.stats
    assert [len(each) for each in tokens] == [25] * 6
    assert stats.preemptions
    assert stats.shared_tokens
    assert bool(stats.swapped_in_pages) == bool(swap_bytes)
    assert runtime.stats().tokens_per_step[1] < 5
    runtime.close()


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
