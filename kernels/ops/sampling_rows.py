"""Second pass of sampling, a program per row: the best of the row's parts, or the draw of a row that truncates.

min-p, top-k and top-p each keep the tokens from some logit upwards, so a row keeps what is at or above one threshold.
It is found in two steps. The groups' highest logits give a lower bound of it, and what reaches the bound is mostly a
short list. The list is then searched by bisection in registers. Rows that keep too much for a list read all of their
logits again, a few times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import (
    CHUNK,
    MIN_HEAT,
    NOWHERE,
    QUARTER,
    best_of,
    gumbel,
    key_of,
    largest_reaching,
    processed_logits,
    random_words,
    row_options,
    row_values,
    token_noise,
    value_of,
    weight,
)
from graphrt.kernels.types import NO_TOKEN

LIST = 2048
"""Tokens that a row's list holds."""

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_WIDTH = tl.constexpr(1024)  # tokens that are looked at side by side

_SURE = tl.constexpr(1.0001)  # a bound on masses holds in spite of roundings where it holds by this factor
_GUESS = tl.constexpr(0.04)  # half the width in which top-p's threshold is sought first, as a share of the mass
_GUESS_KEYS = tl.constexpr(1 << 10)


@triton.jit(do_not_specialize=["num_parts", "num_groups", "state_rows", "bias_rows", "bias_capacity", "num_masks"])
def sample_rows_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    seq_lens_ptr,
    row_ids_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seen_ptr,
    counts_ptr,
    bias_tokens_ptr,
    bias_values_ptr,
    bias_counts_ptr,
    mask_words_ptr,
    mask_index_ptr,
    best_scores_ptr,
    best_tokens_ptr,
    group_best_ptr,
    group_mass_ptr,
    list_groups_ptr,
    list_tokens_ptr,
    list_logits_ptr,
    out_ptr,
    vocab_size,
    stride_logits,
    state_rows,
    bias_rows,
    bias_capacity,
    num_masks,
    num_groups,
    num_parts,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    LIST: tl.constexpr,
):
    row = tl.program_id(0)
    heat, top_k, top_p, min_p, truncates = row_options(
        row, vocab_size, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr
    )
    token = NOWHERE
    plain = True
    if top_k_ptr is not None:
        plain = truncates == 0
        if truncates:
            source = (
                (logits_ptr, mask_words_ptr, bias_tokens_ptr, bias_values_ptr, seen_ptr, counts_ptr),
                row_values(
                    row, stride_logits, vocab_size, row_ids_ptr, repetition_ptr, presence_ptr, frequency_ptr,
                    state_rows, bias_counts_ptr, bias_rows, bias_capacity, mask_index_ptr, num_masks,
                ),
            )  # fmt: skip
            noise_at = (seeds_ptr, seq_lens_ptr, row)
            per_heat = 1.0 / tl.maximum(heat, MIN_HEAT)
            groups = tl.arange(0, GROUPS)
            at = row.to(tl.int64) * num_groups + groups
            group_best = tl.load(group_best_ptr + at, mask=groups < num_groups, other=float("-inf"))
            group_mass = tl.load(group_mass_ptr + at, mask=groups < num_groups, other=0.0)
            best = tl.max(group_best, 0)
            total = tl.sum(group_mass * weight(group_best, best, per_heat), 0)
            floor = _floor(group_best, best, total, heat, per_heat, top_k, top_p, min_p)
            row_list_tokens_ptr = list_tokens_ptr + row.to(tl.int64) * LIST
            row_list_logits_ptr = list_logits_ptr + row.to(tl.int64) * LIST
            length = _make_list(
                source, groups, group_best, floor, list_groups_ptr + row.to(tl.int64) * num_groups, row_list_tokens_ptr,
                row_list_logits_ptr, GROUP, LIST,
            )  # fmt: skip
            if length <= LIST:
                token = _draw_from_list(
                    row_list_tokens_ptr, row_list_logits_ptr, length, noise_at, best, floor, total, heat, per_heat,
                    top_k, top_p, min_p, LIST,
                )  # fmt: skip
            else:
                token = _draw_from_row(
                    source, noise_at, vocab_size, best, floor, total, heat, per_heat, top_k, top_p,
                    min_p, CHUNKS,
                )  # fmt: skip
    if plain:
        parts = tl.arange(0, PARTS)
        partials = row * num_parts + parts
        scores = tl.load(best_scores_ptr + partials, mask=parts < num_parts, other=float("-inf"))
        tokens = tl.load(best_tokens_ptr + partials, mask=parts < num_parts, other=NOWHERE)
        _, token = best_of(scores, tokens)
    tl.store(out_ptr + row, tl.where(token < NOWHERE, token, _NO_TOKEN))


