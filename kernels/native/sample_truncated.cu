// Sampling of rows that truncate by top-k or top-p. One block per row; all other rows are skipped.
//
// The first pass (ops/sampling_chunks.py) writes the highest logit of each group of adjacent tokens, without the
// changed tokens, which sample_split.cu lists. In late rows, it includes all tokens. A block does the following:
//
// 1. Compute a floor from the groups: a logit below which no token is kept. The tokens that reach it are usually a
//    short list:
//
//        groups at the floor   17  40  41  55 ...       by their highest logits
//        bits of their words   ...0100100, ...0001      tokens that reach the floor
//        list                  546 549 1302 ...         one token per bit, then the changed tokens
//
//    In a late row, penalties lower some listed tokens. If fewer than k tokens reach the floor, it is lowered.
// 2. Find the threshold of the list: a histogram leaves one bin of 256, and sums over the list decide within it.
// 3. Draw a token among the kept ones.
// 4. If there are too many tokens to list, a sample estimates the threshold, a pass over the row narrows it, and a
//    draw among groups follows. Another pass follows if the drawn token is so close to the threshold that it may not
//    be kept.
//
// Compile-time macros: those of sample_split.cu, and LIST (capacity of a list in tokens)

#include "sample_passes.cuh"

#define SPARE 64  // extra groups of a late row, because penalties lower some tokens

// Compute what passes need and the first pass did not write for a late row: its plain tokens and its best logit. The
// groups' highest logits are upper bounds for plain tokens, as passes require.
__device__ __forceinline__ void split_late(Team &t, Shared &shared, const Params &p, Row &r, int at, float &best) {
  r.plain = plain_of(p, at);
  for (int word = t.thread; word < r.num_words; word += THREADS) r.plain[word] = ~r.seen[word];
  __syncthreads();
  u32 largest = key_of(NEG_INF), unused = 0;
  for (int group = t.warp; group < MAX_GROUPS; group += WARPS) {
    if (key_of(shared.best[group]) <= largest) continue;  // the warp has found a better logit
#pragma unroll
    for (int k = 0; k < WORDS_OF_GROUP; ++k) {
      const int token = group * GROUP + 32 * k + t.lane;
      const bool is_plain = token < r.vocab && has_bit(r.plain, token);
      largest = max(largest, __reduce_max_sync(0xffffffffu, key_of(is_plain ? logit_at(r, token) : NEG_INF)));
    }
  }
  for_changed(t, r, [&](int, float x) { largest = max(largest, key_of(x)); });
  extremes_all(t, largest, unused);
  best = value_of(largest);
}
// Sample a row that truncates; skip other rows.
//
// No wait for the first pass is needed: the second pass lets this kernel start only after each of its blocks has waited
// for the first pass. No cache of this multiprocessor can contain a stale line of its output.
__device__ __forceinline__ void sample_row(const Params &p, Shared &shared, int at) {
  const Kept kept = kept_of(p, at);
  if (!kept.truncates) return;
  Team t = team_at(shared.meeting);
  Row r = row_of(p, at);
  u32 largest = key_of(NEG_INF), lowest = 0xffffffffu;
  if (r.processes && !r.late) {
    r.num_changed = p.num_changed[at];
    largest = key_of(p.highest_changed[at]);
  }
  const i64 first = (i64)at * p.num_groups;
#pragma unroll
  for (int quad = 0; quad < QUADS; ++quad) {
    const int group = group_of(t, quad);  // num_groups is a multiple of 4
    const bool inside = group < p.num_groups;
    int4 bits = {0, 0, 0, 0};
    if (inside) bits = *reinterpret_cast<const int4 *>(p.group_best + first + group);
    const int words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = inside ? __int_as_float(words[i]) : NEG_INF;
      shared.best[group + i] = x;
      largest = max(largest, key_of(x));
      if (x > NEG_INF) lowest = min(lowest, key_of(x));
    }
  }
  extremes_all(t, largest, lowest);
  const float given = value_of(largest);
  float best = given;  // in a late row, known once tokens are processed
  float total[1] = {0.0f};
  if (kept.top_p < 1.0f && kept.top_k == 0 && kept.min_p == 0.0f) {  // top-p is a share of the mass of all tokens
#pragma unroll 8
    for (int group = t.thread; group < p.num_groups; group += THREADS)
      total[0] += p.group_mass[first + group] * weight(shared.best[group], best, r.rate);
    for_changed(t, r, [&](int, float x) { total[0] += weight(x, best, r.rate); });
    sum_all(t, total);
  }
  float floor;
  const int all_groups = (r.vocab + GROUP - 1) / GROUP;
  int length, reaching, groups = kept.top_k;  // number of groups that must reach the floor
  if (r.late) groups = max(groups, min(groups + SPARE, all_groups));
#pragma unroll 1
  while (true) {
    floor = floor_of(t, shared, r, kept, groups, lowest, given, total[0]);
    length = reaching = list_tokens(t, shared, r, floor);
    if (!r.late || length > LIST) break;
    floor = fmaxf(floor, -LARGEST);  // a logit of -inf is never sampled
    reaching = count_reaching(t, shared, length, floor, best);
    if (reaching >= kept.top_k || floor == -LARGEST) break;  // enough, or all tokens are listed
    const int more = groups + max(2 * (kept.top_k - reaching), groups / 4);
    groups = groups < all_groups ? min(more, all_groups) : more;
  }
  Found found;
  if (length <= LIST) {
    const u32 threshold = threshold_of_list(t, shared, r, kept, length, reaching, floor, best, total[0]);
    found = draw_from_list(t, shared, r, length, threshold, Found{NEG_INF, NOWHERE, NEG_INF});
  } else {
    if (r.late) {
      split_late(t, shared, p, r, at, best);
      floor = min_p_floor(r, kept, best);
    }
    found = draw_by_passes(t, shared, r, kept, floor, best, total[0]);
  }
  if (t.thread == 0) p.out[at] = found.token < NOWHERE ? found.token : NO_TOKEN;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sample_truncated(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  sample_row(p, *reinterpret_cast<Shared *>(memory), blockIdx.x);
  // The next kernel waits only for this one, so this one waits for the second pass.
  if (blockIdx.x == gridDim.x - 1) wait_for_earlier_kernels();
}
