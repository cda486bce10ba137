"""Device functions of sampling: a row's options, its processed logits, its noise, and thresholds of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphrt.kernels.ops.sampling_reference import MAX_TEMPERATURE, NOISE_GROUP, SampleInputs

SAMPLE_CHUNK = 2048
"""Default number of tokens that a program processes in parallel."""

CHUNK = tl.constexpr(SAMPLE_CHUNK)
WORD = tl.constexpr(32)  # tokens of a word of bits, and of a group of the noise
NOWHERE = tl.constexpr(1 << 30)  # larger than every token id
LATE_TOP_K = tl.constexpr(1280)  # largest top-k of rows processed late; the third pass lists up to 2,048 tokens
_NO_ENTRY = tl.constexpr((1 << 31) - 1)  # placeholder beyond the end of a list
MAX_HEAT = tl.constexpr(MAX_TEMPERATURE)
assert NOISE_GROUP == 32, "kernels read bits by groups of the noise"
_MIN_HEAT = tl.constexpr(1e-30)  # below it, all logits except the best have weight 0
_LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)  # largest finite float

# Kernels see by sizes whether a row uses these tensors, so missing ones need an address too.
_BY_SIZE = ("seen", "counts", "bias_tokens", "bias_values", "mask_words")
_FLOATS = ("temperatures", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values")


def kernel_inputs(inputs: SampleInputs, ints: torch.Tensor, floats: torch.Tensor) -> tuple[SampleInputs, list[int]]:
    """Return the first argument of a sampling kernel, and its sizes from `vocab_size` to `num_masks`; see `req_values`.

    ints, floats  int32 and float32 tensors that replace missing tensors; they are not read
    """
    missing = {name: floats if name in _FLOATS else ints for name in _BY_SIZE if getattr(inputs, name) is None}
    state_rows, num_masks = (0 if t is None else t.shape[0] for t in (inputs.seen, inputs.mask_words))
    bias_rows, _, bias_capacity = (0, 2, 0) if inputs.bias_tokens is None else inputs.bias_tokens.shape
    vocab, stride = inputs.logits.shape[1], inputs.logits.stride(0)
    return inputs._replace(**missing), [vocab, stride, state_rows, bias_rows, bias_capacity, num_masks]


def kernel_input_types(logits: str, *, everything: bool) -> dict[str, str]:
    """Return the types of SampleInputs for a CompileSpec, with all options or with none."""
    types = {name: "*fp32" if name in _FLOATS else "*i32" for name in SampleInputs._fields}
    types |= {"logits": f"*{logits}", "seeds": "*i64"}
    if not everything:
        types |= dict.fromkeys(SampleInputs._field_defaults.keys() - {*_BY_SIZE}, "constexpr")
    return types


@triton.jit
def exponential(u):
    """Return exponential variates -log(1 - u); see `exponential_reference`."""
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    tail = -tl.log(tl.maximum(1.0 - u, 2.9802322387695312e-08))
    return tl.where(u < 0.015625, series, tail)


@triton.jit
def _least_of(words):
    """Return the least exponential variate of a noise group, given its word; see `noise_reference`."""
    return exponential((words >> 5).to(tl.float32) * 7.450580596923828e-09 + 3.725290298461914e-09) * 0.03125


@triton.jit
def most_noise(seed, position, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return the highest noise in each group of 32 or more tokens of the vocabulary."""
    counters = tl.arange(0, GROUPS * GROUP // 128)
    zero = tl.zeros_like(counters)
    w0, w1, w2, w3 = tl.philox(seed, counters, position + zero, zero + 1, zero)
    if GROUP == 32:
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [GROUPS])
    elif GROUP == 64:
        words = tl.reshape(tl.join(tl.minimum(w0, w1), tl.minimum(w2, w3)), [GROUPS])
    else:
        words = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
        if GROUP > 128:
            words = tl.min(tl.reshape(words, [GROUPS, GROUP // 128]), 1)
    return -tl.log(_least_of(words))


@triton.jit
def _least_of_words(seed, position, words):
    """Return the least exponential variate of each noise group in `words` (any order), and its index in the group."""
    zero = tl.zeros_like(words)
    w0, w1, w2, w3 = tl.philox(seed, words // 4, position + zero, zero + 1, zero)
    at = words % 4
    word = tl.where(at < 2, tl.where(at == 0, w0, w1), tl.where(at == 2, w2, w3))
    return _least_of(word), (word & 31).to(tl.int32)


@triton.jit
def _above_least(seed, position, tokens):
    """Return how much each token's variate exceeds its group's least variate, if another token has the least."""
    zero = tl.zeros_like(tokens)
    own, _, _, _ = tl.philox(seed, tokens, position + zero, zero, zero)
    return exponential(own.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10)


@triton.jit
def token_noise(seed, position, tokens):
    """Return the noise of a few tokens, in any order; see `noise_reference`."""
    least, place = _least_of_words(seed, position, tokens // WORD)
    above = _above_least(seed, position, tokens)
    return -tl.log(tl.where(place == tokens % WORD, least, least + above))


@triton.jit
def noise_of_words(seed, position, words):
    """Return [words, 32] noise of all tokens of some words, in any order; see `noise_reference`."""
    least, place = _least_of_words(seed, position, words)
    lanes = tl.arange(0, 32)[None, :]
    above = _above_least(seed, position, words[:, None] * WORD + lanes)
    return -tl.log(tl.where(place[:, None] == lanes, least[:, None], least[:, None] + above))


@triton.jit
def best_of(scores, tokens):
    """Return the highest score and the lowest token that has it."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, tokens, NOWHERE), 0)


@triton.jit
def row_options(row, ptrs, vocab_size):
    """Return a row's heat, top-k, top-p and min-p (0, 0, 1 and 0 if off), and whether it truncates.

    The heat is the clamped temperature; it is 0 for greedy rows and rows that keep only the best token. A row
    truncates if top-k or top-p requires a search for its threshold. Min-p gives the threshold directly.
    """
    temperature = tl.load(ptrs.temperatures + row)
    heat = tl.where(temperature > 0, tl.minimum(temperature, MAX_HEAT), 0.0)
    top_k = 0
    top_p = 1.0
    min_p = 0.0
    truncates = False
    if ptrs.top_k is not None:
        top_k = tl.load(ptrs.top_k + row)
        top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, 0)
        top_p = tl.load(ptrs.top_p + row)
        top_p = tl.where(top_p < 1, top_p, 1.0)
        min_p = tl.load(ptrs.min_p + row)
        min_p = tl.where(min_p > 0, tl.minimum(min_p, 1.0), 0.0)
        heat = tl.where((top_k == 1) | (top_p <= 0), 0.0, heat)
        truncates = (heat > 0) & ((top_k > 0) | (top_p < 1))
    return heat, top_k, top_p, min_p, truncates


@triton.jit
def picks_tiles(source, heat):
    """Return whether the first pass writes only the best group of each tile.

    True for greedy rows without changed tokens.
    """
    return (heat <= 0) & (source[1][2] == 0)


@triton.jit
def processes_late(source, top_k, truncates):
    """Return whether the third pass lists a row's changed tokens first and then processes them.

    This needs a small top-k, and no changes except penalties that raise no logit. The model's logit is then an upper
    bound of the processed logit.
    """
    _, _, _, _, num_masked, _, num_biases, _, num_penalized, repetition, presence, frequency = source[1]
    only_penalties = (num_penalized > 0) & (num_masked == 0) & (num_biases == 0)
    lowers = (repetition >= 1) & (presence >= 0) & (frequency >= 0)
    return truncates & (top_k > 0) & (top_k <= LATE_TOP_K) & only_penalties & lowers


@triton.jit
def penalties_of(row, repetition_ptr, presence_ptr, frequency_ptr):
    """Return the row's three penalties, off if their values are invalid, and whether any is on."""
    infinity = float("inf")
    repetition = tl.load(repetition_ptr + row)
    repetition = tl.where((repetition > 0) & (repetition < infinity), repetition, 1.0)
    presence = tl.load(presence_ptr + row)
    presence = tl.where(tl.abs(presence) < infinity, presence, 0.0)
    frequency = tl.load(frequency_ptr + row)
    frequency = tl.where(tl.abs(frequency) < infinity, frequency, 0.0)
    return repetition, presence, frequency, (repetition != 1) | (presence != 0) | (frequency != 0)


@triton.jit
def req_values(row, ptrs, vocab_size, stride_logits, state_rows, bias_rows, bias_capacity, num_masks):
    """Return a row's values for the functions below; options that the row does not use are off.

    The functions take a pair: the pointers of all rows (SampleInputs), and these values.
    """
    mask_at = 0
    num_masked = 0  # the vocabulary size if the row has a mask, else 0
    if ptrs.mask_index is not None:
        index = tl.load(ptrs.mask_index + row)
        masked = (index >= 0) & (index < num_masks)
        mask_at = tl.where(masked, index, 0).to(tl.int64) * ((vocab_size + 31) // 32)
        num_masked = tl.where(masked, vocab_size, 0)
    req_index = -1
    if ptrs.req_indices is not None:
        req_index = tl.load(ptrs.req_indices + row)
    bias_at = 0
    num_biases = 0
    if ptrs.bias_lists is not None:
        known = (req_index >= 0) & (req_index < bias_rows)
        lists_at = tl.where(known, req_index, 0).to(tl.int64)
        count = tl.load(ptrs.bias_lists + 3 * lists_at, mask=known, other=0)
        early_count = tl.load(ptrs.bias_lists + 3 * lists_at + 1, mask=known, other=0)
        early = tl.load(ptrs.seq_lens + row) < tl.load(ptrs.bias_lists + 3 * lists_at + 2, mask=known, other=0)
        bias_at = (2 * lists_at + early.to(tl.int64)) * bias_capacity
        num_biases = tl.maximum(tl.minimum(tl.where(early, early_count, count), bias_capacity), 0)
    state_row = 0
    num_penalized = 0  # the vocabulary size if the row has penalties, else 0
    repetition = 1.0
    presence = 0.0
    frequency = 0.0
    if ptrs.repetition is not None:
        known = (req_index >= 0) & (req_index < state_rows)
        state_row = tl.where(known, req_index, 0).to(tl.int64)
        repetition, presence, frequency, penalized = penalties_of(row, ptrs.repetition, ptrs.presence, ptrs.frequency)
        num_penalized = tl.where(penalized & known, vocab_size, 0)
    processes = num_masked + num_biases + num_penalized > 0
    return (
        row.to(tl.int64) * stride_logits, vocab_size, processes, mask_at, num_masked, bias_at, num_biases, state_row,
        num_penalized, repetition, presence, frequency,
    )  # fmt: skip


@triton.jit
def raw_logits(source, tokens):
    """Return the model's logits (float32) of some tokens; -inf for NaN and beyond the vocabulary."""
    pointers, values = source
    logits = tl.load(pointers.logits + values[0] + tokens, mask=tokens < values[1], other=float("-inf")).to(tl.float32)
    return tl.where(logits > float("-inf"), logits, float("-inf"))


@triton.jit
def _process(source, tokens, logits, seen):
    """Return `raw_logits` after bias and penalties; `seen` is whether each token has occurred."""
    pointers, values = source
    _, vocab_size, _, _, _, bias_at, num_biases, state_row, _, repetition, presence, frequency = values
    if num_biases > 0:
        logits += _bias(tokens, pointers.bias_tokens + bias_at, pointers.bias_values + bias_at, num_biases)
    # Read counts only for tokens that have occurred, which are few of a large vocabulary.
    counts = tl.load(pointers.counts + state_row * vocab_size + tokens, mask=seen, other=0)
    # Division is slow for 0, infinities and NaN, so lanes that need no quotient divide 1.
    dividend = tl.where(seen & (logits > 0), logits, 1.0)
    scaled = tl.where(logits > 0, tl.div_rn(dividend, repetition), logits * repetition)
    logits = tl.where(seen, scaled, logits) - frequency * counts.to(tl.float32)
    logits = tl.where(counts > 0, logits - presence, logits)
    return tl.where(logits > float("-inf"), logits, float("-inf"))


@triton.jit
def bits_of(source, words):
    """Return two bits per token: allowed by the mask, and has occurred. Unused tables are not read."""
    pointers, values = source
    _, vocab_size, _, mask_at, num_masked, _, _, state_row, num_penalized, _, _, _ = values
    seen_at = state_row * ((vocab_size + 31) // 32)
    allowed = tl.load(pointers.mask_words + mask_at + words, mask=words * WORD < num_masked, other=-1)
    seen = tl.load(pointers.seen + seen_at + words, mask=words * WORD < num_penalized, other=0)
    return allowed, seen


@triton.jit
def has_bit(words):
    """Return whether each bit of each word is set, as [words, 32]."""
    bits = tl.full([32], 1, tl.int32) << tl.arange(0, 32)  # constants, so a token takes one instruction
    return (words[:, None] & bits[None, :]) != 0


@triton.jit
def place_of_bit(bit):
    """Return the index of a single bit, which is the exponent of the power of two."""
    return (bit.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def num_bits(words):
    """Return the number of set bits of each word, by sums over 2, 4 and 8 bits, then over all bytes."""
    bits = words.to(tl.uint32, bitcast=True)
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def logits_of_words(source, words):
    """Return the tokens of a few words (any order), [words, 32], and their processed logits."""
    _, values = source
    tokens = words[:, None] * WORD + tl.arange(0, 32)[None, :]
    logits = raw_logits(source, tokens)
    if values[2]:
        allowed, seen = bits_of(source, words)
        logits = tl.where(has_bit(allowed), logits, float("-inf"))
        logits = _process(source, tokens, logits, has_bit(seen))
    return tokens, logits


@triton.jit
def split_words(source, words):
    """Return the bits of unchanged tokens, of changed tokens, and of tokens that have occurred.

    Tokens that the mask forbids are neither unchanged nor changed tokens.
    """
    return split_bits(source, words, bits_of(source, words))


@triton.jit
def split_bits(source, words, bits):
    """Return the result of `split_words`, given the bits that `bits_of` returned."""
    pointers, values = source
    bias_at, num_biases = values[5], values[6]
    allowed, seen = bits
    changed = seen
    if num_biases > 0:
        changed |= _biased_bits(words, pointers.bias_tokens + bias_at, num_biases)
    return allowed & ~changed, allowed & changed, seen


@triton.jit
def next_changed(source, words, changed, seen):
    """Return each word's first changed token, its processed logit (-inf if there is none), and the other bits."""
    _, values = source
    lowest = changed & -changed
    tokens = tl.where(changed != 0, words * WORD + place_of_bit(lowest), values[1])
    logits = _process(source, tokens, raw_logits(source, tokens), (seen & lowest) != 0)
    return tokens, logits, changed ^ lowest


@triton.jit
def _biased_bits(words, bias_tokens_row_ptr, num_biases):
    """Return bits of the tokens in the row's ascending list."""
    first = words * WORD
    at = tl.zeros_like(words)  # number of entries below the word's first token
    step = tl.zeros_like(num_biases) + 1
    while step <= num_biases:
        step *= 2
    while step > 0:
        probe = tl.load(bias_tokens_row_ptr + at + step - 1, mask=at + step <= num_biases, other=NOWHERE)
        at = tl.where((at + step <= num_biases) & (probe < first), at + step, at)
        step //= 2
    bits = tl.zeros_like(words)
    token = tl.load(bias_tokens_row_ptr + at, mask=at < num_biases, other=_NO_ENTRY)
    while tl.max(((token - first) < WORD).to(tl.int32), 0) > 0:
        inside = (token - first) < WORD
        bits = tl.where(inside, bits | (tl.full(words.shape, 1, tl.int32) << (token & 31)), bits)
        at += 1
        token = tl.load(bias_tokens_row_ptr + at, mask=inside & (at < num_biases), other=_NO_ENTRY)
    return bits


@triton.jit
def _bias(tokens, bias_tokens_row_ptr, bias_values_row_ptr, num_biases):
    """Return the bias of each token, or 0, by a binary search in the row's ascending list for all tokens at once."""
    at = tl.zeros_like(tokens)
    length = num_biases
    while length > 1:
        half = length // 2
        probe = tl.load(bias_tokens_row_ptr + at + half)
        at = tl.where(probe <= tokens, at + half, at)
        length -= half
    hit = tl.load(bias_tokens_row_ptr + at) == tokens
    return tl.load(bias_values_row_ptr + at, mask=hit, other=0.0)


@triton.jit
def rate_of(heat):
    """Return log2(e) / heat, which turns differences of logits into exponents of 2."""
    return _LOG2_E / tl.maximum(heat, _MIN_HEAT)


@triton.jit
def weight(logits, best, rate):
    """Return exp((logit - best) / heat), an unnormalized probability. It is 1 for the best logit, even if infinite."""
    below = tl.where(logits >= best, 0.0, (logits - best) * rate)
    return tl.where(logits > float("-inf"), tl.exp2(below), 0.0)


@triton.jit
def finite(logits):
    """Clamp logits to finite floats, so that differences are defined. NaN and -inf become the lowest float."""
    return tl.minimum(tl.maximum(logits, -LARGEST), LARGEST)


@triton.jit
def key_of(value):
    """Return an integer key that orders like the float; -0.0 and 0.0 have the same key."""
    bits = tl.where(value == 0, 0, value.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def value_of(key):
    """Return the float that has this key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def min_p_floor(best, heat, min_p):
    """Return the lowest logit that min-p keeps; -inf if min-p is 0."""
    return tl.where(min_p > 0, best + heat * tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))


@triton.jit
def largest_reaching(values, amounts, need, low, high, until):
    """Narrow the key range [low, high), which contains the largest key that reaches `need`.

    A key reaches `need` if the amounts of all values at and above this key sum to `need` or more. `low` must reach
    `need`, and `high` must not. The search divides the range by five until it has at most `until` keys; if `until` is
    1, `low` is the largest key that reaches `need`. Four sums at once need as many barriers and shuffles as one, which
    dominate the time. Each step also moves the bounds to existing values, which are few, because only one key in 65,536
    is a bfloat16 value. Sums of non-negative floats in a fixed order are monotone, so the result is exact.
    """
    while high - low > until:
        fifth = (high - low + 4) // 5
        key_a = low + fifth
        key_b = tl.minimum(key_a + fifth, high - 1)
        key_c = tl.minimum(key_b + fifth, high - 1)
        key_d = tl.minimum(key_c + fifth, high - 1)
        of_a = tl.where(values >= value_of(key_a), amounts, 0.0)
        of_b = tl.where(values >= value_of(key_b), amounts, 0.0)
        of_c = tl.where(values >= value_of(key_c), amounts, 0.0)
        of_d = tl.where(values >= value_of(key_d), amounts, 0.0)
        lower, upper = tl.split(tl.sum(tl.join(tl.join(of_a, of_b), tl.join(of_c, of_d)), 0))
        sum_a, sum_b = tl.split(lower)
        sum_c, sum_d = tl.split(upper)
        within = (values >= value_of(low)) & (values <= value_of(high - 1))
        largest, least = tl.split(
            tl.max(tl.join(tl.where(within, values, float("-inf")), tl.where(within, -values, float("-inf"))), 0)
        )
        reached = tl.where(sum_c < need, key_b, tl.where(sum_d < need, key_c, key_d))
        reached = tl.where(sum_a < need, low, tl.where(sum_b < need, key_a, reached))
        missed = tl.where(sum_c < need, key_c, tl.where(sum_d < need, key_d, high))
        missed = tl.where(sum_a < need, key_a, tl.where(sum_b < need, key_b, missed))
        # Sums do not change between two values, so move the bounds to values.
        low = tl.maximum(reached, tl.minimum(key_of(-least), missed - 1))
        high = tl.minimum(missed, tl.maximum(key_of(largest) + 1, low + 1))
    return low, high
