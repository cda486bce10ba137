// Sampling of rows that keep too many tokens to list: draws among groups, and passes over the row.

#include "sample_list.cuh"

#define FINE_BITS 9
#define FINE (1 << FINE_BITS)  // bins per row
#define PASS 2                 // pieces that a thread sums while it loads as many
#define SAMPLED 2048           // tokens of the sample for an estimate
#define SPAN 6.0f              // powers of 2 between the masses of a window
#define DOUBT 4.0f             // standard deviations of error allowed for an estimate
#define SOME 256               // groups read before more are listed

// Upper bounds of the scores of each group's plain tokens; -inf if none reaches the floor. Returns this thread's
// highest bound and its group.
__device__ __forceinline__ Found bound_groups(const Team &t, Shared &shared, const Row &r, float floor) {
  Found highest = {NEG_INF, NOWHERE, NEG_INF};
#pragma unroll 1
  for (int quad = 0; quad < QUADS; ++quad) {
    const int group = group_of(t, quad);
    bool able[4], any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = shared.best[group + i];
      able[i] = x >= floor && x > NEG_INF;
      any |= able[i];
      shared.bounds[group + i] = NEG_INF;
    }
    if (!any) continue;
    u32 least[4] = {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};
#pragma unroll
    for (int k = 0; k < WORDS_OF_GROUP; ++k) {
      Random random = philox(r, group * WORDS_OF_GROUP / 4 + k, 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 &at = least[(4 * k + i) / WORDS_OF_GROUP];
        at = min(at, random.word[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!able[i]) continue;
      float bound = score_of(r, shared.best[group + i], least_of(least[i]));
      shared.bounds[group + i] = bound;
      offer(highest, bound, group + i, NEG_INF);
    }
  }
  return highest;
}
// The best plain token of a group, found by a warp.
__device__ __forceinline__ Found best_of_group(const Team &t, const Row &r, int group, float floor) {
  Found mine = {NEG_INF, NOWHERE, NEG_INF};
#pragma unroll 1
  for (int k = 0; k < WORDS_OF_GROUP; ++k) {
    int token = group * GROUP + 32 * k + t.lane;
    if (token >= r.vocab || (r.processes && !has_bit(r.plain, token))) continue;
    float x = logit_at(r, token);
    if (x < floor || x == NEG_INF) continue;
    offer(mine, drawn_score(r, token, word_at(r, token), x), token, x);
  }
  best_of_warp(mine);
  return mine;
}
// Return the best score among all tokens that reach the floor.
__device__ __forceinline__ Found best_score(Team &t, Shared &shared, const Row &r, float floor) {
  // Each warp draws from its most promising group. The best of these scores is close to the overall best.
  Found first = bound_groups(t, shared, r, floor);
  best_of_warp(first);
  Found found = {NEG_INF, NOWHERE, NEG_INF};
  if (first.token < NOWHERE) found = best_of_group(t, r, first.token, floor);
  best_of_all(t, found);
  // Then read the tokens that may have a better score, in groups that may. Start with a few groups, because their
  // scores exclude most others. A token's noise is at most its group's bound. The margin is far above rounding errors.
  int most = min(SOME, LIST);
  while (true) {
    const float enough = found.score;
    const auto able = [&](int group) {
      const float bound = shared.bounds[group], noise = bound - shared.best[group];
      return fmaxf(floor, enough - noise - 1e-3f * r.heat - 1e-5f * (fabsf(enough) + fabsf(bound)));
    };
    const int count = list_groups(t, shared, [&](int group) {
      float bound = shared.bounds[group];
      return bound >= enough && bound > NEG_INF;
    });
    int some = min(count, most), length = list_plain<false>(t, shared, r, shared.groups, some, able);
    if (length > LIST) {  // all tokens of this many groups fit
      some = most = LIST / GROUP;
      length = list_plain<false>(t, shared, r, shared.groups, some, able);
    }
    found = draw_from_list(t, shared, r, length, 0, found);
    if (some == count) break;
    for (int i = t.thread; i < some; i += THREADS) shared.bounds[shared.groups[i]] = NEG_INF;
    __syncthreads();
  }
  for_changed(t, r, [&](int token, float x) {
    if (x < floor || x == NEG_INF) return;
    const u32 word = word_at(r, token);
    if (bound_of(r, word, x) >= found.score) offer(found, drawn_score(r, token, word, x), token, x);
  });
  best_of_all(t, found);
  return found;
}

// Thresholds of a whole row

// Amounts of tokens by logit: counts if best and rate are 0, else masses. The threshold is the largest key in [low,
// high) for which the amounts at and above it reach `need`. `total`: the sum of all amounts that count.
struct Sought {
  u32 low, high;
  float best, rate, need, total;
};
__device__ __forceinline__ bool by_count(const Sought &sought) { return sought.rate == 0.0f; }
__device__ __forceinline__ float mass_of(const Sought &sought, float x) {
  return power2(fminf((x - sought.best) * sought.rate, 0.0f));
}

__device__ __forceinline__ float finite(float x) { return fminf(fmaxf(x, -LARGEST), LARGEST); }

// Bins of approximately equal width for the logits of the keys [low, high):
//
//     an eighth of a logit   x ...... x + w      w: their width
//     and an addend          w ...... 2 w        floats are equidistant here, so their bits count steps
//     bin                    0 ...... FINE - 1   the highest bits of that count
//
// Amounts are summed as integers. An amount of 1 is `units`, which is as large as the sum of all amounts allows.
struct FineBins {
  u32 *sums;
  u32 low, high;
  float addend, units;  // the addend is not -0, so that both zeros get the same bin
  u32 first;
  int shift;
};
__device__ __forceinline__ u32 place_of(const FineBins &bins, float x) {
  return __float_as_uint(__fmaf_rn(x, 0.125f, bins.addend));
}
__device__ __forceinline__ u32 bin_of(const FineBins &bins, float x) {
  return (place_of(bins, x) - bins.first) >> bins.shift;
}
__device__ __forceinline__ u32 in_units(const FineBins &bins, float amount) {  // adding 2^23 rounds to nearest
  return __float_as_uint(__fmaf_rn(amount, bins.units, 8388608.0f)) - __float_as_uint(8388608.0f);
}
// Return empty bins. `most`: maximum number of amounts.
__device__ __forceinline__ FineBins fine_bins(const Team &t, Shared &shared, const Sought &sought, u32 low, u32 high,
                                              int most) {
  FineBins bins = {reinterpret_cast<u32 *>(shared.bounds), low, high};
  const float x = finite(value_of(low)), last = finite(value_of(high - 1));
  bins.addend = (0.125f * last - 0.125f * x) - 0.125f * x;
  bins.first = place_of(bins, x);
  const u32 width = place_of(bins, last) - bins.first;
  bins.shift = width < FINE ? 0 : 32 - __clz(width) - FINE_BITS;
  // `most` times the largest amount, or the total, must fit in 32 bits: use the finer of the two units. An amount
  // takes at most 23 bits.
  const float largest = mass_of(sought, last), each = (float)(1u << min(__clz(most) - 1, 20));
  const float units = fminf(fmaxf(each / largest, 2147483648.0f / sought.total), 4194304.0f / largest);
  bins.units = by_count(sought) ? 1.0f : fminf(units, LARGEST);
  __syncthreads();  // the bounds of groups have been read
  for (int bin = t.thread; bin < FINE; bin += THREADS) bins.sums[bin] = 0;
  __syncthreads();
  return bins;
}
// The highest bin for which the amounts in it and above it reach `need` units; -1 if the total does not.
__device__ __forceinline__ int bin_reaching(const Team &t, const FineBins &bins, float need) {
  constexpr int MINE = FINE / 32;
  u32 sums[MINE];
  add_from_above(t, bins.sums, sums);
  u32 reached = 0;  // the bin's number plus 1
#pragma unroll
  for (int i = 0; i < MINE; ++i)
    if ((float)sums[i] >= need) reached = MINE * t.lane + i + 1;
  return (int)__reduce_max_sync(0xffffffffu, reached) - 1;
}
// The first key of a bin, found by a warp that tests one key per lane.
__device__ __forceinline__ u32 key_of_bin(const Team &t, const FineBins &bins, int bin) {
  u32 below = bins.low, at = bins.high;  // the key is above `below` and at most `at`
  if (bin <= 0) return below;
  while (at - below > 1) {
    const u32 step = (at - below + 31) / 32, key = below + step * (t.lane + 1);
    const bool is_lower = key < at && (int)bin_of(bins, finite(value_of(key))) < bin;
    const int lower = __popc(__ballot_sync(0xffffffffu, is_lower));
    at = min(at, below + step * (lower + 1));
    below += step * lower;
  }
  return at;
}
// The lowest key of a two-byte logit that is at least `key`.
__device__ __forceinline__ u32 next_of_grid(u32 key) {
  constexpr u32 STEP = LOGIT_BYTES == 4 ? 1 : Q_BF16 ? 1 << 16 : 1 << 13;
  return key & 0x80000000u ? (key + STEP - 1) & ~(STEP - 1) : key | (STEP - 1);
}

// Estimate keys [low, high) around the threshold from a sample of approximately equidistant words. The mass above a
// threshold may be in a few tokens that the sample misses. So the search uses the mass below it: the total of the
// tokens at and above a key, minus `need`.
__device__ __forceinline__ void guess(Team &t, Shared &shared, const Row &r, const Sought &sought, u32 from, u32 &low,
                                      u32 &high) {
  constexpr int MINE = SAMPLED / THREADS;
  const int distance = (r.num_words + SAMPLED / 32 - 1) / (SAMPLED / 32);
  int tokens[MINE];
  float logits[MINE];
  u32 largest = 0, least = 0xffffffffu;
#pragma unroll
  for (int i = 0; i < MINE; ++i) {  // all reads are issued before the first is used
    const int draw = i * WARPS + t.warp;
    tokens[i] = min(32 * (draw * distance + draw * 7 % distance) + t.lane, r.vocab);
    logits[i] = logit_at(r, min(tokens[i], r.vocab - 1));
  }
  if (r.processes) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      if (tokens[i] == r.vocab) continue;
      if (r.allowed && !has_bit(r.allowed, tokens[i])) tokens[i] = r.vocab;
      else logits[i] = processed_at(r, tokens[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (tokens[i] == r.vocab || key_of(logits[i]) < from) logits[i] = NEG_INF;
    if (logits[i] == NEG_INF) continue;
    logits[i] = fminf(logits[i], LARGEST);
    largest = max(largest, key_of(logits[i]));
    least = min(least, key_of(logits[i]));
  }
  extremes_all(t, largest, least);
  low = sought.low;
  high = sought.high;
  if (largest <= least) return;  // all tokens of the sample are equal
  const FineBins bins = fine_bins(t, shared, sought, least, largest + 1, SAMPLED);
  float sum[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (logits[i] == NEG_INF) continue;
    const u32 units = in_units(bins, mass_of(sought, logits[i]));
    sum[0] += (float)units;
    atomicAdd(&bins.sums[bin_of(bins, logits[i])], units);
  }
  sum_all(t, sum);
  const float each = bins.units / (float)distance, all = sum[0];
  const float need = by_count(sought) ? sought.need * each : all - (sought.total - sought.need) * each;
  const u32 about = key_of_bin(t, bins, bin_reaching(t, bins, need) + 1);
  const float below = fmaxf(all - need, 0.0f), heaviest = fmaxf(mass_of(sought, value_of(about)) * bins.units, 1.0f);
  const float off = DOUBT * (sqrtf(heaviest * (by_count(sought) ? fminf(below, need) : below)) + heaviest);
  const int first = bin_reaching(t, bins, need + off), last = bin_reaching(t, bins, need - off);
  if (first >= 0) low = max(low, min(key_of_bin(t, bins, first), high - 1));
  if (last + 1 < FINE) high = min(high, max(key_of_bin(t, bins, last + 1), low + 1));
}

// Sum a row's amounts: those above the bins into `sum`, the others into their bins.
template <bool PROCESSES>
__device__ __forceinline__ void add_row(const Team &t, const Row &r, const Sought &sought, const FineBins &bins,
                                        float &sum) {
  const float lowest = fmaxf(value_of(bins.low), -LARGEST), bound = value_of(bins.high);  // NaN is below both
  const auto add = [&](float x, bool counts) {
    const float w = power2((fminf(x, LARGEST) - sought.best) * sought.rate);
    const bool is_above = x >= bound;
    if (is_above && counts) sum += w;
    const u32 bin = bin_of(bins, fminf(x, LARGEST));
    add_shared_if(x >= lowest && !is_above && counts, bins.sums + bin, in_units(bins, w));
  };
  const int tail = r.vocab % PIECE, end = r.vocab - tail;
  int4 pieces[PASS], next_pieces[PASS];
  const auto read = [&](int start, int4 (&to)[PASS]) {
    int tokens[PASS];
    bool wanted[PASS];
#pragma unroll
    for (int k = 0; k < PASS; ++k) {
      tokens[k] = start + k * THREADS * PIECE;
      wanted[k] = tokens[k] < end;
    }
    read_pieces<PASS>(r, tokens, wanted, to);
  };
  read(t.thread * PIECE, pieces);
#pragma unroll 1
  for (int start = t.thread * PIECE; start < end; start += PASS * THREADS * PIECE) {
    read(start + PASS * THREADS * PIECE, next_pieces);  // loaded while the current pieces are summed
#pragma unroll
    for (int k = 0; k < PASS; ++k) {
      const int token = start + k * THREADS * PIECE;
      float logits[PIECE];
      unpack(pieces[k], logits);
      pieces[k] = next_pieces[k];
      if (token >= end) continue;
      const u32 plain = PROCESSES ? r.plain[token / 32] >> token % 32 : 0;
#pragma unroll
      for (int i = 0; i < PIECE; ++i) add(logits[i], !PROCESSES || plain >> i & 1);
    }
  }
  if (t.thread < tail) add(logit_at(r, end + t.thread), !PROCESSES || has_bit(r.plain, end + t.thread));
  for_changed(t, r, [&](int, float x) { add(x, true); });
}
// A pass over the row with bins for the keys [low, high), which narrows the search. Returns the amount at and above
// `high`.
__device__ __forceinline__ float narrow_by_pass(Team &t, Shared &shared, const Row &r, Sought &sought, u32 low,
                                                u32 high) {
  const FineBins bins = fine_bins(t, shared, sought, low, high, r.vocab);
  float sum[1] = {0.0f};
  if (r.processes) add_row<true>(t, r, sought, bins, sum[0]);
  else add_row<false>(t, r, sought, bins, sum[0]);
  sum_all(t, sum);
  const float missing = sought.need - sum[0];
  const int bin = missing > 0.0f ? bin_reaching(t, bins, missing * bins.units) : FINE;
  const u32 keys = sought.high - sought.low;
  if (bin == FINE) {
    sought.low = max(sought.low, high);
  } else if (bin < 0) {
    sought.high = low;
  } else {
    sought.low = max(sought.low, key_of_bin(t, bins, bin));
    sought.high = min(sought.high, key_of_bin(t, bins, bin + 1));
  }
  sought.high = max(sought.high, sought.low + 1);
  // The threshold is the key of a logit, so it is known once only one such key is left. If a pass leaves all keys, no
  // bin separates their logits: use the lowest key.
  const u32 key = next_of_grid(sought.low);
  const bool is_one = !r.processes && key < sought.high && next_of_grid(key + 1) >= sought.high;
  if (is_one) sought.low = key;
  if (is_one || sought.high - sought.low == keys) sought.high = sought.low + 1;
  __syncthreads();  // the bins have been read
  return sum[0];
}

// The phases of a row. TOP_K: find the threshold of top-k, in rows that also have top-p. MASS: sum the mass that top-k
// and min-p keep, for top-p. DRAW: narrow the threshold until the drawn token is known to be kept.
enum Phase { TOP_K, MASS, DRAW };

// Draw among all kept tokens. The threshold need not be known exactly. A draw among all tokens at and above some key is
// the result if this key is at most the threshold and the drawn token is known to be kept. The bin that a pass leaves
// is so narrow that the first draw usually is the result.
//
// Not inlined, so that its registers do not affect other paths.
__device__ __noinline__ Found draw_by_passes(Team t, Shared &shared, const Row r, const Kept kept, float floor,
                                             float best, float total) {
  const u32 end = key_of(best) + 1;
  Phase phase = kept.top_p >= 1.0f ? DRAW : kept.top_k > 0 ? TOP_K : kept.min_p > 0.0f ? MASS : DRAW;
  Sought sought = {key_of(floor), end, finite(best), r.rate, kept.top_p * total, total};
  if (kept.top_k > 0) sought = {sought.low, end, 0.0f, 0.0f, (float)kept.top_k, (float)r.vocab};
  u32 from = 0;  // `total` includes the tokens at and above this key
  bool guessed = false;
  while (true) {
    if (phase == TOP_K && sought.high - sought.low <= 1) {  // found
      sought = {sought.low, end, finite(best), r.rate, LARGEST, LARGEST};  // not known yet
      phase = MASS;
    }
    u32 low = sought.low, high = sought.high;
    if (phase == MASS) {
      high = low;
    } else if (!guessed && high - low > 1) {
      guess(t, shared, r, sought, from, low, high);
    } else if (phase == DRAW) {
      const Found found = best_score(t, shared, r, value_of(low));
      if (found.token >= NOWHERE || key_of(found.logit) >= high - 1) return found;
    }
    guessed = true;
    // Do not sum masses of different magnitudes in the same units: most digits would be lost.
    if (!by_count(sought) && high - low > 1)
      low = max(low, min(key_of(value_of(high - 1) - SPAN / sought.rate), high - 2));
    const float amount = narrow_by_pass(t, shared, r, sought, low, high);
    if (phase == MASS) {
      from = low;
      sought = {low, end, finite(best), r.rate, kept.top_p * amount, amount};
      guessed = false;
      phase = DRAW;
    }
  }
}
