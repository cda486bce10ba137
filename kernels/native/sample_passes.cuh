// Sampling: draws of rows that keep too many tokens for a list: among groups, and by passes over the row.

#include "sample_list.cuh"

#define GUESS 0.04f            // half the width in which top-p's threshold is sought first, as a share of the mass
#define GUESS_KEYS (1u << 16)  // a guess need not be exact
#define PASS 4                 // pieces of a thread that are added up while as many are under way
#define SAMPLED 1024           // tokens that guesses are made from
#define SOME 256               // groups that are looked at before more are listed

// The highest scores that plain tokens of the groups may have; -inf where none reaches the floor. This thread's highest,
// and its group.
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
// The best score among all tokens that reach the floor.
__device__ __forceinline__ Found best_score(Team &t, Shared &shared, const Row &r, float floor) {
  // Each warp looks at its most promising group. The best score among those is near that of all.
  Found first = bound_groups(t, shared, r, floor);
  best_of_warp(first);
  Found found = {NEG_INF, NOWHERE, NEG_INF};
  if (first.token < NOWHERE) found = best_of_group(t, r, first.token, floor);
  best_of_all(t, found);
  // Then all tokens of the groups that may do better: some at first, as what they give dismisses most of the others.
  while (true) {
    const float enough = found.score;
    const int count = list_groups(t, shared, [&](int group) {
      float bound = shared.bounds[group];
      return bound >= enough && bound > NEG_INF;
    });
    int some = min(count, min(SOME, LIST)), length = list_plain(t, shared, r, shared.groups, some, floor);
    if (length > LIST) {  // all tokens of so many groups fit
      some = LIST / GROUP;
      length = list_plain(t, shared, r, shared.groups, some, floor);
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

// The masses of the row's tokens at or above three keys; their numbers where best and rate are 0.
template <bool PROCESSES>
__device__ __forceinline__ void add_row(const Team &t, const Row &r, const float (&bounds)[3], float best, float rate,
                                        float (&sums)[3]) {
  const auto add = [&](float x, bool counts) {
    const float w = power2((fminf(x, LARGEST) - best) * rate);
#pragma unroll
    for (int n = 0; n < 3; ++n)
      if (x >= bounds[n] && counts) sums[n] += w;
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
    read(start + PASS * THREADS * PIECE, next_pieces);  // under way while these are added up
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
}
__device__ __forceinline__ void amounts_from(Team &t, const Row &r, const u32 (&keys)[3], float best, float rate,
                                             float (&sums)[3]) {
  float bounds[3];
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    bounds[n] = fmaxf(value_of(keys[n]), -LARGEST);  // neither NaN nor -inf reaches it
    sums[n] = 0.0f;
  }
  best = fminf(fmaxf(best, -LARGEST), LARGEST);
  if (r.processes) add_row<true>(t, r, bounds, best, rate, sums);
  else add_row<false>(t, r, bounds, best, rate, sums);
  for_changed(t, r, [&](int, float x) {
    float w = power2((fminf(x, LARGEST) - best) * rate);
#pragma unroll
    for (int n = 0; n < 3; ++n)
      if (x >= bounds[n]) sums[n] += w;
  });
  sum_all(t, sums);
}
// Two keys that a threshold is likely between, from a sample: words of tokens at about equal distances.
__device__ __forceinline__ void guess(Team &t, const Row &r, u32 low, u32 high, float best, float rate, float share,
                                      u32 &guess_low, u32 &guess_high) {
  const bool by_count = rate == 0.0f;
  const int distance = (r.num_words + SAMPLED / 32 - 1) / (SAMPLED / 32);
  constexpr int MINE = SAMPLED / THREADS;
  u32 keys[MINE];
  float amounts[MINE], mass[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    int draw = (i * THREADS + t.thread) / 32, token = 32 * (draw * distance + draw * 7 % distance) + t.lane;
    float x = NEG_INF;
    if (token < r.vocab && !(r.allowed && !has_bit(r.allowed, token))) x = processed_at(r, token);
    keys[i] = key_of(x);
    amounts[i] = keys[i] < low || x == NEG_INF ? 0.0f : by_count ? 1.0f : weight(x, best, rate);
    mass[0] += amounts[i];
  }
  sum_all(t, mass);
  if (by_count) mass[0] = SAMPLED;
  const float need = share * mass[0], spread = by_count ? 3.0f * sqrtf(need) + 1.0f : GUESS * mass[0];
  u32 until = high;
  guess_low = low;
  largest_reaching(t, keys, amounts, need + spread, guess_low, until, GUESS_KEYS);
  guess_high = guess_low;
  until = high;
  largest_reaching(t, keys, amounts, need - spread, guess_high, until, GUESS_KEYS);
}
// The bounds of a threshold after a look at one key: it is there or above where the amount reaches the need.
__device__ __forceinline__ void narrow(u32 &low, u32 &high, u32 key, float amount, float need) {
  if (amount >= need) low = max(low, key);
  else high = max(min(high, key), low + 1);
}
// What the passes of a row are for. TOP_K: its threshold is sought, of rows with top-p beside it. MASS: top-p is of the
// mass of what top-k and min-p leave. DRAW: the threshold is sought only until the drawn token is known to be kept.
enum Phase { TOP_K, MASS, DRAW };

// The draw among all tokens that are kept. The threshold is a key in [low, high). It need not be known exactly: a draw
// among all tokens from some key on decides, once that key is known to be no higher than the threshold, and the drawn
// token's logit to be kept. A first draw begins at a guess, and one pass mostly says both.
__device__ __forceinline__ Found draw_by_passes(Team &t, Shared &shared, const Row &r, const Kept &kept, float floor,
                                                float best, float total) {
  const bool by_count = kept.top_k > 0;
  Phase phase = kept.top_p >= 1.0f ? DRAW : by_count ? TOP_K : kept.min_p > 0.0f ? MASS : DRAW;
  u32 low = key_of(floor), high = key_of(best) + 1;
  float of_best = by_count ? 0.0f : best, rate = by_count ? 0.0f : r.rate;  // amounts are numbers where both are 0
  float need = by_count ? (float)kept.top_k : kept.top_p * total;
  bool guessed = false;
  while (true) {
    u32 keys[3] = {low, low, low};
    if (phase != MASS && !guessed && high - low > 1) {
      float share = rate == 0.0f ? need / (float)r.vocab : kept.top_p;
      guess(t, r, low, high, of_best, rate, share, keys[0], keys[2]);
      keys[1] = keys[0] + (keys[2] - keys[0]) / 2;
    } else if (phase != MASS) {  // quarters end what chance may draw out
      const u32 quarter = (high - low) / 4;
      keys[0] = low + quarter;
      keys[1] = low + (high - low) / 2;
      keys[2] = high - quarter;
    }
    Found found = {NEG_INF, NOWHERE, NEG_INF};
    const u32 from = guessed || high - low <= 1 ? low : keys[0];
    u32 key = high;  // of the drawn token
    if (phase == DRAW) {
      found = best_score(t, shared, r, value_of(from));
      if (found.token < NOWHERE) key = key_of(found.logit);
      if (from <= low && key >= high - 1) return found;
      keys[1] = key + 1;  // whether it is kept: whether the tokens above it do not reach the need
    }
    float amounts[3];
    amounts_from(t, r, keys, of_best, rate, amounts);
    if (phase == MASS) {
      need = kept.top_p * amounts[0];
      high = key_of(best) + 1;
      phase = DRAW;
      continue;
    }
#pragma unroll
    for (int n = 0; n < 3; ++n) narrow(low, high, keys[n], amounts[n], need);
    if (phase == DRAW && from <= low && key >= low && key >= high - 1) return found;
    guessed = true;
    if (phase == TOP_K && high - low <= 1) {
      phase = MASS;
      of_best = best;
      rate = r.rate;
      guessed = false;
    }
  }
}
