// Sampling: a row, its noise, its logits, and its changed tokens, which mask, bias and penalties change.

#include "sample_block.cuh"

#define PIECE (16 / LOGIT_BYTES)  // logits per 16 bytes
#define MAX_HEAT 1e30f
#define MIN_HEAT 1e-30f           // below it, all logits except the best have weight 0

struct Params {
  const void *logits;         // [rows, vocab]
  const float *temperatures;  // [rows], like all fields up to `frequency`; null: no row uses it
  const i64 *seeds;
  const int *seq_lens, *req_indices, *top_k;
  const float *top_p, *min_p, *repetition, *presence, *frequency;
  const u32 *seen;            // [state_rows, words]
  const int *counts;          // [state_rows, vocab]
  const int *bias_tokens;     // [bias_rows, 2, bias_capacity]
  const float *bias_values;   // [bias_rows, 2, bias_capacity]
  const int *bias_lists;      // [bias_rows, 3]: sizes of both lists, and the length from which the first one applies
  const u32 *mask_words;      // [num_masks, words]
  const int *mask_index;      // [rows]
  const float *group_best;    // [rows, num_groups]: the highest logit of a group's plain tokens; in a late row,
                              // the highest model logit of all its tokens
  const float *group_mass;    // [rows, num_groups], relative to the group's best
  float *changed_best;        // [rows, num_groups]: the highest logit of a group's changed tokens
  u32 *plain_words;           // [rows, num_groups * WORDS_OF_GROUP]: bits of unchanged tokens. In a late row,
                              // valid only once it takes passes
  int *num_changed;           // [rows]: number of listed changed tokens; -1: too many
  float *highest_changed;     // [rows]
  int *changed_tokens;        // [rows, CHANGED]
  float *changed_logits;      // [rows, CHANGED]
  int *out;                   // [rows]
  i64 logits_row;             // stride
  int vocab, state_rows, bias_rows, bias_capacity, num_masks, num_groups;
};

// Truncation of a row; 0, 1 and 0 if off.
struct Kept {
  int top_k;
  float top_p, min_p;
  bool truncates;  // top-k or top-p requires a search for a threshold; false for greedy rows
};
__device__ __forceinline__ Kept kept_of(const Params &p, int at) {
  Kept kept = {0, 1.0f, 0.0f, false};
  if (!p.top_k) return kept;
  const int top_k = p.top_k[at];
  const float top_p = p.top_p[at], min_p = p.min_p[at];
  if (top_k > 0 && top_k < p.vocab) kept.top_k = top_k;
  if (top_p < 1.0f) kept.top_p = top_p;
  if (min_p > 0.0f) kept.min_p = fminf(min_p, 1.0f);
  kept.truncates = p.temperatures[at] > 0.0f && kept.top_k != 1 && kept.top_p > 0.0f;
  if (kept.top_k == 0 && kept.top_p >= 1.0f) kept.truncates = false;
  return kept;
}

// A row. Unused options are null or 0. `processes`: mask, bias or penalties change some of its tokens. They are stored
// in a list, or processed again by each reader if there are too many (-1). All other tokens are plain.
//
// `late`: top-k is at most LATE_TOP_K, and only penalties change tokens, without raising any logit. The model's logit
// of a token thus bounds its processed logit, and few changed tokens reach the floor. Only these are processed, after
// they are listed.
struct Row {
  const char *logits;
  bool aligned;  // logits can be read 16 bytes at a time
  int vocab, num_words;
  const u32 *allowed, *seen;
  const int *counts, *bias_tokens;
  const float *bias_values;
  int num_biases;
  float repetition, presence, frequency;
  bool processes, late;
  u32 *plain;  // null if all tokens are plain, or the row is late
  int num_changed;
  int *changed_tokens;
  float *changed_logits;
  u32 seed_low, seed_high, position;
  float heat, rate;  // rate: converts logit differences to exponents of 2
};

// Noise: see noise_reference(). With explicit rounding, group bounds and token scores round identically.

