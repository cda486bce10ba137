"""Draws among many tokens of a row: by bounds of groups, or by passes over the row to find a threshold."""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import (
    LARGEST,
    NOWHERE,
    WORD,
    finite,
    has_bit,
    key_of,
    largest_reaching,
    logits_of_words,
    most_noise,
    next_changed,
    noise_of_words,
    raw_logits,
    split_words,
    value_of,
    weight,
)

_WORDS = tl.constexpr(32)  # words of tokens that are processed in parallel
_CHANGED_WORDS = tl.constexpr(1024)  # changed words that are processed in parallel
_PASS = tl.constexpr(4096)  # tokens that a pass over the row processes in parallel
_SIDE = tl.constexpr(8)  # neighboring tokens of a thread
_STAGES = tl.constexpr(4)  # pipelined loads of a pass
_GUESS = tl.constexpr(0.04)  # half width of the first search range of top-p, as a share of the mass
_GUESS_KEYS = tl.constexpr(1 << 16)


_TOP_K = tl.constexpr(0)  # phases: find the threshold of top-k, in rows that also have top-p
_MASS = tl.constexpr(1)  # sum the mass that top-k and min-p keep, for top-p
_DRAW = tl.constexpr(2)


@triton.jit
def draw_by_passes(
    source,
    plain_words_row_ptr,
    noise_at,
    group_ptrs,
    best,
    floor,
    total,
    heat,
    rate,
    top_k,
    top_p,
    min_p,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Draw among all kept tokens of a row.

    The threshold is a key in [low, high) and need not be known exactly. The token with the best score among all tokens
    at and above `low` is the result once its logit is known to be kept. One pass over the row usually suffices.
    """
    low = key_of(floor)
    by_count = top_k > 0
    phase = tl.where(by_count & (top_p < 1), _TOP_K, tl.where((top_p < 1) & (min_p > 0), _MASS, _DRAW))
    high = key_of(best) + 1
    # Amounts are counts of tokens if best and rate are 0, else masses.
    amounts_best = tl.where(by_count, 0.0, best)
    amounts_rate = tl.where(by_count, 0.0, rate)
    need = tl.where(by_count, top_k.to(tl.float32), top_p * total)
    guesses = 0
    key_b = low
    key_c = low
    token = NOWHERE
    key = low - 1
    while (phase != _DRAW) | (key < high - 1):
        if (phase == _DRAW) & (key < low):
            token, logit = best_score(source, noise_at, group_ptrs, value_of(low), heat, GROUPS, GROUP)
            key = tl.where(token < NOWHERE, key_of(logit), high)
        if (phase != _DRAW) | (key < high - 1):
            if (phase != _MASS) & (guesses == 0):
                share = tl.where(amounts_rate == 0, need / source[1][1].to(tl.float32), top_p)
                key_b, key_c = _guesses(source, low, high, amounts_best, amounts_rate, share)
                guesses = 1
            # A token is kept unless the amount of the tokens above it reaches `need`.
            key_a = tl.where(phase == _DRAW, key + 1, tl.where(phase == _MASS, low, low + (high - low) // 2))
            amount_a, amount_b, amount_c = _amounts_from(
                source, plain_words_row_ptr, key_a, key_b, key_c, amounts_best, amounts_rate
            )
            if phase == _MASS:
                need = top_p * amount_a
                high = key_of(best) + 1
                phase = phase * 0 + _DRAW
            else:
                low, high = _narrow(low, high, key_a, amount_a, need)
                low, high = _narrow(low, high, key_b, amount_b, need)
                low, high = _narrow(low, high, key_c, amount_c, need)
                # Splitting the range into quarters bounds the number of passes.
                key_b = low + (high - low) // 4
                key_c = low + (high - low) * 3 // 4
                if (phase == _TOP_K) & (high - low <= 1):
                    phase = phase * 0 + _MASS
                    amounts_best = best
                    amounts_rate = rate
                    guesses = 0
    return token


@triton.jit
def best_of_groups(group_ptrs, GROUPS: tl.constexpr):
    """Return the highest logit of each group's unchanged tokens, and of its changed tokens."""
    groups = tl.arange(0, GROUPS)
    plain = tl.load(group_ptrs[0] + groups, mask=groups < group_ptrs[3], other=float("-inf"))
    changed = tl.load(group_ptrs[1] + groups, mask=groups < group_ptrs[4], other=float("-inf"))
    return plain, changed


@triton.jit
def best_score(source, noise_at, group_ptrs, floor, heat, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return the token with the best score among tokens that reach the floor (lowest id on ties), and its logit."""
    list_groups_row_ptr = group_ptrs[2]
    seed, position = noise_at
    per_group: tl.constexpr = GROUP // WORD
    lanes: tl.constexpr = _WORDS // per_group
    rows: tl.constexpr = GROUPS // lanes
    groups = tl.arange(0, GROUPS)
    plain_best, changed_best = best_of_groups(group_ptrs, GROUPS)
    group_best = tl.maximum(plain_best, changed_best)
    able = (group_best >= floor) & (group_best > float("-inf"))
    noise = most_noise(seed, position, GROUPS, GROUP)
    bounds = tl.reshape(tl.where(able, tl.fma(heat, noise, group_best), float("-inf")), [rows, lanes])
    groups = tl.reshape(groups, [rows, lanes])
    # The best score in each lane's best group is close to the overall best.
    firsts = tl.min(tl.where(bounds == tl.max(bounds, 0)[None, :], groups, NOWHERE), 0)
    score, token, logit = _best_of_groups(source, noise_at, firsts, floor, heat, per_group)
    # Without noise, the first of a lane's tied groups has the lowest token.
    enough = tl.where(heat > 0, score, float("inf"))
    chosen = (bounds >= enough) & (bounds > float("-inf")) & (groups != firsts[None, :])
    chosen = tl.reshape(chosen.to(tl.int32), [GROUPS])
    count = tl.sum(chosen, 0)
    if count > 0:
        place = tl.cumsum(chosen, 0) - 1
        tl.store(list_groups_row_ptr + place, tl.reshape(groups, [GROUPS]), mask=chosen != 0)
        tl.debug_barrier()  # threads load what others have stored
        start = 0
        while start < count:
            listed = start + tl.arange(0, lanes)
            group = tl.load(list_groups_row_ptr + listed, mask=listed < count, other=NOWHERE // GROUP)
            next_score, next_token, next_logit = _best_of_groups(source, noise_at, group, floor, heat, per_group)
            wins = (next_score > score) | ((next_score == score) & (next_token < token))
            score = tl.where(wins, next_score, score)
            token = tl.where(wins, next_token, token)
            logit = tl.where(wins, next_logit, logit)
            start += lanes
        tl.debug_barrier()  # a later search overwrites this list
    return token, logit


@triton.jit
def words_of_groups(groups, per_group: tl.constexpr):
    """Return the words of 32 tokens of some groups."""
    words = groups
    if per_group > 1:
        words = groups[:, None] * per_group + tl.arange(0, per_group)[None, :]
        words = tl.reshape(words, [groups.shape[0] * per_group])
    return words


@triton.jit
def _best_of_groups(source, noise_at, groups, floor, heat, per_group: tl.constexpr):
    """Return the best score in some groups, its token and its logit."""
    seed, position = noise_at
    words = words_of_groups(groups, per_group)
    tokens, logits = logits_of_words(source, words)
    able = (logits >= floor) & (logits > float("-inf"))
    # Scores and group bounds are rounded identically, so no score exceeds its group's bound.
    scores = tl.where(able, tl.fma(heat, noise_of_words(seed, position, words), logits), float("-inf"))
    score = tl.max(tl.max(scores, 1), 0)
    tokens = tl.where(able, tokens, NOWHERE)
    token = tl.min(tl.min(tl.where(scores == score, tokens, NOWHERE), 1), 0)
    return score, token, tl.max(tl.max(tl.where(tokens == token, logits, float("-inf")), 1), 0)


@triton.jit
def _guesses(source, low, high, best, rate, share):
    """Estimate two keys around a threshold from a sample of approximately equidistant words."""
    num_words = tl.cdiv(source[1][1], WORD)
    draws = tl.arange(0, _WORDS)
    distance = tl.cdiv(num_words, _WORDS)
    _, logits = logits_of_words(source, draws * distance + (draws * 7) % distance)
    logits = tl.reshape(logits, [_WORDS * WORD])
    logits = tl.where(logits >= value_of(low), logits, float("-inf"))
    weights = weight(logits, best, rate)
    mass = tl.where(rate == 0, 1.0 * _WORDS * WORD, tl.sum(weights, 0))
    need = share * mass
    spread = tl.where(rate == 0, 3.0 * tl.sqrt(need) + 1.0, _GUESS * mass)
    guess_low, _ = largest_reaching(logits, weights, need + spread, low, high, _GUESS_KEYS)
    guess_high, _ = largest_reaching(logits, weights, need - spread, guess_low, high, _GUESS_KEYS)
    return guess_low, guess_high


@triton.jit
def _narrow(low, high, key, amount, need):
    """Narrow a threshold's bounds by one key. The threshold is at or above the key if `amount` reaches `need`."""
    reaches = amount >= need
    return (
        tl.where(reaches, tl.maximum(low, key), low),
        tl.where(reaches, high, tl.maximum(tl.minimum(high, key), low + 1)),
    )


@triton.jit
def _amounts_from(source, plain_words_row_ptr, key_a, key_b, key_c, best, rate):
    """Return the mass of the row's tokens at or above each of three keys, or their number if best and rate are 0."""
    pointers, values = source
    vocab_size = values[1]
    row_ptr = pointers.logits + values[0]
    bounds = (_bound_of(key_a), _bound_of(key_b), _bound_of(key_c))
    at_best = (finite(best), rate)
    zeros = tl.zeros([_PASS // _SIDE], tl.float32)
    amounts = (zeros, zeros, zeros)
    lanes = tl.arange(0, _PASS // _SIDE)[:, None] * _SIDE + tl.arange(0, _SIDE)[None, :]
    full = vocab_size // _PASS
    for part in tl.range(0, full, num_stages=_STAGES):  # no mask, because this loop takes most of the time
        logits = tl.load(row_ptr + part * _PASS + lanes).to(tl.float32)
        logits = _plain_only(source, plain_words_row_ptr, part, logits)
        amounts = _with_amounts(amounts, logits, bounds, at_best)
    if full * _PASS < vocab_size:
        logits = _plain_only(source, plain_words_row_ptr, full, raw_logits(source, full * _PASS + lanes))
        amounts = _with_amounts(amounts, logits, bounds, at_best)
    sum_a = tl.sum(amounts[0], 0)
    sum_b = tl.sum(amounts[1], 0)
    sum_c = tl.sum(amounts[2], 0)
    if plain_words_row_ptr is not None:
        if values[2]:
            start = 0
            while start * WORD < vocab_size:
                words = start + tl.arange(0, _CHANGED_WORDS)
                words = tl.where(words * WORD < vocab_size, words, NOWHERE // WORD)
                _, changed, seen = split_words(source, words)
                while tl.max((changed != 0).to(tl.int32), 0) > 0:
                    _, logits, changed = next_changed(source, words, changed, seen)
                    weights = weight(logits, best, rate)
                    sum_a += tl.sum(tl.where(logits >= bounds[0], weights, 0.0), 0)
                    sum_b += tl.sum(tl.where(logits >= bounds[1], weights, 0.0), 0)
                    sum_c += tl.sum(tl.where(logits >= bounds[2], weights, 0.0), 0)
                start += _CHANGED_WORDS
    return sum_a, sum_b, sum_c


@triton.jit
def _bound_of(key):
    """Return the value of a key, clamped to the lowest finite float, which is above NaN and -inf."""
    value = value_of(key)
    return tl.where(value < -LARGEST, -LARGEST, value)


@triton.jit
def _plain_only(source, plain_words_row_ptr, part, logits):
    """Replace the logits of changed tokens with -inf in one part of a pass."""
    if plain_words_row_ptr is not None:
        words = part * (_PASS // WORD) + tl.arange(0, _PASS // WORD)
        num_processed = tl.where(source[1][2], source[1][1], 0)  # the vocabulary size or 0
        plain = tl.load(plain_words_row_ptr + words, mask=words * WORD < num_processed, other=-1)
        logits = tl.where(tl.reshape(has_bit(plain), logits.shape), logits, float("-inf"))
    return logits


@triton.jit
def _with_amounts(amounts, logits, bounds, at_best):
    """Add the weights of further logits to the amount of each bound that they reach.

    A thread sums only three numbers over its adjacent tokens, which leaves registers for pipelining.
    """
    best, rate = at_best
    weights = tl.exp2((tl.minimum(logits, LARGEST) - best) * rate)
    amount_a = amounts[0] + tl.sum(tl.where(logits >= bounds[0], weights, 0.0), 1)
    amount_b = amounts[1] + tl.sum(tl.where(logits >= bounds[1], weights, 0.0), 1)
    amount_c = amounts[2] + tl.sum(tl.where(logits >= bounds[2], weights, 0.0), 1)
    return amount_a, amount_b, amount_c
