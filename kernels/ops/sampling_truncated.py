"""Third pass of sampling: draw among the kept tokens of each row with top-k or top-p, one program per row.

A group's highest logit and highest noise bound the scores of its tokens, so a draw reads few groups. It first reads
some groups with the highest bounds, then all groups whose bounds reach the best score so far.

min-p, top-k and top-p each keep all tokens at or above some logit, so a row keeps the tokens at or above one threshold.
The groups' highest logits give the floor, a lower bound of the threshold. Few tokens usually reach the floor:

    groups at the floor       17  40  41  55 ...      found by their highest logits
    bits of their words       ...0100100, ...0001     tokens that reach the floor: 64 bytes read per group
    list                      (546, 7.1) (549, 6.8)   token and logit of each bit

The list is searched in registers. `sampling_passes.py` samples rows that keep too many tokens to list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_logits import (
    NOWHERE,
    WORD,
    best_of,
    key_of,
    largest_reaching,
    min_p_floor,
    next_changed,
    num_bits,
    place_of_bit,
    rate_of,
    raw_logits,
    req_values,
    row_options,
    split_words,
    token_noise,
    value_of,
    weight,
)
from graphrt.kernels.ops.sampling_passes import best_of_groups, draw_by_passes, words_of_groups
from graphrt.kernels.types import NO_TOKEN

LIST = 2048
"""Capacity of a row's list, in tokens and in groups."""

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_WORDS = tl.constexpr(128)  # words of tokens whose logits are read in parallel
_BIT_WORDS = tl.constexpr(512)  # words whose bits are listed in parallel
_CHANGED_WORDS = tl.constexpr(256)  # words whose changed tokens are processed in parallel
_SHORT = tl.constexpr(256)  # tokens of a short list, one per thread, enough for most values of top-k
_DRAWN = tl.constexpr(256)  # tokens whose noise is drawn in parallel
_FLOOR_KEYS = tl.constexpr(1 << 16)  # the floor is only a bound and need not be exact
_SURE = tl.constexpr(1.0001)  # margin for rounding in bounds on masses


