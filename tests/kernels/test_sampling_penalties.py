"""Penalties and their state, biases and token masks: transformers, closed formulas, and counting in Python."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import partial

import pytest
import torch

from graphrt.kernels.errors import ShapeError
from graphrt.kernels.ops.sampling import SAMPLE_CHUNK, LogitBias, TokenMask, sample
from graphrt.kernels.ops.sampling_reference import (
    SampleInputs,
    processed_reference,
    sample_reference,
    unpacked_bits,
)
from graphrt.kernels.ops.sampling_state import Penalties, PenaltyState, record_tokens
from graphrt.kernels.types import NO_TOKEN
from tests.support.sampling_cases import (
    I32,
    INF,
    arguments,
    biases,
    formula,
    penalties_with,
    token_mask,
    truncation,
)

NAN = float("nan")
CPU = torch.device("cpu")
VOCAB = 75


SEQUENCES = [([1, 2, 3, 3, 74], [5, 5, 5, 2, 0]), ([], [7]), ([9, 9, 9], []), ([31, 32, 33], [33, 63, 64, 64])]
SETTINGS = [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, 0.4), (0.6, -0.5, 0.3)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_processed_logits_equal_transformers_and_the_formula(rng: torch.Generator, setting: tuple) -> None:
    logits = 2 * torch.randn(4, VOCAB, generator=rng)
    penalties, req_indices = penalties_with(SEQUENCES, VOCAB, CPU, *setting)
    have = processed_reference(SampleInputs(*arguments(logits, 0.0), req_indices, **penalties.checked(4, VOCAB, CPU)))
    expected = torch.stack([formula(logits[r], *SEQUENCES[r], *setting) for r in range(4)])
    torch.testing.assert_close(have, expected, rtol=1e-6, atol=1e-6)


def values_of(device: torch.device, logits: torch.Tensor, **options: object) -> torch.Tensor:
    """Processed logits as the kernel has them, by order: greedy, with one found token after another forbidden."""
    rows, vocab = logits.shape
    left = torch.ones(rows, vocab, dtype=torch.bool)
    order = []
    for _ in range(6):
        mask = token_mask(left, list(range(rows)), device)
        order.append(sample(*arguments(logits.to(device), 0.0), token_mask=mask, **options).cpu())
        left[torch.arange(rows), order[-1].long()] = False
    return torch.stack(order, 1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_kernel_ranks_tokens_as_the_formula(kernel_device: torch.device, rng: torch.Generator, setting: tuple) -> None:
    logits = 2 * torch.randn(4, VOCAB, generator=rng)
    penalties, req_indices = penalties_with(SEQUENCES, VOCAB, kernel_device, *setting)
    entries = [{5: 3.0, 70: -2.0, 0: 1.0}, {}, {t: 0.1 * t - 3 for t in range(0, 70, 3)}, {64: -INF}]
    bias = biases(entries, req_indices.tolist(), 8, kernel_device)
    biased = logits.clone()
    for row, entry in enumerate(entries):
        for token, value in entry.items():
            biased[row, token] += value
    expected = torch.stack([formula(biased[r], *SEQUENCES[r], *setting) for r in range(4)])
    have = values_of(kernel_device, logits, penalties=penalties, req_indices=req_indices, bias=bias)
    assert have.tolist() == expected.topk(6).indices.tolist()


def test_truncation_applies_to_penalized_logits(kernel_device: torch.device, rng: torch.Generator) -> None:
    """Against the reference, in a vocabulary of two chunks, with a row that keeps more than a list holds."""
    logits = torch.randn(3, 2900, generator=rng)
    tokens = torch.randint(0, 2900, (3, 40), generator=rng).tolist()
    sequences = [(row[:20], row[20:]) for row in tokens]

    penalties, req_indices = penalties_with(sequences, 2900, kernel_device, 1.5, 0.5, 0.2)
    options = truncation(3, kernel_device, top_k=[30, 0, 0], top_p=[1.0, 0.95, 0.6], min_p=[0.0, 0.0, 0.01])
    args = arguments(logits.to(kernel_device), 1.0)
    expected = sample_reference(
        *args, req_indices, options.top_k, options.top_p, options.min_p, penalties.repetition, penalties.presence,
        penalties.frequency, penalties.state.seen, penalties.state.counts,
    )  # fmt: skip
    tensors = (args[0], penalties.state.seen, penalties.state.counts)
    before = [tensor.clone() for tensor in tensors]
    have = sample(*args, truncation=options, penalties=penalties, req_indices=req_indices)
    assert have.tolist() == expected.tolist()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)), "logits or state were written"


@pytest.mark.parametrize("values", [(0.0, NAN, NAN), (-1.0, INF, -INF), (INF, 0.0, 0.0), (NAN, -INF, INF), (1.0, 0, 0)])
def test_penalties_that_mean_nothing_change_nothing(
    kernel_device: torch.device, rng: torch.Generator, values: tuple
) -> None:
    logits = torch.randn(4, VOCAB, generator=rng).to(kernel_device)
    penalties, req_indices = penalties_with(SEQUENCES, VOCAB, kernel_device, 2.0, 1.0, 1.0)
    for tensor, value in zip((penalties.repetition, penalties.presence, penalties.frequency), values, strict=True):
        tensor.fill_(value)
    args = arguments(logits, 0.0)
    assert torch.equal(sample(*args, penalties=penalties, req_indices=req_indices), sample(*args))


def test_row_ids_and_masks_that_are_not_there_are_none(kernel_device: torch.device, rng: torch.Generator) -> None:
    logits = torch.randn(4, VOCAB, generator=rng).to(kernel_device)
    penalties, _ = penalties_with(SEQUENCES, VOCAB, kernel_device, 5.0, 9.0, 9.0)
    bias = biases([{int(logits[0].argmax()): -50.0}] * 7, list(range(7)), 7, kernel_device)
    req_indices = torch.tensor([-1, 7, 2**31 - 1, -(2**31)], dtype=I32, device=kernel_device)
    mask = token_mask(torch.zeros(2, VOCAB, dtype=torch.bool), [-1, 2, 2**31 - 1, -5], kernel_device)
    args = arguments(logits, 0.0)
    have = sample(*args, penalties=penalties, req_indices=req_indices, bias=bias, token_mask=mask)
    assert torch.equal(have, sample(*args))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks(kernel_device: torch.device, rng: torch.Generator, temperature: float) -> None:
    """A mask per row; of a mask without tokens nothing is drawn; bits beyond the vocabulary do not matter."""
    logits = torch.randn(4, VOCAB, generator=rng)
    allowed = torch.zeros(3, VOCAB, dtype=torch.bool)
    allowed[0, [31, 32, 64, 74]] = True
    allowed[1, 63] = True
    mask = token_mask(allowed, [1, 0, 2, -1], kernel_device)
    tokens = sample(*arguments(logits.to(kernel_device), temperature), token_mask=mask).tolist()
    assert tokens[0] == 63
    assert tokens[1] in (31, 32, 64, 74)
    assert tokens[2] == NO_TOKEN
    if temperature == 0:
        assert tokens[1] == max((31, 32, 64, 74), key=lambda t: float(logits[1, t]))
        assert tokens[3] == int(logits[3].argmax())


def test_biases_at_their_bounds(kernel_device: torch.device) -> None:
    """In both lists: first and last entry, first and last token, tokens outside of the vocabulary, bad counts."""
    logits = torch.zeros(6, VOCAB, device=kernel_device)
    req_indices = torch.arange(6, dtype=I32, device=kernel_device)
    for which in (0, 1):
        bias = LogitBias.allocate(6, 4, kernel_device)
        tokens, values, counts = bias.tokens[:, which], bias.values[:, which], bias.lists[:, which]
        tokens.copy_(torch.tensor([[0, 1, 2, 3], [5, 9, 73, 74], [-7, 4, VOCAB, 2**31 - 1], [8, 9, 10, 11]] * 2)[:6])
        values.copy_(torch.tensor([[2.0, 1.0, 1.0, 1.0], [1, 1, 1, 2.0], [9.0, 1.0, 9.0, 9.0], [1, 1, 1, 5.0]] * 2)[:6])
        counts.copy_(torch.tensor([4, 4, 4, 3, 99, -3]))
        bias.lists[:, 2] = which * (2**31 - 1)
        assert sample(*arguments(logits, 0.0), req_indices=req_indices, bias=bias).tolist() == [0, 74, 4, 8, 0, 0]
        values[0, 0] = NAN
        values[1, 3] = INF
        assert sample(*arguments(logits, 0.0), req_indices=req_indices, bias=bias).tolist()[:2] == [1, 74]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_second_bias_list_applies_below_its_length(
    kernel_device: torch.device, rng: torch.Generator, temperature: float
) -> None:
    """Each draw is that of a table whose first list is the one that applies: with and without penalties and bounds."""
    vocab, rows, length = 3 * SAMPLE_CHUNK + 75, 8, 5
    logits = torch.randn(rows, vocab, generator=rng)
    best = logits.argsort(1, descending=True)
    first = [{}, {7: 2.0}, {}, {int(best[3, 0]): -INF}, {}, {9: 1.0}, {}, {int(best[7, 1]): 4.0}]
    second = [
        (dict.fromkeys(best[row, : 1 + row].tolist(), -INF), length + (row % 2)) for row in range(rows)
    ]  # of rows 1, 3, 5 and 7 the second list applies
    sequences = [(best[row, :9].tolist(), best[row, 9:12].tolist()) for row in range(rows)]
    settings = [1.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3, 1.3]
    penalties, req_indices = penalties_with(sequences, vocab, kernel_device, settings)
    applies = [second[row][0] if row % 2 else first[row] for row in range(rows)]
    ids = req_indices.tolist()
    args = arguments(logits.to(kernel_device), temperature, position=length)
    bounds = truncation(
        rows, kernel_device, top_k=[0, 0, 40, 40, 0, 0, 40, 40], top_p=[1.0, 1.0, 0.9, 0.9] * 2, min_p=[0.0, 0.1] * 4
    )
    want = sample(
        *args, req_indices=req_indices, truncation=bounds, penalties=penalties,
        bias=biases(applies, ids, rows + 3, kernel_device),
    )  # fmt: skip
    have = sample(
        *args, req_indices=req_indices, truncation=bounds, penalties=penalties,
        bias=biases(first, ids, rows + 3, kernel_device, second),
    )  # fmt: skip
    assert have.tolist() == want.tolist()
    if temperature == 0:
        assert have[0] == best[0, 0]
        assert have[1] == best[1, 2]


def test_state_counts_the_tokens_of_steps(kernel_device: torch.device, rng: torch.Generator) -> None:
    """Prompts in chunks, tokens one by one, a row that ends and another that takes its id, against Python's Counter."""
    vocab, max_rows = 70, 5
    state = PenaltyState.allocate(max_rows, vocab, 40, kernel_device)
    state.seen.fill_(-1)
    state.counts.fill_(9)  # of sequences that ended
    prompts = {4: torch.randint(0, vocab, (23,), generator=rng).tolist(), 1: [69, 69, 0]}
    history: dict[int, list[int]] = {4: [], 1: []}

    def step(rows: list[tuple[int, list[int]]], penalized: bool = True) -> None:
        tokens = [t for _, new in rows for t in new]
        starts = torch.tensor([0, *(len(new) for _, new in rows)]).cumsum(0)
        for req_index, new in rows:
            history[req_index] = history.get(req_index, []) + new
        on = torch.full((len(rows),), 1.5 if penalized else 1.0, device=kernel_device)
        zero = torch.zeros(len(rows), device=kernel_device)
        record_tokens(
            torch.tensor(tokens, device=kernel_device), starts.int().to(kernel_device),
            (starts[1:] - 1).to(kernel_device),
            torch.tensor([len(history[r]) for r, _ in rows], dtype=I32, device=kernel_device),
            torch.tensor([r for r, _ in rows], dtype=I32, device=kernel_device),
            torch.tensor([len(prompts.get(r, [])) for r, _ in rows], dtype=I32, device=kernel_device),
            Penalties(on, zero, zero, state),
        )  # fmt: skip

    def check(req_index: int) -> None:
        count = len(prompts[req_index])
        output = Counter(history[req_index][count:])
        assert state.counts[req_index].tolist() == [output[t] for t in range(vocab)]
        seen = unpacked_bits(state.seen[req_index].cpu(), vocab)
        assert set(seen.nonzero().flatten().tolist()) == set(history[req_index])

    step([(4, prompts[4][:10]), (1, prompts[1])])
    step([(1, [5]), (4, prompts[4][10:])])
    step([(4, [69]), (1, [5])])
    step([(4, [69]), (1, [0])])
    check(4)
    check(1)
    history[1] = []  # another sequence takes the id; its prompt was computed once already, with two tokens after it
    prompts[1] = [3, 4]
    step([(1, [3, 4, 4, 64])])
    check(1)
    check(4)
    before = state.counts.clone(), state.seen.clone()
    step([(2, [1, 2])], penalized=False)
    assert torch.equal(state.counts, before[0])
    assert torch.equal(state.seen, before[1])