// Four words of Philox-4x32-10.
struct Random { u32 word[4]; };
__device__ __forceinline__ Random philox(const Row &r, u32 counter, u32 kind) {
  u32 c0 = counter, c1 = r.position, c2 = kind, c3 = 0, low = r.seed_low, high = r.seed_high;
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(b >> 32) ^ c1 ^ low;
    c1 = (u32)b;
    c2 = (u32)(a >> 32) ^ c3 ^ high;
    c3 = (u32)a;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
__device__ __forceinline__ float exponential(float u) {  // -log(1 - u); a series for small u, where it is exact
  float series = __fmul_rn(u, __fmaf_rn(u, __fmaf_rn(u, __fmaf_rn(u, 0.25f, 0.3333333333333333f), 0.5f), 1.0f));
  return u < 0.015625f ? series : -logf(fmaxf(__fadd_rn(1.0f, -u), 2.9802322387695312e-08f));
}
// The least exponential variate of a group of 32 adjacent tokens, given the word of the group.
__device__ __forceinline__ float least_of(u32 word) {
  float u = __fmaf_rn((float)(word >> 5), 7.450580596923828e-09f, 3.725290298461914e-09f);
  return __fmul_rn(exponential(u), 0.03125f);
}
// The amount by which a token's variate exceeds the least variate, if another token has the least.
__device__ __forceinline__ float above_least(const Row &r, int token) {
  u32 own = philox(r, token, 0).word[0];
  return exponential(__fmaf_rn((float)own, 2.3283064365386963e-10f, 1.1641532182693481e-10f));
}
// The random word of the group of 32 adjacent tokens that contains `token`.
__device__ __forceinline__ u32 word_at(const Row &r, int token) {
  Random random = philox(r, token / 128, 1);
  int at = token / 32 % 4;
  return at < 2 ? (at ? random.word[1] : random.word[0]) : (at == 2 ? random.word[2] : random.word[3]);
}
__device__ __forceinline__ float score_of(const Row &r, float logit, float variate) {
  return __fmaf_rn(r.heat, -logf(variate), logit);
}
// Whether the token has the least variate of its group.
__device__ __forceinline__ bool is_own(u32 word, int token) { return (int)(word & 31) == token % 32; }
__device__ __forceinline__ float drawn_score(const Row &r, int token, u32 word, float logit) {
  const float least = least_of(word);
  return score_of(r, logit, is_own(word, token) ? least : __fadd_rn(least, above_least(r, token)));
}
// An upper bound of a score, in few instructions. With u the word's fraction, the least variate is -log(1 - u) / 32,
// which is at least u / 32. The margin is far above the error of the logarithm.
__device__ __forceinline__ float bound_of(const Row &r, u32 word, float logit) {
  const float noise = 32.0f * LN2 - LN2 * logarithm2((float)(word >> 5) + 0.5f);
  return r.heat * (noise + 1e-3f) + logit;
}

// Logits

__device__ __forceinline__ float logit_at(const Row &r, int token) {  // the model's logit; -inf for NaN
#if LOGIT_BYTES == 4
  float x = reinterpret_cast<const float *>(r.logits)[token];
#else
  float x = from_query(reinterpret_cast<const u16 *>(r.logits)[token]);
#endif
  return x > NEG_INF ? x : NEG_INF;
}
// Pieces of 16 bytes of raw logits, starting at the given tokens. All reads are issued before the first is used.
// Unaligned rows are read logit by logit. The row's last tokens may not fill a piece.
template <int K>
__device__ __forceinline__ void read_pieces(const Row &r, const int (&tokens)[K], const bool (&wanted)[K],
                                            int4 (&pieces)[K]) {
  if (r.aligned) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (wanted[k]) pieces[k] = *reinterpret_cast<const int4 *>(r.logits + (i64)tokens[k] * LOGIT_BYTES);
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      u32 words[4] = {0, 0, 0, 0};
      for (int i = 0; wanted[k] && i < 4; ++i) {
#if LOGIT_BYTES == 4
        words[i] = reinterpret_cast<const u32 *>(r.logits)[tokens[k] + i];
#else
        const u16 *two = reinterpret_cast<const u16 *>(r.logits) + tokens[k] + 2 * i;
        words[i] = two[0] | (u32)two[1] << 16;
#endif
      }
      pieces[k] = int4{(int)words[0], (int)words[1], (int)words[2], (int)words[3]};
    }
  }
}
__device__ __forceinline__ void unpack(int4 piece, float (&logits)[PIECE]) {
  const u32 words[4] = {(u32)piece.x, (u32)piece.y, (u32)piece.z, (u32)piece.w};
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
#if LOGIT_BYTES == 4
    logits[i] = __int_as_float(words[i]);
#else
    logits[i] = from_query((u16)(words[i / 2] >> 16 * (i % 2)));
#endif
  }
}

__device__ __forceinline__ bool has_bit(const u32 *words, int token) { return words[token / 32] >> token % 32 & 1; }

// The bias of a token, or 0: a binary search in the row's ascending list.
__device__ __forceinline__ float bias_of(const Row &r, int token) {
  int at = 0;
  for (int length = r.num_biases; length > 1;) {
    int half = length / 2;
    if (r.bias_tokens[at + half] <= token) at += half;
    length -= half;
  }
  return r.num_biases > 0 && r.bias_tokens[at] == token ? r.bias_values[at] : 0.0f;
}
// A logit after bias and penalties; `occurred`: the token is in the prompt or the output.
__device__ __forceinline__ float processed(const Row &r, int token, float x, bool occurred, int count) {
  if (r.num_biases > 0) x = __fadd_rn(x, bias_of(r, token));
  if (occurred) {
    x = x > 0.0f ? __fdiv_rn(x, r.repetition) : __fmul_rn(x, r.repetition);
    x = __fadd_rn(x, -__fmul_rn(r.frequency, (float)count));
    if (count > 0) x = __fadd_rn(x, -r.presence);
  }
  return x > NEG_INF ? x : NEG_INF;
}
__device__ __forceinline__ float processed_at(const Row &r, int token) {
  bool occurred = r.seen && has_bit(r.seen, token);
  return processed(r, token, logit_at(r, token), occurred, occurred ? r.counts[token] : 0);
}
// Whether only the bias changes a token of the bias list.
__device__ __forceinline__ bool only_biased(const Row &r, int token) {
  return token >= 0 && token < r.vocab && !(r.allowed && !has_bit(r.allowed, token)) &&
         !(r.seen && has_bit(r.seen, token));
}

