"""TextGenerator with drafts: the tokens of plain decoding, also with few pages, windows and shared prefixes."""

from __future__ import annotations

import pytest
import torch

from graphrt.generate.generator import TextGenerator
from graphrt.proposer import ngram_drafts
from graphrt.sampling_params import SamplingParams
from graphrt.spec import AttentionSpec, KVCacheSpec
from tests.support.layered import build, prompts_of
from tests.support.sampling_cases import generated
from tests.support.toy import VOCAB, captured


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


@pytest.mark.parametrize("num_pages", [120, 26], ids=["many_pages", "preemption"])
def test_windows_free_only_pages_that_no_token_needs(device: torch.device, num_pages: int) -> None:
    specs = [AttentionSpec(4, 2, 16, torch.float32, sliding_window=6), AttentionSpec(4, 2, 16, torch.float32)]
    groups = [
        KVCacheSpec(1, 2, 16, 4, dtype=torch.float32, layers=(0,), sliding_window=6),
        KVCacheSpec(1, 2, 16, 4, dtype=torch.float32, layers=(1,)),
    ]
    prompts = prompts_of([3, 9, 14, 2, 11])
    prompts = [[token % VOCAB for token in prompt] for prompt in prompts]
    found = []
    for most in (0, 3):
        _, runtime = build(
            specs, groups, num_pages, device, ngram_drafts if most else None, num_speculative_tokens=most
        )
        generator = TextGenerator(runtime, swap_bytes=1 << 20)
        found.append(generated(generator, prompts, [SamplingParams(25)] * len(prompts)))
        assert bool(generator.stats.preemptions) == (num_pages == 26)
        runtime.close()
    assert found[1] == found[0]
