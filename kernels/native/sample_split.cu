// Sampling: find the tokens that mask, bias and penalties change, and process their logits. One block per row.
//
// Late rows (`Row`) are skipped.
//
// The kernel runs concurrently with the first pass (ops/sampling_chunks.py), which reads all logits except those of
// changed tokens. Neither reads the other's output. The last program of that pass waits for this kernel, so that
// later kernels wait for both. A block does the following:
//
// 1. Read the row's bits: a token that has occurred is changed, a token that the mask forbids is dropped, and all
//    others are plain. The bias list gives the tokens that only a bias changes.
// 2. List the changed tokens, in an order that depends only on the row.
// 3. Process them. Each needs a sector of logits and one of counts, so many reads run concurrently. Rows that draw
//    among groups also get the highest changed logit of each group.
//
// Compile-time macros: WARPS, LOGIT_BYTES (2 or 4), Q_BF16 (of two bytes: bfloat16, else float16), GROUP (tokens of a
// group, 32 to 256), CHANGED (capacity of the list of changed tokens), LATE_TOP_K (largest top-k of a late row),
// BLOCKS_PER_SM

#include "sample_row.cuh"

#define WORDS 16  // words of bits per thread that are read concurrently

struct Shared {
  Meeting meeting;
  u32 highest[MAX_GROUPS];  // keys of each group's highest changed logit
  int tokens[CHANGED];      // the changed tokens
};

// A thread's words of bits, starting at `first`: tokens that penalties change, and tokens that only a bias may change.
// Words beyond the last one are 0.
__device__ __forceinline__ void read_bits(const Row &r, int first, u32 (&changed)[WORDS], u32 (&plain)[WORDS]) {
  u32 allowed[WORDS], occurred[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    int word = first + i * THREADS;
    allowed[i] = word >= r.num_words ? 0u : r.allowed ? r.allowed[word] : 0xffffffffu;
    occurred[i] = word < r.num_words && r.seen ? r.seen[word] : 0u;
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    changed[i] = allowed[i] & occurred[i];
    plain[i] = allowed[i] & ~occurred[i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sample_split(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  let_next_kernel_start();
  Shared &shared = *reinterpret_cast<Shared *>(memory);
  Team t = team_at(shared.meeting);
  const int at = blockIdx.x;
  Row r = row_of(p, at);
  if (!r.processes || r.late) return;
  const bool asks_groups = !kept_of(p, at).truncates;
  // 1. Bits
  for (int group = t.thread; asks_groups && group < MAX_GROUPS; group += THREADS) shared.highest[group] = key_of(NEG_INF);
  u32 changed[WORDS], plain[WORDS];
  int mine = 0;
#pragma unroll 1
  for (int first = t.thread; first < r.num_words; first += WORDS * THREADS) {
    read_bits(r, first, changed, plain);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      mine += __popc(changed[i]);
      if (first + i * THREADS < r.num_words) r.plain[first + i * THREADS] = plain[i];
    }
  }
  int penalized, place = before(t, mine, penalized);
  int of_bias = 0, biased;
  for (int i = t.thread; i < r.num_biases; i += THREADS) {
    int token = r.bias_tokens[i];
    if (!only_biased(r, token)) continue;
    ++of_bias;
    atomicAnd(r.plain + token / 32, ~(1u << token % 32));
  }
  int bias_place = penalized + before(t, of_bias, biased);
  r.num_changed = penalized + biased > CHANGED ? -1 : penalized + biased;
  // 2. The list
  if (r.num_changed > 0) {
    const bool known = r.num_words <= WORDS * THREADS;  // all words were read at once and are still in registers
#pragma unroll 1
    for (int first = t.thread; first < r.num_words; first += WORDS * THREADS) {
      if (!known) read_bits(r, first, changed, plain);
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        for (u32 left = changed[i]; left; left &= left - 1)
          shared.tokens[place++] = 32 * (first + i * THREADS) + __ffs(left) - 1;
    }
    for (int i = t.thread; i < r.num_biases; i += THREADS)
      if (only_biased(r, r.bias_tokens[i])) shared.tokens[bias_place++] = r.bias_tokens[i];
  }
  __syncthreads();
  // 3. Logits
  float highest = NEG_INF;
  const auto note = [&](int token, float x) {
    highest = fmaxf(highest, x);
    if (asks_groups) atomicMax(&shared.highest[token / GROUP], key_of(x));
  };
  if (r.num_changed < 0) for_changed(t, r, note);
#pragma unroll 1
  for (int start = t.thread; start < r.num_changed; start += AT_ONCE * THREADS) {
    int tokens[AT_ONCE], counts[AT_ONCE];
    float logits[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int of_list = start + i * THREADS;
      tokens[i] = of_list < r.num_changed ? shared.tokens[of_list] : 0;
      logits[i] = of_list < r.num_changed ? logit_at(r, tokens[i]) : NEG_INF;
      counts[i] = of_list < penalized ? r.counts[tokens[i]] : 0;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int of_list = start + i * THREADS;
      if (of_list >= r.num_changed) continue;
      const float x = processed(r, tokens[i], logits[i], of_list < penalized, counts[i]);
      r.changed_tokens[of_list] = tokens[i];
      r.changed_logits[of_list] = x;
      note(tokens[i], x);
    }
  }
  u32 largest = key_of(highest), unused = 0;
  extremes_all(t, largest, unused);
  for (int group = t.thread; asks_groups && group < p.num_groups; group += THREADS)
    p.changed_best[(i64)at * p.num_groups + group] = value_of(shared.highest[group]);
  if (t.thread > 0) return;
  p.num_changed[at] = r.num_changed;
  p.highest_changed[at] = value_of(largest);
}