// Visit each changed token with its processed logit, one thread per token, always in the same order.
template <typename Visit> __device__ __forceinline__ void for_changed(const Team &t, const Row &r, Visit visit) {
  if (!r.processes) return;
  if (r.num_changed >= 0) {
#pragma unroll 1
    for (int start = t.thread; start < r.num_changed; start += AT_ONCE * THREADS) {
      int tokens[AT_ONCE];
      float logits[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (start + i * THREADS >= r.num_changed) continue;
        tokens[i] = r.changed_tokens[start + i * THREADS];
        logits[i] = r.changed_logits[start + i * THREADS];
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (start + i * THREADS < r.num_changed) visit(tokens[i], logits[i]);
    }
    return;
  }
  for (int word = t.thread; word < r.num_words; word += THREADS) {
    u32 left = (r.allowed ? r.allowed[word] : 0xffffffffu) & (r.seen ? r.seen[word] : 0u);
    for (; left; left &= left - 1) visit(32 * word + __ffs(left) - 1, processed_at(r, 32 * word + __ffs(left) - 1));
  }
  for (int i = t.thread; i < r.num_biases; i += THREADS) {
    int token = r.bias_tokens[i];
    if (only_biased(r, token)) visit(token, processed_at(r, token));
  }
}

__device__ __forceinline__ u32 *plain_of(const Params &p, int at) {
  return p.plain_words + (i64)at * p.num_groups * WORDS_OF_GROUP;
}
// A block's row, with unused options off and without its list of changed tokens.
__device__ __forceinline__ Row row_of(const Params &p, int at) {
  Row r = {};
  r.logits = static_cast<const char *>(p.logits) + at * p.logits_row * LOGIT_BYTES;
  r.aligned = reinterpret_cast<u64>(r.logits) % 16 == 0;
  r.vocab = p.vocab;
  r.num_words = (p.vocab + 31) / 32;
  const float temperature = p.temperatures[at];
  r.heat = temperature > 0.0f ? fminf(temperature, MAX_HEAT) : 0.0f;
  r.rate = LOG2E / fmaxf(r.heat, MIN_HEAT);
  if (p.mask_index) {
    int mask = p.mask_index[at];
    if (mask >= 0 && mask < p.num_masks) r.allowed = p.mask_words + (i64)mask * r.num_words;
  }
  // Keep these reads independent: each takes as long as a loop iteration.
  const int id = p.req_indices ? p.req_indices[at] : -1;
  float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;
  if (p.repetition) {
    repetition = p.repetition[at];
    presence = p.presence[at];
    frequency = p.frequency[at];
  }
  const u64 seed = (u64)p.seeds[at];
  r.seed_low = (u32)seed;
  r.seed_high = (u32)(seed >> 32);
  r.position = (u32)p.seq_lens[at];
  if (p.bias_lists && id >= 0 && id < p.bias_rows) {
    const int *lists = p.bias_lists + 3 * (i64)id;
    const int count = lists[0], early_count = lists[1];
    const bool early = (int)r.position < lists[2];
    r.num_biases = max(min(early ? early_count : count, p.bias_capacity), 0);
    r.bias_tokens = p.bias_tokens + (2 * (i64)id + early) * p.bias_capacity;
    r.bias_values = p.bias_values + (2 * (i64)id + early) * p.bias_capacity;
  }
  // Invalid penalties have no effect.
  r.repetition = repetition > 0.0f && repetition <= LARGEST ? repetition : 1.0f;
  r.presence = fabsf(presence) <= LARGEST ? presence : 0.0f;
  r.frequency = fabsf(frequency) <= LARGEST ? frequency : 0.0f;
  const bool penalized = r.repetition != 1.0f || r.presence != 0.0f || r.frequency != 0.0f;
  if (penalized && id >= 0 && id < p.state_rows) {
    r.seen = p.seen + (i64)id * r.num_words;
    r.counts = p.counts + (i64)id * p.vocab;
  }
  r.processes = r.allowed || r.seen || r.num_biases > 0;
  const Kept kept = kept_of(p, at);
  const bool lowers = r.repetition >= 1.0f && r.presence >= 0.0f && r.frequency >= 0.0f;
  const bool by_top_k = kept.truncates && kept.top_k > 0 && kept.top_k <= LATE_TOP_K;
  r.late = r.seen && !r.allowed && r.num_biases == 0 && lowers && by_top_k;
  if (r.late) {
    r.num_changed = -1;
  } else if (r.processes) {
    r.plain = plain_of(p, at);
    r.changed_tokens = p.changed_tokens + (i64)at * CHANGED;
    r.changed_logits = p.changed_logits + (i64)at * CHANGED;
  }
  return r;
}