def test_counts_follow_a_request_that_steps_back(op_device: torch.device, rng: torch.Generator) -> None:
    """Random steps of three sequences: forward, back into the output or the prompt, from the start, and without
    penalties, after which all tokens are counted. Counts and bits are those of the sequence's tokens."""
    vocab, longest, pick = 70, 60, random.Random(int(torch.randint(1 << 30, (1,), generator=rng)))
    state = PenaltyState.allocate(4, vocab, longest, op_device)
    state.seen.fill_(-1)
    state.counts.fill_(9)  # of sequences that ended
    sequences: list[list[int]] = [[], [], []]
    prompt_lens = [0, 7, 20]
    checked = 0
    for _ in range(60):
        rows, on, ends = pick.sample(range(3), pick.randint(1, 3)), [], []
        new: list[list[int]] = []
        for row in rows:
            sequence = sequences[row]
            start = pick.choice([len(sequence), len(sequence), max(0, len(sequence) - pick.randint(1, 9)), 0])
            start = 0 if start > longest - 8 else start
            new.append([pick.randrange(vocab) for _ in range(pick.randint(1, 30 if start == 0 else 6))])
            sequences[row] = sequence[:start] + new[-1]
            ends.append(len(sequences[row]))
            on.append(pick.choice([1.5, 1.5, 1.0]))
        zero = torch.zeros(len(rows), device=op_device)
        int32 = partial(torch.tensor, dtype=I32, device=op_device)
        record_tokens(
            torch.tensor([token for tokens in new for token in tokens], device=op_device),
            int32([0, *itertools.accumulate(map(len, new))]),
            torch.tensor(list(itertools.accumulate(map(len, new))), device=op_device) - 1, int32(ends),
            int32([row + 1 for row in rows]),
            int32([prompt_lens[row] for row in rows]),
            Penalties(torch.tensor(on, device=op_device), zero, zero, state),
        )  # fmt: skip
        for row, penalty in zip(rows, on, strict=True):
            assert state.history[row + 1, : len(sequences[row])].tolist() == sequences[row]
            if penalty > 1:
                output = Counter(sequences[row][prompt_lens[row] :])
                assert state.counts[row + 1].tolist() == [output[token] for token in range(vocab)]
                bits = unpacked_bits(state.seen[row + 1].cpu(), vocab)
                assert set(bits.nonzero().flatten().tolist()) == set(sequences[row])
                checked += 1
    assert checked > 60


