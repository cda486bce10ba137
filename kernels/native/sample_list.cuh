// Sampling: lists of the tokens that reach a floor, their thresholds, and draws from them.

#include "sample_row.cuh"

#define LISTED ((LIST + THREADS - 1) / THREADS)  // list entries per thread
#define OCCURRED (1 << 30)    // flag of a listed token whose logit is not processed yet
#define SURE 1.0001f          // margin for rounding in bounds on masses
#define FIXED (1 << 19)       // fixed-point 1 of masses in a histogram: the mass of all groups fits in 32 bits
#define CERTAIN_REACH 1.000001f  // factor by which histogram sums certainly reach an amount
#define CERTAIN_MISS 0.999999f

// best, bounds    per group: the highest logit of the plain tokens, and an upper bound of their scores. Passes over the
//                 row use `bounds` for the bins of FineBins. In a late row without passes, `best` is the highest model
//                 logit of all tokens
// groups          listed groups
// words           bits of the listed groups' tokens
// occurred        in a late row, bits of the tokens that penalties change
// tokens, logits  the list; `scores`: upper bounds of scores, NaN for a token that cannot win
struct Shared {
  Meeting meeting;
  u32 histogram[2][BINS];
  float best[MAX_GROUPS], bounds[MAX_GROUPS];
  u16 groups[MAX_GROUPS];
  u32 words[LIST * WORDS_OF_GROUP], occurred[LIST * WORDS_OF_GROUP];
  int tokens[LIST];
  float logits[LIST], scores[LIST];
};

__device__ __forceinline__ int group_of(const Team &t, int quad) { return (quad * THREADS + t.thread) * 4; }

// Histograms

// Amounts by key, in 256 bins of equal width over the keys [low, high). Amounts are counts, or masses of at most 1 that
// are rounded down.
struct Bins {
  u32 *sums;
  u32 low;
  int shift;
  bool by_count;
};
__device__ __forceinline__ Bins empty_bins(const Team &t, Shared &shared, bool by_count, u32 low, u32 high) {
  u32 *const sums = shared.histogram[t.turn];  // the other half may still be read
  const u32 width = high - low - 1;
  for (int bin = t.thread; bin < BINS; bin += THREADS) sums[bin] = 0;
  __syncthreads();
  return {sums, low, width < BINS ? 0 : 32 - __clz(width) - 8, by_count};
}
__device__ __forceinline__ void add_to(const Bins &bins, u32 key, u32 units) {
  if (key >= bins.low) atomicAdd(&bins.sums[(key - bins.low) >> bins.shift], units);
}
// Suffix sums: for each of a lane's N bins, the sum of this and all higher bins. Every warp computes all bins.
template <int N>
__device__ __forceinline__ void add_from_above(const Team &t, const u32 *bins, u32 (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] = bins[N * t.lane + i];
#pragma unroll
  for (int i = N - 2; i >= 0; --i) sums[i] += sums[i + 1];
  u32 above = sums[0];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    u32 other = __shfl_down_sync(0xffffffffu, above, step);
    if (t.lane + step < 32) above += other;
  }
  above -= sums[0];
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] += above;
}
// Narrow the range [low, high) of a threshold to a bin: the amounts of the keys at and above the threshold reach
// `need`. All threads have added their amounts, with keys below `high`. Masses may lack up to `slack` units. Returns
// false if the amounts do not certainly reach `need`.
__device__ __forceinline__ bool narrow_to_bin(Team &t, const Bins &bins, float need, float slack, u32 &low, u32 &high) {
  __syncthreads();
  const int first = BINS / 32 * t.lane;
  u32 sums[BINS / 32];
  add_from_above(t, bins.sums, sums);
  const float reach = bins.by_count ? need : need * FIXED * CERTAIN_REACH + 1.0f;
  const float miss = bins.by_count ? need : need * FIXED * CERTAIN_MISS - slack - 1.0f;
  u32 reached = 0, missed = BINS;  // `reached` is the bin's number plus 1; 0: none
#pragma unroll
  for (int i = 0; i < BINS / 32; ++i) {
    float sum = (float)sums[i];
    if (sum >= reach) reached = first + i + 1;
    if (sum < miss) missed = min(missed, (u32)(first + i));
  }
  reached = __reduce_max_sync(0xffffffffu, reached);
  missed = __reduce_min_sync(0xffffffffu, missed);
  if (reached > 0) low = bins.low + ((reached - 1) << bins.shift);
  if (missed < BINS) high = bins.low + min(missed << bins.shift, high - bins.low);  // min, because the sum may overflow
  t.turn ^= 1;
  return reached > 0;
}