@triton.jit(do_not_specialize=["num_groups", "state_rows", "bias_rows", "bias_capacity", "num_masks"])
def sample_truncated_kernel(
    ptrs,
    group_best_ptr,
    group_mass_ptr,
    plain_words_ptr,
    changed_best_ptr,
    changed_mass_ptr,
    list_groups_ptr,
    list_words_ptr,
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
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LIST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    heat, top_k, top_p, min_p, truncates = row_options(row, ptrs, vocab_size)
    if OVERLAPS:
        # The second pass lets this kernel start after the first has finished. The next kernel waits only for this one,
        # so one program here waits for the second pass.
        if row == tl.num_programs(0) - 1:
            tl.extra.cuda.gdc_wait()
    if not truncates:
        return
    source = ptrs, req_values(row, ptrs, vocab_size, stride_logits, state_rows, bias_rows, bias_capacity, num_masks)
    at = row.to(tl.int64) * num_groups
    plain_words_row_ptr = plain_words_ptr
    if plain_words_ptr is not None:
        plain_words_row_ptr = plain_words_ptr + at * (GROUP // WORD)
    num_changed = tl.where(source[1][2], num_groups, 0)
    group_ptrs = (group_best_ptr + at, changed_best_ptr + at, list_groups_ptr + at, num_groups, num_changed)
    noise_at = (tl.load(ptrs.seeds + row), tl.load(ptrs.seq_lens + row))
    rate = rate_of(heat)
    plain_best, changed_best = best_of_groups(group_ptrs, GROUPS)
    group_best = tl.maximum(plain_best, changed_best)
    best = tl.max(group_best, 0)
    # top-p without top-k and min-p is a share of the mass of all tokens.
    num_weighed = tl.where((top_p < 1) & (top_k == 0) & (min_p == 0), num_groups, 0)
    num_changed_weighed = tl.minimum(num_weighed, num_changed)
    groups = tl.arange(0, GROUPS)
    plain_mass = tl.load(group_mass_ptr + at + groups, mask=groups < num_weighed, other=0.0)
    changed_mass = tl.load(changed_mass_ptr + at + groups, mask=groups < num_changed_weighed, other=0.0)
    total = tl.sum(plain_mass * weight(plain_best, best, rate) + changed_mass * weight(changed_best, best, rate), 0)
    floor = _floor(group_best, best, total, heat, rate, top_k, top_p, min_p)
    row_list = (list_tokens_ptr + row.to(tl.int64) * LIST, list_logits_ptr + row.to(tl.int64) * LIST)
    words_row_ptr = list_words_ptr + row.to(tl.int64) * LIST * (GROUP // WORD)
    length = _list_plain(
        source, plain_words_row_ptr, words_row_ptr, group_ptrs, plain_best, floor, row_list, GROUP, LIST
    )
    if plain_words_ptr is not None:
        if source[1][2]:
            length = _list_changed(source, group_ptrs, changed_best, floor, row_list, length, GROUP, LIST)
    if length <= LIST:
        tl.debug_barrier()  # threads load what others have stored
        options = (best, total, rate, top_k, top_p, min_p)
        if length <= _SHORT:
            threshold = _threshold_of_list(row_list, length, key_of(floor), options, _SHORT)
        else:
            threshold = _threshold_of_list(row_list, length, key_of(floor), options, LIST)
        token = _draw_from_list(row_list, length, noise_at, value_of(threshold), heat)
    else:
        token = draw_by_passes(
            source, plain_words_row_ptr, noise_at, group_ptrs, best, floor, total, heat, rate, top_k, top_p, min_p,
            GROUPS, GROUP,
        )  # fmt: skip
    tl.store(out_ptr + row, tl.where(token < NOWHERE, token, _NO_TOKEN))


@triton.jit
def _floor(group_best, best, total, heat, rate, top_k, top_p, min_p):
    """Return a logit below which no token is kept, from the groups' highest logits.

    If k groups reach a logit, so do k tokens. If the best tokens of some groups have top-p of the mass, no token below
    all of them is kept. The second bound needs the whole mass, so only rows without top-k and min-p use it.
    """
    floor = min_p_floor(best, heat, min_p)
    by_count = top_k > 0
    amounts = tl.where(by_count, 1.0, weight(group_best, best, rate))
    need = tl.where(by_count, top_k.to(tl.float32), top_p * total * _SURE)
    useful = by_count | ((top_p < 1) & (min_p <= 0))
    # Starting at the lowest group instead of -inf saves about ten steps in most searches.
    lowest = tl.min(tl.where(group_best > float("-inf"), group_best, float("inf")), 0)
    lowest = tl.maximum(tl.minimum(lowest, best), floor)
    useful = useful & (tl.sum(tl.where(group_best >= lowest, amounts, 0.0), 0) >= need)
    low = key_of(lowest)
    high = tl.where(useful, key_of(best) + 1, low)
    low, high = largest_reaching(group_best, amounts, need, low, high, _FLOOR_KEYS)
    return tl.where(useful, value_of(low), floor)


@triton.jit
def _list_plain(
    source,
    plain_words_row_ptr,
    words_row_ptr,
    group_ptrs,
    group_best,
    floor,
    row_list,
    GROUP: tl.constexpr,
    LIST: tl.constexpr,
):
    """List the unchanged tokens that reach the floor. Return the length; it exceeds LIST if the tokens do not fit.

    A first pass writes one bit per token, because few of many tokens reach the floor. A second pass lists the set bits.
    """
    per_group: tl.constexpr = GROUP // WORD
    count, length = _list_groups(group_ptrs, group_best, floor, LIST)
    _find_bits(source, words_row_ptr, group_ptrs, count, floor, GROUP)
    tl.debug_barrier()  # threads load what others have stored
    start = 0
    while (start < count * per_group) & (length <= LIST):
        at = start + tl.arange(0, _BIT_WORDS)
        listed = at < count * per_group
        words = tl.load(group_ptrs[2] + at // per_group, mask=listed, other=0) * per_group + at % per_group
        bits = tl.load(words_row_ptr + at, mask=listed, other=0)
        if plain_words_row_ptr is not None:
            if source[1][2]:
                bits &= tl.load(plain_words_row_ptr + words, mask=listed, other=0)
        length = _list_bits(source, words, bits, row_list, length, LIST)
        start += _BIT_WORDS
    return length


@triton.jit
def _list_groups(group_ptrs, group_best, floor, LIST: tl.constexpr):
    """List the groups that reach the floor. Return their number and the initial length of the token list.

    Each of these groups has a token that reaches the floor. If there are more than LIST groups, the token list is
    already too long, so no group is listed and the returned number is 0.
    """
    chosen = (group_best >= floor) & (group_best > float("-inf"))
    count = tl.sum(chosen.to(tl.int32), 0)
    if count <= LIST:
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(group_ptrs[2] + place, tl.arange(0, group_best.shape[0]), mask=chosen)
        tl.debug_barrier()  # threads load what others have stored
    return tl.where(count > LIST, 0, count), tl.where(count > LIST, count, 0)


@triton.jit
def _find_bits(source, words_row_ptr, group_ptrs, count, floor, GROUP: tl.constexpr):
    """Set the bits of tokens in the listed groups whose model logits reach the floor.

    Each iteration processes some groups while the logits of the next groups are loaded.
    """
    groups: tl.constexpr = _WORDS // (GROUP // WORD)
    bit = tl.full([32], 1, tl.int32) << tl.arange(0, 32)
    raw = _logits_listed(source, group_ptrs, 0, count, groups, GROUP)
    for start in range(0, count, groups):
        next_raw = _logits_listed(source, group_ptrs, start + groups, count, groups, GROUP)
        logits = raw.to(tl.float32)
        reaches = (logits >= floor) & (logits > float("-inf"))
        bits = tl.sum(tl.where(reaches, bit[None, :], 0), 1)
        tl.store(words_row_ptr + start * (GROUP // WORD) + tl.arange(0, _WORDS), bits)
        raw = next_raw


@triton.jit
def _logits_listed(source, group_ptrs, start, count, groups: tl.constexpr, GROUP: tl.constexpr):
    """Return [words, 32] model logits of some listed groups."""
    pointers, values = source
    listed = start + tl.arange(0, groups)
    group = tl.load(group_ptrs[2] + listed, mask=listed < count, other=NOWHERE // GROUP)
    tokens = words_of_groups(group, GROUP // WORD)[:, None] * WORD + tl.arange(0, 32)[None, :]
    return tl.load(pointers.logits + values[0] + tokens, mask=tokens < values[1], other=float("-inf"))


@triton.jit
def _list_bits(source, words, bits, row_list, length, LIST: tl.constexpr):
    """Append the tokens with set bits to the list, one bit of each word per iteration. Return the new length."""
    tokens_ptr, logits_ptr = row_list
    of_word = num_bits(bits)
    place = length + tl.cumsum(of_word, 0) - of_word
    for _ in range(tl.max(of_word, 0)):
        lowest = bits & -bits
        tokens = tl.where(bits != 0, words * WORD + place_of_bit(lowest), source[1][1])
        logits = raw_logits(source, tokens)
        # An overlong list is never read, so its last entry may be overwritten.
        at = tl.minimum(place, LIST - 1)
        tl.store(tokens_ptr + at, tokens, mask=bits != 0)
        tl.store(logits_ptr + at, logits, mask=bits != 0)
        bits ^= lowest
        place += 1
    return length + tl.sum(of_word, 0)


@triton.jit
def _list_changed(source, group_ptrs, group_best, floor, row_list, length, GROUP: tl.constexpr, LIST: tl.constexpr):
    """Append the changed tokens that reach the floor, usually from few groups. Return the new length."""
    per_group: tl.constexpr = GROUP // WORD
    wide: tl.constexpr = _CHANGED_WORDS // per_group
    tokens_ptr, logits_ptr = row_list
    tl.debug_barrier()  # the previous list of groups has been read
    count, too_long = _list_groups(group_ptrs, group_best, floor, LIST)
    length += too_long
    start = 0
    while (start < count) & (length <= LIST):
        listed = start + tl.arange(0, wide)
        group = tl.load(group_ptrs[2] + listed, mask=listed < count, other=NOWHERE // GROUP)
        words = words_of_groups(group, per_group)
        _, changed, seen = split_words(source, words)
        while tl.max((changed != 0).to(tl.int32), 0) > 0:
            tokens, logits, changed = next_changed(source, words, changed, seen)
            taken = ((logits >= floor) & (logits > float("-inf"))).to(tl.int32)
            place = tl.minimum(length + tl.cumsum(taken, 0), LIST) - 1
            tl.store(tokens_ptr + place, tokens, mask=taken != 0)
            tl.store(logits_ptr + place, logits, mask=taken != 0)
            length += tl.sum(taken, 0)
        start += wide
    return length


@triton.jit
def _threshold_of_list(row_list, length, low, options, lanes: tl.constexpr):
    """Return the lowest key to keep. Top-k is applied first, because top-p is a share of the mass that top-k keeps."""
    best, total, rate, top_k, top_p, min_p = options
    at = tl.arange(0, lanes)
    logits = tl.load(row_list[1] + at, mask=at < length, other=float("-inf"))
    weights = weight(logits, best, rate)
    end = key_of(best) + 1
    if (top_k > 0) & (top_k < length):
        ones = tl.full([lanes], 1.0, tl.float32)
        low, _ = largest_reaching(logits, ones, top_k.to(tl.float32), low, end, 1)
    if top_p < 1:
        if (top_k > 0) | (min_p > 0):
            total = tl.sum(tl.where(logits >= value_of(low), weights, 0.0), 0)
        low, _ = largest_reaching(logits, weights, top_p * total, low, end, 1)
    return low


@triton.jit
def _draw_from_list(row_list, length, noise_at, threshold, heat):
    """Draw among the listed tokens that reach the threshold. Noise is expensive, so all lanes compute some of it."""
    tokens_ptr, logits_ptr = row_list
    seed, position = noise_at
    scores = tl.full([_DRAWN], float("-inf"), tl.float32)
    tokens = tl.full([_DRAWN], NOWHERE, tl.int32)
    for start in range(0, length, _DRAWN):
        at = start + tl.arange(0, _DRAWN)
        token = tl.load(tokens_ptr + at, mask=at < length, other=NOWHERE)
        logit = tl.load(logits_ptr + at, mask=at < length, other=float("-inf"))
        kept = (at < length) & (logit >= threshold)
        score = tl.where(kept, tl.fma(heat, token_noise(seed, position, token), logit), float("-inf"))
        # Lower tokens win ties explicitly, because changed tokens are listed after all others.
        wins = (score > scores) | (kept & (score == scores) & (token < tokens))
        scores = tl.where(wins, score, scores)
        tokens = tl.where(wins, token, tokens)
    _, drawn = best_of(scores, tokens)
    return drawn
