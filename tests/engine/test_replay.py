"""Replay compared with eager, bitwise, and with a dense float64 oracle without cache and buffers."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from graphrt.batch import Batch
from graphrt.capture.descriptor import GraphKind
from graphrt.kernels.errors import ConfigError
from graphrt.kernels.library import interpreted
from graphrt.kernels.types import KVLayout
from graphrt.testing.poison import poison_derived
from tests.support.replay_scenarios import (
    check_row,
    prompts,
    step_both_ways,
)
from tests.support.toy import MAX_LEN, VOCAB, make_rig


@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda x: x.value)
def test_replay_equals_eager_and_the_oracle_at_every_size(device: torch.device, layout: KVLayout) -> None:
    """With 1 to padded_reqs requests, ragged, permuted, growing and shrinking, across page boundaries."""
    rig, rng = make_rig(device, layout=layout, decode_sizes=None), random.Random(3)
    sequences = [rig.start(i, p) for i, p in enumerate(prompts(rng, 8))]
    rig.prefill(*sequences[:3])
    rig.prefill(*sequences[3:])
    seen = set()
    for live in (1, 2, 3, 8, 5, 4, 7, 1, 6, 8, 2):
        chosen = rng.sample(sequences, live)
        tokens, logits = step_both_ways(rig, Batch.from_requests([rig.row(s) for s in chosen]))
        seen.add(rig.manager.stats().replays.most_common()[0][0].kind)
        for i, sequence in enumerate(chosen):
            check_row(rig, sequence, logits[i])
            sequence.tokens.append(int(tokens[i]))
    sizes = {d.padded_reqs for d in rig.manager.stats().replays if d.kind is GraphKind.DECODE}
    assert sizes == {d.padded_reqs for d in rig.manager.descriptors if d.kind is GraphKind.DECODE}
    assert not rig.manager.stats().eager_steps


def test_replay_up_to_max_seq_len(device: torch.device) -> None:
    rig = make_rig(device, decode_sizes=(2,))
    long, short = rig.start(0, [5]), rig.start(1, [9, 9])
    rig.prefill(long, short)
    while long.cached < MAX_LEN:
        handle = rig.manager.replay(Batch.from_requests([rig.row(long)]))
        check_row(rig, long, handle.logits()[0])
        long.tokens.append(int(handle.tokens()[0]))
    assert long.cached == MAX_LEN
    handle = rig.manager.replay(Batch.from_requests([rig.row(short)]))
    check_row(rig, short, handle.logits()[0])


def test_chunked_prefill_with_decode_requests(device: torch.device) -> None:
    """Mixed graphs: prompts in chunks that cross pages, together with decode requests, padded to the token count."""
    rig, rng = make_rig(device), random.Random(5)
    decoding = [rig.start(i, p) for i, p in enumerate(prompts(rng, 3))]
    rig.prefill(*decoding)
    prompt = rig.start(3, [rng.randrange(VOCAB) for _ in range(23)])
    for chunk in (5, 1, 9, 8):
        batch = Batch.from_requests([*(rig.row(s) for s in decoding), rig.row(prompt, chunk)])
        poison_derived(rig.manager.buffers)
        handle = rig.manager.replay(batch)
        assert handle.descriptor.kind is (GraphKind.DECODE if chunk == 1 else GraphKind.MIXED)
        logits, tokens = handle.logits(copy=True), handle.tokens()
        for i, sequence in enumerate(decoding):
            check_row(rig, sequence, logits[i])
            sequence.tokens.append(int(tokens[i]))
        check_row(rig, prompt, logits[3])
        assert (tokens[3] == -1) == (prompt.cached < 23), "only the last chunk is sampled"
    step_both_ways(rig, Batch.from_requests([rig.row(rig.start(5, [1, 2, 3])), *(rig.row(s) for s in decoding)]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_null_page_that_drafts_read_must_be_finite(device: torch.device, bad: float) -> None:
    """With fewer drafts than the graph has, a request reads past its last page. The logits are those of the oracle."""
    rig = make_rig(device, num_speculative_tokens=2, capture=False)
    for page in (bad, 0):
        rig.manager.kv_cache.v[1][0] = page
        with pytest.raises(ConfigError, match="page 0, the null page of KV group 0") if page else nullcontext():
            rig.manager.capture()
    sequence = rig.start(0, [5, 3, 1])
    rig.prefill(sequence)
    row, drafts = rig.row(sequence), replace(rig.row(rig.start(1, [7, 8])), sample=2)
    assert row.seq_len == rig.page_size
    handle = rig.manager.replay(Batch.from_requests([row, drafts]))
    assert handle.descriptor.query_len == 3
    check_row(rig, sequence, handle.logits()[0, 0])


def test_decode_steps_of_three_given_tokens(device: torch.device) -> None:
    """In the graph for drafts: causal among the new tokens, logits of the last one."""
    rig, rng = make_rig(device, num_speculative_tokens=2), random.Random(2)
    sequences = [rig.start(i, p) for i, p in enumerate(prompts(rng, 3))]
    rig.prefill(*sequences)
    for _ in range(3):
        for sequence in sequences:
            sequence.tokens += [rng.randrange(VOCAB) for _ in range(2)]
        _, logits = step_both_ways(rig, Batch.from_requests([rig.row(s) for s in sequences]))
        for i, sequence in enumerate(sequences):
            check_row(rig, sequence, logits[i])
            sequence.tokens.append(int(logits[i].argmax()))


def test_last_tokens_stay_on_the_device(device: torch.device) -> None:
    """Ten steps are submitted without reading one. Requests change position, and keep their last tokens."""
    rig, rng = make_rig(device), random.Random(4)
    sequences = [rig.start(i + 2, p) for i, p in enumerate(prompts(rng, 4))]
    first = rig.manager.replay(Batch.from_requests([rig.row(s) for s in sequences]))
    handles = [(list(sequences), first)]
    for _ in range(10):
        chosen = rng.sample(sequences, 4)
        for sequence in chosen:
            sequence.tokens.append(-1)
        rows = [rig.row(s, 1, from_device=True) for s in chosen]
        handles.append((chosen, rig.manager.replay(Batch.from_requests(rows))))
    for sequence in sequences:
        sequence.tokens = [t for t in sequence.tokens if t >= 0]
    for members, handle in handles:
        for sequence, token in zip(members, handle.tokens().tolist(), strict=True):
            want = rig.model.oracle(sequence.tokens).topk(2).values
            if want[0] - want[1] > 1e-3:
                assert token == int(rig.model.oracle(sequence.tokens).argmax())
            sequence.tokens.append(token)


def test_two_sequences_read_shared_pages(device: torch.device) -> None:
    rig = make_rig(device)
    prefix = [3, 1, 4, 1, 5, 9, 2, 6]
    first = rig.start(0, prefix)
    rig.prefill(first)
    rig.allocator.share(first.pages[:2])
    second = rig.start(1, [*prefix, 7])
    second.cached, second.pages = 8, list(first.pages[:2])
    _, logits = step_both_ways(rig, Batch.from_requests([rig.row(first), rig.row(second)]))
    check_row(rig, first, logits[0])
    check_row(rig, second, logits[1])


def test_sliding_window_changes_prefill_and_decode(device: torch.device) -> None:
    full, windowed = make_rig(device), make_rig(device, window=3)
    for rig in (full, windowed):
        sequence = rig.start(0, [7, 8, 9, 10, 11, 12, 13])
        rig.prefill(sequence)
        _, logits = step_both_ways(rig, Batch.from_requests([rig.row(sequence)]))
        rig.result = logits[0]
    assert not torch.allclose(full.result, windowed.result)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    rig, rng = make_rig(device, dtype=dtype), random.Random(6)
    sequences = [rig.start(i, p) for i, p in enumerate(prompts(rng, 3))]
    rig.prefill(*sequences)
    for _ in range(4):
        tokens, logits = step_both_ways(rig, Batch.from_requests([rig.row(s) for s in sequences]))
        for i, sequence in enumerate(sequences):
            check_row(rig, sequence, logits[i])
            sequence.tokens.append(int(tokens[i]))


def test_step_in_the_triton_interpreter() -> None:
    """With the same buffers and padding, and every kernel in Triton."""
    if torch.cuda.is_available():
        pytest.skip("the compiled kernels are tested on this machine")
    with interpreted():
        rig = make_rig(torch.device("cpu"), backend="triton", decode_sizes=(2,), mixed_sizes=(16,), max_num_tokens=16)
        sequences = [rig.start(0, [4, 5, 6, 7, 8]), rig.start(1, [9])]
        rig.prefill(*sequences)
        for _ in range(2):
            tokens, logits = step_both_ways(rig, Batch.from_requests([rig.row(s) for s in reversed(sequences)]))
            for i, sequence in enumerate(reversed(sequences)):
                check_row(rig, sequence, logits[i])
                sequence.tokens.append(int(tokens[i]))


COUNTS = [(2, 4), (4, 2), (3, 2, 4), (1, 5), (3, 3, 1, 5), (2, 2), (3, 3), (4, 4)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_requests_with_more_tokens_than_drafts_are_a_mixed_step(device: torch.device, counts: tuple[int, ...]) -> None:
    rig, rng = make_rig(device, num_speculative_tokens=2), random.Random(0)
    sequences = [rig.start(i, [rng.randrange(VOCAB) for _ in range(n)]) for i, n in enumerate(counts)]
    batch = Batch.from_requests([rig.row(s) for s in sequences])
    query_len = 3 if max(counts) <= 3 else 0
    assert batch.decode_query_len(2) == query_len
    handle = rig.manager.replay(batch)
    assert handle.descriptor.query_len == query_len
    logits = handle.logits()[0]
    for row, sequence in enumerate(sequences):
        assert (logits[row].double().cpu() - rig.model.oracle(sequence.tokens)).abs().max() < 2e-4
    want = [[int(rig.model.oracle(s.tokens).argmax()), -1, -1] for s in sequences]
    assert handle.tokens().tolist() == want