// The floor

__device__ __forceinline__ float min_p_floor(const Row &r, const Kept &kept, float best) {
  return kept.min_p > 0.0f ? __fmaf_rn(r.heat, logf(kept.min_p), best) : NEG_INF;
}
// A logit below which no token is kept, at least the floor of min-p, from the groups' highest plain logits. If k groups
// reach a logit, so do k tokens. If the best tokens of some groups have top-p of the mass, no token below all of them
// is kept. The second bound needs the whole mass, so only rows without top-k and min-p use it.
//
// groups  number of groups that must reach the floor, so that top-k tokens reach it
// lowest  the key of the lowest group with a plain token: bins that start there are finer than bins that start at -inf
__device__ __forceinline__ float floor_of(Team &t, Shared &shared, const Row &r, const Kept &kept, int groups,
                                          u32 lowest, float best, float total) {
  const float floor = r.late ? NEG_INF : min_p_floor(r, kept, best);  // a late row's best logit is not known yet
  const bool by_count = kept.top_k > 0;
  if (!by_count && (kept.top_p >= 1.0f || kept.min_p > 0.0f)) return floor;
  const float need = by_count ? (float)groups : kept.top_p * total * SURE;
  u32 low = max(lowest, key_of(floor)), high = key_of(best) + 1;
  if (low >= high) return floor;
  const Bins bins = empty_bins(t, shared, by_count, low, high);
  if (by_count) {
#pragma unroll 4
    for (int group = t.thread; group < MAX_GROUPS; group += THREADS) add_to(bins, key_of(shared.best[group]), 1);
  } else {
#pragma unroll 4
    for (int group = t.thread; group < MAX_GROUPS; group += THREADS) {
      const float x = shared.best[group];
      add_to(bins, key_of(x), (u32)(weight(x, best, r.rate) * FIXED));
    }
  }
  return narrow_to_bin(t, bins, need, 0.0f, low, high) ? value_of(low) : floor;
}

// Lists

// List the groups with `chosen(group)` in order, and return their number.
template <typename Chosen>
__device__ __forceinline__ int list_groups(Team &t, Shared &shared, Chosen chosen) {
  int ranks[QUADS];
  u32 mine = 0;  // a bit per group of this thread
  int *const of_warps = shared.tokens;  // QUADS * WARPS is 32: one for each lane
#pragma unroll
  for (int quad = 0; quad < QUADS; ++quad) {
    int of_warp = 0;
    ranks[quad] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bool taken = chosen(group_of(t, quad) + i);
      mine |= (u32)taken << (4 * quad + i);
      u32 others = __ballot_sync(0xffffffffu, taken);
      ranks[quad] += __popc(others & ((1u << t.lane) - 1));
      of_warp += __popc(others);
    }
    if (t.lane == 0) of_warps[quad * WARPS + t.warp] = of_warp;
  }
  __syncthreads();
  int sum = of_warps[t.lane];
  const int own = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (t.lane >= step) sum += other;
  }