def test_records_out_of_range_are_ignored(kernel_device: torch.device) -> None:
    """Padding, request indices and tokens out of range, and starts beyond the tokens change nothing."""
    state = PenaltyState.allocate(3, 40, 9, kernel_device)
    ones = torch.full((5,), 2.0, device=kernel_device)
    record_tokens(
        torch.tensor([-1, 40, 2**40, 7], device=kernel_device),
        torch.tensor([0, 4, 4, 4, 9, 9], dtype=I32, device=kernel_device),
        torch.tensor([3, 3, 3, 8, 8], device=kernel_device),
        torch.tensor([4, 1, 3, 5, 1], dtype=I32, device=kernel_device),
        torch.tensor([2, 0, 1, 3, -1], dtype=I32, device=kernel_device),
        torch.zeros(5, dtype=I32, device=kernel_device), Penalties(ones, ones, ones, state),
    )  # fmt: skip
    assert state.counts.nonzero().tolist() == [[2, 7]]
    assert state.seen.nonzero().tolist() == [[2, 0]]
    assert int(state.seen[2, 0]) == 1 << 7


def penalties_of(vocab: int) -> Penalties:
    return Penalties(torch.ones(2), torch.ones(2), torch.ones(2), PenaltyState.allocate(2, vocab, 9, CPU))


