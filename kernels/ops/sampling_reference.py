"""Reference of `sampling*.py` in plain torch, for any device, using one sort per row instead of searches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from graphrt.kernels.types import NO_TOKEN

NOISE_GROUP = 32
"""Adjacent vocabulary entries whose least exponential variate is drawn first; part of the noise definition."""

MAX_TEMPERATURE = 1e30
"""Largest temperature, at which all finite logits have the same probability; higher values are clamped to it."""

_MASK32 = 0xFFFFFFFF
_PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)


def philox4x32(
    seed: torch.Tensor, counter0: torch.Tensor, counter1: torch.Tensor, counter2: int = 0
) -> tuple[torch.Tensor, ...]:
    """Return four 32-bit words (as int64) of Philox-4x32-10 at counter (c0, c1, c2, 0), key (seed low, seed high).

    Arguments are int64 and broadcast; counters are from 0 to 2**32 - 1. Bitwise equal to `tl.philox`.
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    c0, c1 = torch.broadcast_tensors(counter0, counter1)
    c2, c3 = torch.full_like(c0, counter2), torch.zeros_like(c0)
    for _ in range(10):
        low_a, high_a = _multiply32(c0, _PHILOX_MULTIPLIERS[0])
        low_b, high_b = _multiply32(c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = (key0 + _PHILOX_KEYS[0]) & _MASK32, (key1 + _PHILOX_KEYS[1]) & _MASK32
    return c0, c1, c2, c3


def _multiply32(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the low and high 32 bits of x * factor, by halves of the factor, so that each product fits in int64."""
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16)
    middle = (low >> 16) + high
    return (middle << 16 | low & 0xFFFF) & _MASK32, middle >> 16


def exponential_reference(words: torch.Tensor, bits: int = 32) -> torch.Tensor:
    """Return exponential variates (float32) of random words of `bits` bits: -log(1 - u), u = (word + 0.5) / 2**bits.

    Small variates decide a Gumbel-max draw, so they are computed by a series to keep their relative precision.
    """
    u = words.float() * 2.0**-bits + 2.0 ** -(bits + 1)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return torch.where(u < 2.0**-6, series, -torch.log((1.0 - u).clamp_min(2.0**-25)))


def noise_reference(seeds: torch.Tensor, seq_lens: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return Gumbel noise (float32, [rows, vocab]) at (seed, vocabulary index, position), -log of exponential variates.

    In each group of 32 neighbors, the least variate is drawn first, from a separate word. It equals an exponential
    variate divided by 32, which has the distribution of the minimum of 32 independent variates. The word's lowest five
    bits select the token that has the least variate. All other variates exceed it by independent exponential variates,
    because the distribution is memoryless. One word can thus exclude a whole group, and the noise of all tokens is
    still independent.
    """
    device, positions = seeds.device, seq_lens[:, None].long() & _MASK32
    groups = -(-vocab // NOISE_GROUP)
    quads = philox4x32(seeds[:, None], torch.arange(-(-groups // 4), device=device)[None], positions, 1)
    of_group = torch.stack(quads, 2).flatten(1)[:, :groups].repeat_interleave(NOISE_GROUP, 1)[:, :vocab]
    least = exponential_reference(of_group >> 5, 27) / NOISE_GROUP
    tokens = torch.arange(vocab, device=device)[None]
    above = exponential_reference(philox4x32(seeds[:, None], tokens, positions)[0])
    return -torch.log(torch.where((of_group & 31) == tokens % NOISE_GROUP, least, least + above))


class SampleInputs(NamedTuple):
    """The tensors of `graphrt::sample`, in the order of its arguments; see `sample` for their shapes."""

    logits: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    seq_lens: torch.Tensor
    req_indices: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bias_tokens: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    bias_lists: torch.Tensor | None = None
    mask_words: torch.Tensor | None = None
    mask_index: torch.Tensor | None = None


def sample_reference(*tensors: torch.Tensor | None) -> torch.Tensor:
    """Reference of `graphrt::sample`: argmax, over the kept tokens, of processed logits + temperature * noise."""
    inputs = SampleInputs(*tensors)  # type: ignore[arg-type]
    logits, temperatures, seeds, seq_lens, _, top_k, top_p, min_p, *_ = inputs
    vocab = logits.shape[1]
    processed = processed_reference(inputs)
    scores = processed.clone()
    hot = temperatures > 0
    if top_k is not None:
        hot &= top_k != 1
    if top_p is not None:
        hot &= ~(top_p <= 0)
    drawn = hot.nonzero()[:, 0]
    if len(drawn):
        heat = temperatures[drawn, None].clamp_max(MAX_TEMPERATURE)
        scores[drawn] += heat * noise_reference(seeds[drawn], seq_lens[drawn], vocab)
    possible = processed > float("-inf")
    if top_k is not None and top_p is not None and min_p is not None:
        for row in drawn.tolist():
            heat_of_row = min(float(temperatures[row]), MAX_TEMPERATURE)
            possible[row] &= kept_reference(
                processed[row], heat_of_row, int(top_k[row]), float(top_p[row]), float(min_p[row])
            )
    scores = torch.where(possible, scores, float("-inf"))
    best = scores.max(-1, keepdim=True).values
    at_best = possible & (scores == best)
    lowest = torch.where(at_best, torch.arange(vocab, device=logits.device), vocab).min(-1).values
    return torch.where(lowest < vocab, lowest, NO_TOKEN).int()


def processed_reference(inputs: SampleInputs) -> torch.Tensor:
    """Return a float32 copy of the logits after token masks, biases and penalties, in this order."""
    (logits, _, _, seq_lens, req_indices, _, _, _, repetition, presence, frequency, seen, counts, bias_tokens,
     bias_values, bias_lists, mask_words, mask_index) = inputs  # fmt: skip
    out = logits.to(torch.float32, copy=True)
    rows, vocab = out.shape
    every = range(rows)
    if mask_words is not None and mask_index is not None:
        for row in every:
            index = int(mask_index[row])
            if 0 <= index < len(mask_words):
                out[row, ~unpacked_bits(mask_words[index], vocab)] = float("-inf")
    if req_indices is None:
        return out
    if bias_tokens is not None and bias_values is not None and bias_lists is not None:
        for row in every:
            req_index = int(req_indices[row])
            if 0 <= req_index < len(bias_lists):
                *counts_of, min_len = bias_lists[req_index].tolist()
                early = int(int(seq_lens[row]) < min_len)  # an index, not a mask
                count = min(max(counts_of[early], 0), bias_tokens.shape[2])
                tokens, values = bias_tokens[req_index, early, :count].long(), bias_values[req_index, early, :count]
                inside = (tokens >= 0) & (tokens < vocab)
                out[row, tokens[inside]] += values[inside]
    if repetition is None or presence is None or frequency is None or seen is None or counts is None:
        return out
    factors, offsets, slopes = effective_penalties(repetition, presence, frequency)
    for row in every:
        req_index = int(req_indices[row])
        if not 0 <= req_index < len(seen):
            continue
        if float(factors[row]) == 1 and float(offsets[row]) == 0 and float(slopes[row]) == 0:
            continue
        logit, occurred = out[row], counts[req_index]
        scaled = torch.where(logit > 0, logit / factors[row], logit * factors[row])
        logit = torch.where(unpacked_bits(seen[req_index], vocab), scaled, logit)
        logit = logit - slopes[row] * occurred.float()
        out[row] = torch.where(occurred > 0, logit - offsets[row], logit)
    return out


def effective_penalties(
    repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the three penalties, with 1, 0 and 0 for invalid values."""
    meant = (repetition > 0) & (repetition < float("inf"))
    return (
        torch.where(meant, repetition, 1.0),
        torch.where(presence.isfinite(), presence, 0.0),
        torch.where(frequency.isfinite(), frequency, 0.0),
    )


def unpacked_bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` bits of int32 words as bool, starting with the lowest bit of each word."""
    bits = torch.arange(32, device=words.device)
    return ((words[:, None] >> bits) & 1).flatten()[:count].bool()


def kept_reference(processed: torch.Tensor, heat: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return which tokens of a row min-p, top-k and top-p keep, in this order; `processed` is float32, [vocab].

    Tokens with equal logits are kept or dropped together. Probabilities are float64.
    """
    possible = processed > float("-inf")
    kept = possible.clone()
    if not possible.any():
        return kept
    best = processed[possible].max()
    below = torch.where(processed >= best, 0.0, processed.double() - best.double())
    weights = torch.where(possible, (below / heat).exp(), 0.0)
    if min_p > 0:
        kept &= below >= heat * math.log(min(min_p, 1.0))
    if 0 < top_k < int(kept.sum()):
        kept &= processed >= processed[kept].sort(descending=True).values[top_k - 1]
    if 0 < top_p < 1:
        order = torch.where(kept, processed, float("-inf")).argsort(descending=True)[: int(kept.sum())]
        ordered, mass = processed[order], weights[order].cumsum(0)
        # A token is kept if the tokens with higher logits have less than top_p of the mass. Tokens with equal logits
        # share the mass above the first of them.
        above = torch.cat([mass.new_zeros(1), mass[:-1]])
        first = torch.searchsorted(-ordered.double(), -ordered.double())
        kept[order] = above[first] < top_p * mass[-1]
    return kept


def record_tokens_reference(c: Any) -> None:
    """Reference of `graphrt::record_tokens`."""
    tokens, seen, counts, (max_reqs, vocab) = c.tokens, c.seen, c.counts, c.counts.shape
    factors, offsets, slopes = effective_penalties(c.repetition, c.presence, c.frequency)
    starts = c.query_start_loc.tolist()
    for row, req_index in enumerate(c.req_indices.tolist()):
        penalized = bool(factors[row] != 1) or bool(offsets[row] != 0) or bool(slopes[row] != 0)
        start, end = max(starts[row], 0), min(int(c.last[row]) + 1, len(tokens))
        if not (0 <= req_index < max_reqs and start < end):
            continue
        first = int(c.lens[row]) - (end - start)
        history, counted = c.history[req_index], int(c.counted_lens[req_index])
        new = tokens[start : min(end, start + len(history) - first)]
        history[first : first + len(new)] = torch.where((new >= 0) & (new < 2**31), new, NO_TOKEN)
        if not penalized:
            c.counted_lens[req_index] = 0 if first < counted else counted
            continue
        c.counted_lens[req_index] = first + end - start
        prompt_len = int(c.prompt_lens[row])
        known = torch.cat((history[:first].long(), tokens[start:end]))
        valid = (known >= 0) & (known < vocab)
        output = valid & (torch.arange(len(known), device=known.device) >= prompt_len)
        counts[req_index] = torch.bincount(known[output], minlength=vocab).int()
        bits = torch.zeros(32 * seen.shape[1], dtype=torch.bool, device=seen.device)
        bits[known[valid]] = True
        places = torch.arange(32, device=seen.device)
        words = (bits.view(-1, 32).long() << places).sum(1)
        seen[req_index] = torch.where(words < 2**31, words, words - 2**32).int()


def token_logprobs_reference(c: Any) -> None:
    """Reference of `graphrt::token_logprobs`."""
    logits, logprobs, ranks, top_tokens, top_logprobs = c.logits, c.logprobs, c.ranks, c.top_tokens, c.top_logprobs
    logprobs.fill_(float("nan"))
    ranks.zero_()
    top_tokens.fill_(NO_TOKEN)
    top_logprobs.fill_(float("nan"))
    vocab = logits.shape[1]
    for row, asked in enumerate(c.wanted.tolist()):
        logit = logits[row].float()
        logit = torch.where(logit > float("-inf"), logit, float("-inf"))
        best = logit.max()
        if asked < 0 or best == float("-inf"):
            continue
        below = torch.where(logit >= best, 0.0, logit - best)
        logprob = below - below.double().exp().sum().log().float()
        order = torch.sort(logit, descending=True, stable=True).indices
        token = int(c.tokens[row])
        if 0 <= token < vocab:
            logprobs[row] = logprob[token]
            ranks[row] = int((order == token).nonzero()) + 1
        count = min(asked, top_tokens.shape[1], int((logit > float("-inf")).sum()))
        top_tokens[row, :count] = order[:count].int()
        top_logprobs[row, :count] = logprob[order[:count]]