#pragma unroll
  for (int quad = 0; quad < QUADS; ++quad) {
    int place = __shfl_sync(0xffffffffu, sum - own, quad * WARPS + t.warp) + ranks[quad];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (mine >> (4 * quad + i) & 1) shared.groups[place++] = (u16)(group_of(t, quad) + i);
  }
  const int count = __shfl_sync(0xffffffffu, sum, 31);
  __syncthreads();
  return count;
}
// Write bits of the listed groups' plain tokens that reach `floor(group)`; in a late row, of all tokens that do. A few
// lanes share a word, one piece each.
template <bool ALL, typename Floor>
__device__ __forceinline__ void find_bits(const Team &t, Shared &shared, const Row &r, const u16 *groups, int count,
                                          Floor floor) {
  constexpr int LANES = 32 / PIECE, PIECES = 32 / WARPS;  // lanes per word; concurrent pieces per thread
  const int words = count * WORDS_OF_GROUP, of_step = THREADS / LANES, mine = t.thread / LANES;
  const int first = t.lane % LANES * PIECE;
  const bool late = ALL && r.late;
  const u32 *const of_words = late ? r.seen : r.plain;
#pragma unroll 1
  for (int start = mine; start - mine < words; start += PIECES * of_step) {
    int tokens[PIECES];
    bool wanted[PIECES];
    u32 known[PIECES];  // plain tokens; in a late row, tokens that have occurred
    float least[PIECES];
    int4 pieces[PIECES];
#pragma unroll
    for (int k = 0; k < PIECES; ++k) {
      const int at = start + k * of_step;
      const int group = at < words ? groups[at / WORDS_OF_GROUP] : 0;
      const int word = at < words ? group * WORDS_OF_GROUP + at % WORDS_OF_GROUP : 0;
      least[k] = fmaxf(floor(group), -LARGEST);  // NaN and -inf are below it
      tokens[k] = 32 * word + first;
      wanted[k] = at < words && tokens[k] + PIECE <= r.vocab;
      known[k] = of_words && word < r.num_words ? of_words[word] : 0xffffffffu;
    }
    read_pieces<PIECES>(r, tokens, wanted, pieces);
#pragma unroll
    for (int k = 0; k < PIECES; ++k) {
      const int at = start + k * of_step;
      float logits[PIECE];
      unpack(pieces[k], logits);
      u32 bits = 0;
#pragma unroll
      for (int n = 0; n < PIECE; ++n)
        if (logits[n] >= least[k]) bits |= 1u << n;
      bits = wanted[k] ? bits << first : 0u;
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) bits |= __shfl_xor_sync(0xffffffffu, bits, step);
      if (at >= words || first > 0) continue;
      shared.words[at] = late ? bits : bits & known[k];
      if (late) shared.occurred[at] = bits & known[k];
    }
  }
  __syncthreads();
  // The tokens after the last piece are in the last group, which is listed last.
  const int tail = r.vocab % PIECE, token = r.vocab - tail + t.thread, last = groups[count - 1];
  if (tail == 0) return;
  if (t.thread < tail && last == token / GROUP && logit_at(r, token) >= fmaxf(floor(last), -LARGEST)) {
    const int at = (count - 1) * WORDS_OF_GROUP + token % GROUP / 32;
    const bool is_known = !of_words || has_bit(of_words, token);
    if (late || is_known) atomicOr(&shared.words[at], 1u << token % 32);
    if (late && is_known) atomicOr(&shared.occurred[at], 1u << token % 32);
  }
  __syncthreads();
}
// List the plain tokens of the listed groups that reach `floor(group)`, in order, with their logits. Returns their
// number; above LIST, none is listed. With ALL, a late row lists its changed tokens too, which may be below the floor.
template <bool ALL, typename Floor>
__device__ __forceinline__ int list_plain(Team &t, Shared &shared, const Row &r, const u16 *groups, int count,
                                          Floor floor) {
  if (count == 0) return 0;
  find_bits<ALL>(t, shared, r, groups, count, floor);
  const int words = count * WORDS_OF_GROUP, each = (words + THREADS - 1) / THREADS;
  const int begin = min(t.thread * each, words), end = min(begin + each, words);
  int mine = 0, length;
  for (int at = begin; at < end; ++at) mine += __popc(shared.words[at]);
  int place = before(t, mine, length);
  if (length > LIST) return LIST + 1;
  for (int at = begin; at < end; ++at) {
    int token = 32 * (groups[at / WORDS_OF_GROUP] * WORDS_OF_GROUP + at % WORDS_OF_GROUP);
    const u32 occurred = ALL && r.late ? shared.occurred[at] : 0u;
    for (u32 bits = shared.words[at]; bits; bits &= bits - 1) {
      const int bit = __ffs(bits) - 1;
      shared.tokens[place++] = (token + bit) | (occurred >> bit & 1 ? OCCURRED : 0);
    }
  }
  __syncthreads();
  constexpr int SIDE = ALL ? LISTED : AT_ONCE;  // passes lack registers for more
#pragma unroll 1
  for (int start = t.thread; start < length; start += SIDE * THREADS) {
    int tokens[SIDE], counts[SIDE];
    float logits[SIDE];
    bool occurred[SIDE];
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      const int at = start + i * THREADS;
      const int listed = at < length ? shared.tokens[at] : 0;
      occurred[i] = ALL && listed & OCCURRED;
      tokens[i] = listed & ~OCCURRED;
      logits[i] = at < length ? logit_at(r, tokens[i]) : NEG_INF;
      counts[i] = occurred[i] ? r.counts[tokens[i]] : 0;
    }
#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
      const int at = start + i * THREADS;
      if (at >= length) continue;
      if (occurred[i]) {
        shared.tokens[at] = tokens[i];
        logits[i] = processed(r, tokens[i], logits[i], true, counts[i]);
      }
      shared.logits[at] = logits[i];
    }
  }
  return length;
}
// List all tokens that reach the floor, plain ones first, then changed ones. Returns their number, above LIST if there
// are too many. In a late row, model logits are compared with the floor.
__device__ __forceinline__ int list_tokens(Team &t, Shared &shared, const Row &r, float floor) {
  const int count = list_groups(t, shared, [&](int group) {
    float x = shared.best[group];
    return x >= floor && x > NEG_INF;
  });
  if (count > LIST) return LIST + 1;  // each group has a token that reaches the floor
  int length = list_plain<true>(t, shared, r, shared.groups, count, [&](int) { return floor; });
  if (length > LIST || !r.processes || r.late) return length;
  int changed = 0, of_all;
  const auto reaches = [&](float x) { return x >= floor && x > NEG_INF; };
  const auto put = [&](int place, int token, float x) {
    shared.tokens[place] = token;
    shared.logits[place] = x;
  };
  if (r.num_changed >= 0 && r.num_changed <= AT_ONCE * THREADS) {  // each changed token is read once
    int tokens[AT_ONCE];
    float logits[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int at = t.thread + i * THREADS;
      tokens[i] = at < r.num_changed ? r.changed_tokens[at] : NOWHERE;
      logits[i] = at < r.num_changed ? r.changed_logits[at] : NEG_INF;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) changed += reaches(logits[i]);
    int place = length + before(t, changed, of_all);
    if (length + of_all > LIST) return LIST + 1;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (reaches(logits[i])) put(place++, tokens[i], logits[i]);
  } else {
    for_changed(t, r, [&](int, float x) { changed += reaches(x); });
    int place = length + before(t, changed, of_all);
    if (length + of_all > LIST) return LIST + 1;
    for_changed(t, r, [&](int token, float x) {
      if (reaches(x)) put(place++, token, x);
    });
  }
  __syncthreads();
  return length + of_all;
}
// For the list of a late row: count the tokens that reach the floor, and find the best logit.
__device__ __forceinline__ int count_reaching(Team &t, const Shared &shared, int length, float floor, float &best) {
  float count[1] = {0.0f};
  u32 largest = key_of(NEG_INF), unused = 0;
  for (int at = t.thread; at < length; at += THREADS) {  // the entries that this thread listed in `list_plain`
    const float x = shared.logits[at];
    if (x >= floor) count[0] += 1.0f;
    largest = max(largest, key_of(x));
  }
  reduce_all<1, true>(t, count, largest, unused);
  best = value_of(largest);
  return (int)count[0];
}
__device__ __forceinline__ void narrow_list(Team &t, Shared &shared, const u32 (&keys)[LISTED],
                                            const float (&amounts)[LISTED], float need, bool by_count, u32 &low,
                                            u32 &high) {
  const Bins bins = empty_bins(t, shared, by_count, low, high);
#pragma unroll
  for (int i = 0; i < LISTED; ++i)
    if (amounts[i] > 0.0f) add_to(bins, keys[i], by_count ? 1u : (u32)(amounts[i] * FIXED));
  narrow_to_bin(t, bins, need, (float)LIST, low, high);
}
// The threshold of a list: the lowest key that is kept. Top-k is applied first: top-p is a share of the mass that top-k
// keeps. `reaching`: number of listed tokens that reach the floor.
__device__ __forceinline__ u32 threshold_of_list(Team &t, Shared &shared, const Row &r, const Kept &kept, int length,
                                                 int reaching, float floor, float best, float total) {
  float amounts[LISTED];
  u32 keys[LISTED];
#pragma unroll
  for (int i = 0; i < LISTED; ++i) {
    int at = i * THREADS + t.thread;
    keys[i] = key_of(at < length ? shared.logits[at] : NEG_INF);
    amounts[i] = at < length ? 1.0f : 0.0f;
  }
  u32 low = key_of(floor), high = key_of(best) + 1;
  if (kept.top_k > 0 && kept.top_k < reaching) {
    narrow_list(t, shared, keys, amounts, (float)kept.top_k, true, low, high);
    largest_reaching(t, keys, amounts, (float)kept.top_k, low, high, 1);
  }
  if (r.late) low = max(low, key_of(min_p_floor(r, kept, best)));  // in other rows the floor includes it
  if (kept.top_p >= 1.0f) return low;
  float sum[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < LISTED; ++i) {
    amounts[i] = amounts[i] > 0.0f && keys[i] >= low ? weight(value_of(keys[i]), best, r.rate) : 0.0f;
    sum[0] += amounts[i];
  }
  sum_all(t, sum);
  if (kept.top_k > 0 || kept.min_p > 0.0f) total = sum[0];  // the mass that these keep
  high = key_of(best) + 1;
  narrow_list(t, shared, keys, amounts, kept.top_p * total, false, low, high);
  largest_reaching(t, keys, amounts, kept.top_p * total, low, high, 1);
  return low;
}
// The best score among listed tokens that reach the threshold, or the previous candidate. A word of noise bounds a
// token's score. Each thread first draws the token with its highest bound, after which few others can still win.
__device__ __forceinline__ Found draw_from_list(Team &t, Shared &shared, const Row &r, int length, u32 threshold,
                                                Found found) {
  float highest = NEG_INF;
  int first = -1;
  u32 word = 0;
#pragma unroll 1
  for (int at = t.thread; at < length; at += THREADS) {
    const float logit = shared.logits[at];
    shared.scores[at] = NOT_A_NUMBER;
    if (key_of(logit) < threshold) continue;
    const u32 its = word_at(r, shared.tokens[at]);
    const float bound = shared.scores[at] = bound_of(r, its, logit);
    if (first >= 0 && bound <= highest) continue;
    highest = bound, first = at, word = its;
  }
  if (first >= 0 && highest >= found.score) {
    const int token = shared.tokens[first];
    offer(found, drawn_score(r, token, word, shared.logits[first]), token, shared.logits[first]);
  }
  best_of_all(t, found);
#pragma unroll 1
  for (int at = t.thread; at < length; at += THREADS) {
    if (at == first || !(shared.scores[at] >= found.score)) continue;
    const int token = shared.tokens[at];
    offer(found, drawn_score(r, token, word_at(r, token), shared.logits[at]), token, shared.logits[at]);
  }
  best_of_all(t, found);
  return found;
}