NONE = torch.zeros(2, dtype=I32)
LISTS = torch.zeros(2, 3, dtype=I32)
BIAS = LogitBias(torch.zeros(2, 2, 3, dtype=I32), torch.zeros(2, 2, 3), LISTS)
BAD = {
    "req_indices": (
        {"penalties": penalties_of(8), "req_indices": None},
        "req_indices: penalties and bias need",
    ),
    "req_indices_for_bias": ({"bias": BIAS, "req_indices": None}, "req_indices: penalties and bias need"),
    "counts": ({"penalties": penalties_of(9)}, "state.counts: expected shape"),
    "bias_values": (
        {"bias": LogitBias(BIAS.tokens, torch.zeros(2, 2, 4), LISTS)},
        "bias.values: expected shape",
    ),
    "mask_words": ({"token_mask": TokenMask(LISTS[:, :2], NONE)}, "mask_words: expected shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_tensors_are_named(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(ShapeError, match=message):
        sample(*arguments(torch.zeros(2, 8), 0.0), **{"req_indices": NONE, **changes})


def test_no_rows(kernel_device: torch.device) -> None:
    """Without options, and with an empty bias and truncation."""
    args = arguments(torch.zeros(0, 9, device=kernel_device), 0.0)
    none = torch.zeros(0, dtype=I32, device=kernel_device)
    bias = LogitBias.allocate(3, 0, kernel_device)
    for options in ({}, {"req_indices": none, "bias": bias, "truncation": truncation(0, kernel_device)}):
        out = sample(*args, **options)
        assert (tuple(out.shape), out.dtype) == ((0,), torch.int32)


@pytest.mark.gpu
def test_large_state_in_a_graph(rng: torch.Generator) -> None:
    """record_tokens and sample captured together: replays count on, and draw what eager calls draw."""
    device, vocab, rows = torch.device("cuda"), 128256, 32
    sequences = [(torch.randint(0, vocab, (900,), generator=rng).tolist(), [r, r]) for r in range(rows)]
    penalties, req_indices = penalties_with(sequences, vocab, device, 1.2, 0.3, 0.2)
    twin, _ = penalties_with(sequences, vocab, device, 1.2, 0.3, 0.2)
    logits = torch.randn(rows, vocab, generator=rng).to(device, torch.bfloat16)
    options = truncation(rows, device, top_k=50, top_p=0.9)
    args = list(arguments(logits, 0.8, position=902))
    tokens = torch.arange(rows, device=device)
    starts = torch.arange(rows + 1, dtype=I32, device=device)
    prompt_lens = torch.full((rows,), 900, dtype=I32, device=device)

    def step(which: Penalties) -> torch.Tensor:
        args[3].add_(1)
        record_tokens(tokens, starts, starts[:-1].long(), args[3], req_indices, prompt_lens, which)
        out = sample(*args, truncation=options, penalties=which, req_indices=req_indices)
        tokens.copy_(out)
        return out

    position, first = args[3].clone(), tokens.clone()
    eager = [step(twin).clone() for _ in range(4)]
    args[3].copy_(position)
    tokens.copy_(first)
    kept = penalties.state.seen.clone(), penalties.state.counts.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(penalties)
    penalties.state.seen.copy_(kept[0])
    penalties.state.counts.copy_(kept[1])
    for expected in eager:
        graph.replay()
        assert torch.equal(out, expected)
    assert torch.equal(penalties.state.counts, twin.state.counts)
    assert torch.equal(penalties.state.seen, twin.state.seen)


def test_greedy_rows_take_the_best_penalized_token_with_any_truncation(
    kernel_device: torch.device, rng: torch.Generator
) -> None:
    logits = 2 * torch.randn(4, VOCAB, generator=rng)
    setting = (1.5, 0.5, 0.5)
    expected = torch.stack([formula(logits[r], *SEQUENCES[r], *setting) for r in range(4)]).argmax(-1)
    penalties, req_indices = penalties_with(SEQUENCES, VOCAB, kernel_device, *setting)
    options = truncation(4, kernel_device, top_k=[1, 0, 5, 1], top_p=[0.9, 0.0, 0.9, 1.0], min_p=[0.1, 0.1, 0.0, 0.0])
    args = arguments(logits.to(kernel_device), [1.0, 1.0, 0.0, 1.0])
    assert sample(*args, truncation=options, penalties=penalties, req_indices=req_indices).tolist() == expected.tolist()