@triton.jit
def _floor(group_best, best, total, heat, per_heat, top_k, top_p, min_p):
    """A logit below which nothing is kept, from the groups' highest logits.

    Where k groups reach a logit, so do k tokens. Where the best tokens of some groups hold top-p of the mass, no token
    below all of them is kept. The latter speaks of the whole mass, so it serves rows without top-k and min-p only.
    """
    floor = tl.where(min_p > 0, best + heat * tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
    by_count = top_k > 0
    weights = weight(group_best, best, per_heat)
    amounts = tl.where(by_count, 1.0, weights)
    need = tl.where(by_count, top_k.to(tl.float32), top_p * total * _SURE)
    useful = by_count | ((top_p < 1) & (min_p <= 0))
    # Most searches are short of some ten steps when they begin at the lowest of the groups, not at -inf.
    lowest = tl.min(tl.where(group_best > float("-inf"), group_best, float("inf")), 0)
    lowest = tl.maximum(tl.minimum(lowest, best), floor)
    useful = useful & (tl.sum(tl.where(group_best >= lowest, amounts, 0.0), 0) >= need)
    low = key_of(lowest)
    high = tl.where(useful, key_of(best) + 1, low)
    low, high = largest_reaching(group_best, amounts, need, low, high, 1)
    return tl.where(useful, value_of(low), floor)


@triton.jit
def _make_list(
    source, groups, group_best, floor, groups_ptr, tokens_ptr, logits_ptr, GROUP: tl.constexpr, LIST: tl.constexpr
):
    """List the tokens that reach the floor, with their processed logits; the length, or more than LIST: too many."""
    wide: tl.constexpr = _WIDTH // GROUP
    chosen = (group_best >= floor) & (group_best > float("-inf"))
    count = tl.sum(chosen.to(tl.int32), 0)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups_ptr + place, groups, mask=chosen)
    tl.debug_barrier()  # what some threads have stored, others load
    length = 0
    start = 0
    while (start < count) & (length <= LIST):
        listed = start + tl.arange(0, wide)
        group = tl.load(groups_ptr + listed, mask=listed < count, other=NOWHERE // GROUP)
        tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        logits = tl.reshape(processed_logits(source, tokens), [_WIDTH])
        tokens = tl.reshape(tokens, [_WIDTH])
        taken = (logits >= floor) & (logits > float("-inf"))
        list_place = length + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(tokens_ptr + list_place, tokens, mask=taken & (list_place < LIST))
        tl.store(logits_ptr + list_place, logits, mask=taken & (list_place < LIST))
        length += tl.sum(taken.to(tl.int32), 0)
        start += wide
    tl.debug_barrier()
    return length


@triton.jit
def _draw_from_list(
    tokens_ptr,
    logits_ptr,
    length,
    noise_at,
    best,
    floor,
    total,
    heat,
    per_heat,
    top_k,
    top_p,
    min_p,
    LIST: tl.constexpr,
):
    """The draw among listed tokens, which hold all that are kept. Top-k's threshold first: top-p's mass is above it."""
    lanes = tl.arange(0, LIST)
    tokens = tl.load(tokens_ptr + lanes, mask=lanes < length, other=NOWHERE)
    logits = tl.load(logits_ptr + lanes, mask=lanes < length, other=float("-inf"))
    weights = weight(logits, best, per_heat)
    threshold = key_of(floor)
    end = key_of(best) + 1
    if (top_k > 0) & (top_k < length):
        ones = tl.full([LIST], 1.0, tl.float32)
        threshold, _ = largest_reaching(logits, ones, top_k.to(tl.float32), threshold, end, 1)
    if top_p < 1:
        if (top_k > 0) | (min_p > 0):
            total = tl.sum(tl.where(logits >= value_of(threshold), weights, 0.0), 0)
        threshold, _ = largest_reaching(logits, weights, top_p * total, threshold, end, 1)
    kept = (lanes < length) & (logits >= value_of(threshold))
    seeds_ptr, seq_lens_ptr, row = noise_at
    noise = token_noise(tl.load(seeds_ptr + row), tokens, tl.load(seq_lens_ptr + row))
    scores = tl.where(kept, logits + heat * noise, float("-inf"))
    _, token = best_of(scores, tl.where(kept, tokens, NOWHERE))
    return token


@triton.jit
def _draw_from_row(
    source,
    noise_at,
    vocab_size,
    best,
    floor,
    total,
    heat,
    per_heat,
    top_k,
    top_p,
    min_p,
    CHUNKS: tl.constexpr,
):
    """The draw of a row that keeps more tokens than a list holds.

    The threshold is a key in [low, high). For top-p it need not be known exactly: the best score over all tokens
    decides once its own logit is known to be kept. That is the case after one pass in most draws.
    """
    low = key_of(floor)
    high = low + 1
    if top_k > 0:
        # Exact: a quarter of the keys are left after each pass.
        high = key_of(best) + 1
        need = top_k.to(tl.float32)
        enough, _, _ = _amounts_from(source, vocab_size, low, low, low, best, 0.0)
        if enough < need:
            high = low + 1
        while high - low > 1:
            step = (high - low + 3) // 4
            a, b, c = low + step, low + 2 * step, low + 3 * step
            low, high = _narrowed(source, vocab_size, low, high, a, b, c, best, 0.0, need)
    target = top_p * total
    guess_low = low
    guess_high = low
    if top_p < 1:
        if (top_k > 0) | (min_p > 0):
            total, _, _ = _amounts_from(source, vocab_size, low, low, low, best, per_heat)
            target = top_p * total
        high = key_of(best) + 1
        # Tokens at about equal distances are a sample: it says where to look.
        draws = tl.arange(0, _WIDTH)
        distance = tl.cdiv(vocab_size, _WIDTH)
        logits = processed_logits(source, draws * distance + draws % distance)
        logits = tl.where(logits >= value_of(low), logits, float("-inf"))
        weights = weight(logits, best, per_heat)
        mass = tl.sum(weights, 0)
        guess_low, _ = largest_reaching(logits, weights, (top_p + _GUESS) * mass, low, high, _GUESS_KEYS)
        guess_high, _ = largest_reaching(logits, weights, (top_p - _GUESS) * mass, low, high, _GUESS_KEYS)

    # A lane sees the four tokens of one counter in each chunk, and keeps the best of those at or above `low`.
    seeds_ptr, seq_lens_ptr, row = noise_at
    seed = tl.load(seeds_ptr + row)
    position = tl.load(seq_lens_ptr + row)
    floor = value_of(low)
    lanes = tl.arange(0, QUARTER)
    scores = tl.full([QUARTER], float("-inf"), tl.float32)
    tokens = tl.full([QUARTER], NOWHERE, tl.int32)
    winners = tl.full([QUARTER], float("-inf"), tl.float32)  # the logits of the best
    mass_low = tl.zeros([QUARTER], tl.float32)
    mass_high = tl.zeros([QUARTER], tl.float32)
    from_low = value_of(guess_low)
    from_high = value_of(guess_high)
    for chunk in range(0, tl.cdiv(vocab_size, CHUNK)):
        words = random_words(seed, lanes + chunk * QUARTER, position)
        for word in tl.static_range(4):
            token = lanes + chunk * CHUNK + word * QUARTER
            logits = processed_logits(source, token)
            weights = weight(logits, best, per_heat)
            mass_low += tl.where(logits >= from_low, weights, 0.0)
            mass_high += tl.where(logits >= from_high, weights, 0.0)
            noise = heat * gumbel(words[word])
            scores, tokens, winners = _better_from(logits, noise, token, floor, scores, tokens, winners)
    low, high = _narrow(low, high, guess_low, tl.sum(mass_low, 0), target)
    low, high = _narrow(low, high, guess_high, tl.sum(mass_high, 0), target)

    token, key = _leader(scores, tokens, winners)
    while (token < NOWHERE) & (key < high - 1):
        if key >= low:
            # Not known yet: whether the tokens above it hold less than top-p. Halving ends what chance may draw out.
            middle = low + (high - low) // 2
            low, high = _narrowed(source, vocab_size, low, high, key + 1, middle, middle, best, per_heat, target)
        else:
            # Dropped: the next best of its lane takes its place. All other lanes still have their best.
            lane = token % QUARTER
            chunks = tl.arange(0, CHUNKS)
            words = random_words(seed, chunks * QUARTER + lane, position)
            lane_scores = tl.full([CHUNKS], float("-inf"), tl.float32)
            lane_tokens = tl.full([CHUNKS], NOWHERE, tl.int32)
            lane_winners = tl.full([CHUNKS], float("-inf"), tl.float32)
            for word in tl.static_range(4):
                other = chunks * CHUNK + word * QUARTER + lane
                lane_scores, lane_tokens, lane_winners = _better_from(
                    processed_logits(source, other), heat * gumbel(words[word]), other, value_of(low), lane_scores,
                    lane_tokens, lane_winners,
                )  # fmt: skip
            score, next_token = best_of(lane_scores, lane_tokens)
            winner = tl.max(tl.where(lane_tokens == next_token, lane_winners, float("-inf")), 0)
            scores = tl.where(lanes == lane, score, scores)
            tokens = tl.where(lanes == lane, next_token, tokens)
            winners = tl.where(lanes == lane, winner, winners)
        token, key = _leader(scores, tokens, winners)
    return token


@triton.jit
def _leader(scores, tokens, winners):
    """The token of the best score, and the key of its logit."""
    _, token = best_of(scores, tokens)
    return token, key_of(tl.max(tl.where(tokens == token, winners, float("-inf")), 0))


@triton.jit
def _better_from(logits, noise, tokens, floor, best_scores, best_tokens, best_logits):
    """As `better_of`, among tokens at or above the floor, with the logits of the best."""
    able = (logits >= floor) & (logits > float("-inf"))
    scores = tl.where(able, logits + noise, float("-inf"))
    tokens = tl.where(able, tokens, NOWHERE)
    wins = (scores > best_scores) | ((scores == best_scores) & (tokens < best_tokens))
    return (
        tl.where(wins, scores, best_scores),
        tl.where(wins, tokens, best_tokens),
        tl.where(wins, logits, best_logits),
    )


@triton.jit
def _narrow(low, high, key, amount, need):
    """The bounds of a threshold after a look at one key: it is there or above where the amount reaches the need."""
    reaches = amount >= need
    return (
        tl.where(reaches, tl.maximum(low, key), low),
        tl.where(reaches, high, tl.minimum(high, key)),
    )


@triton.jit
def _narrowed(source, vocab_size, low, high, key_a, key_b, key_c, best, per_heat, need):
    """The bounds after a pass over the row that looks at three keys."""
    amount_a, amount_b, amount_c = _amounts_from(source, vocab_size, key_a, key_b, key_c, best, per_heat)
    low, high = _narrow(low, high, key_a, amount_a, need)
    low, high = _narrow(low, high, key_b, amount_b, need)
    return _narrow(low, high, key_c, amount_c, need)


@triton.jit
def _amounts_from(source, vocab_size, key_a, key_b, key_c, best, per_heat):
    """The masses of the row's tokens at or above three keys; their numbers where `per_heat` is 0."""
    from_a = value_of(key_a)
    from_b = value_of(key_b)
    from_c = value_of(key_c)
    amount_a = tl.zeros([_WIDTH], tl.float32)
    amount_b = tl.zeros([_WIDTH], tl.float32)
    amount_c = tl.zeros([_WIDTH], tl.float32)
    start = 0
    while start < vocab_size:
        logits = processed_logits(source, start + tl.arange(0, _WIDTH))
        weights = weight(logits, best, per_heat)
        amount_a += tl.where(logits >= from_a, weights, 0.0)
        amount_b += tl.where(logits >= from_b, weights, 0.0)
        amount_c += tl.where(logits >= from_c, weights, 0.0)
        start += _WIDTH
    return tl.sum(amount_a, 0), tl.sum(amount_b, 0), tl.sum(amount_c, 0)
