// Attention of one warp over KV tiles in shared memory.
//
// 1. load_queries   load the queries of the query tile as mma operands, and the factors that scale products to logits
// 2. attend_tile    one step of the online softmax over a tile of TILE tokens
// 3. reduce_sums    reduce the sums of weights over the lanes
// 4. store_partial  store the warp's partial result in shared memory, to merge it with the other KV splits
//
// Products are transposed: an mma multiplies an M side of 16 by an N side of 8. Tokens are the M side and queries the
// N side, so a query tile of up to 8 queries is padded to 8, not to 16. Queries are processed in octets, heads in steps
// of 16 elements.

#include "primitives.cuh"
#include "logits.cuh"

#define NUM_QUERIES (QUERY_LEN * NUM_QUERIES_PER_KV)  // per query tile; a query is one new token in one query head
#define OCTETS ((NUM_QUERIES + 7) / 8)     // groups of 8 queries
#define BLOCK_M (NUM_QUERIES <= 16 ? 16 : 32)  // maximum queries per query tile in the plan
#define HEAD_STEPS (HEAD_DIM / 16)         // steps of 16 elements along a head of Q or K
#define V_STEPS (V_HEAD_DIM / 16)          // steps along a head of V and of the output
#define ELEMENT (KV_FP8 ? 1 : 2)           // bytes of an element of K or V
#define K_BYTES (HEAD_DIM * ELEMENT)       // bytes of one token's K
#define V_BYTES (V_HEAD_DIM * ELEMENT)     // bytes of one token's V
#define K_PIECES (K_BYTES / 16)            // pieces of 16 bytes, one copy each
#define V_PIECES (V_BYTES / 16)
#define SUBTILES (KV_FP8 ? 2 : 1)          // subtiles of 16 tokens
#define TILE (16 * SUBTILES)               // tokens that a warp multiplies at a time
#define OUT_PITCH (V_HEAD_DIM + 4)         // floats per query; the 4 extra floats avoid bank conflicts in stores
#define PARTIAL_FLOATS (NUM_QUERIES * (OUT_PITCH + 2))  // a partial result: sums, reference maxima, sums of weights
#define STAGE_BYTES (TILE * (K_BYTES + V_BYTES))  // K, then V
// The 16-byte pieces of a token are permuted so that ldmatrix has no bank conflicts. Padding the tokens instead would
// fetch every 32-byte sector that crosses a line of shared memory twice.
#define SWIZZLE(token, pieces) (((token) % 8) >> ((pieces) % 8 == 0 ? 0 : (pieces) % 4 == 0 ? 1 : 2))

// The same struct as _Params in native.py. Strides are in elements; `k_slot` is the stride between adjacent KV slots.
struct Params {
  const void *q, *k, *v;
  const int *block_table, *work_list;
  void *out;
  float *lse, *partial_out, *partial_lse;
  int *counters;
  const float *k_scale, *v_scale, *slopes, *sinks;
  i64 q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row, out_token, out_head, lse_token;
  int k_scale_head, v_scale_head, splits_at, zeros_at, max_partials, window;  // window: size of the window or chunk
  float logit_factor, logit_cap;
};

static_assert(HEAD_DIM % TILE == 0 && V_HEAD_DIM % TILE == 0 && BLOCK_N % TILE == 0 && STAGES >= 2 && NUM_QUERIES <= 32,
              "the plan chooses other sizes");
static_assert(4 * PARTIAL_FLOATS <= STAGES * STAGE_BYTES, "the last partial result of a warp overwrites its tiles");
static_assert(sizeof(Params) == PARAMS_BYTES, "the struct of native.py and this one differ");

// A KV split in the work list; work_list.py documents it.
struct KVSplit {
  int req, first_query, tile_begin, tile_end, seq_len, first_token, query_len, num_splits, split_index;
};

// The first position of the chunk that contains `position`.
__device__ __forceinline__ int chunk_start(int position, const Params &p) { return position - position % p.window; }

// The first position that any query of the split sees.
__device__ __forceinline__ int first_visible(const KVSplit &s, const Params &p) {
#if WINDOW == 2
  return chunk_start(max(s.seq_len - s.query_len, 0), p);
#elif WINDOW
  return max(s.seq_len - s.query_len + 1 - p.window, 0);
#else
  return 0;
#endif
}

// The queries of a query tile as the N side of mma: b[octet][step of the head]. The other fields scale products to
// logits for the two queries of each octet whose products this lane has.
struct Queries {
  u32 b[OCTETS][HEAD_STEPS][2];
  float factor[OCTETS][2];
#if ALIBI
  float slope[OCTETS][2];
#endif
};

__device__ __forceinline__ void load_queries(Queries &queries, const KVSplit &s, const Params &p, int kv_head,
                                             float factor, int lane) {
  const u16 *q = static_cast<const u16 *>(p.q);
#pragma unroll
  for (int n = 0; n < OCTETS; ++n) {
    int query = 8 * n + lane / 4;
    bool valid = query < NUM_QUERIES;
    const u16 *vector = q + (s.first_token + TOKEN_OF(query)) * p.q_token + Q_HEAD_OF(kv_head, query) * p.q_head;
    // A register holds four fp8 keys, so each of the four lanes of a query has four consecutive elements to match.
#pragma unroll
    for (int k = 0; k < HEAD_STEPS; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int d = 16 * k + (KV_FP8 ? lane % 4 * 4 + 2 * half : lane % 4 * 2 + 8 * half);
        queries.b[n][k][half] = valid ? *reinterpret_cast<const u32 *>(vector + d) : 0;
      }
    float scale = factor;
#if KV_FP8
    // fp8 keys are multiplied as float16. Dividing each query by a power of two brings it into float16's range.
    float peak = 1e-30f;
#pragma unroll
    for (int k = 0; k < HEAD_STEPS; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 x = queries.b[n][k][half];
        peak = fmaxf(peak, fmaxf(fabsf(from_query(x & 0xffff)), fabsf(from_query(x >> 16))));
      }
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
    float exponent = exp2f(fminf(ceilf(log2f(peak)), 127.0f));
    scale *= exponent;
    exponent = 1.0f / exponent;
#pragma unroll
    for (int k = 0; k < HEAD_STEPS; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 x = queries.b[n][k][half];
        queries.b[n][k][half] = pack(from_query(x & 0xffff) * exponent, from_query(x >> 16) * exponent);
      }
#endif
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      queries.factor[n][j] = __shfl_sync(0xffffffffu, scale, (lane % 4 * 2 + j) * 4);
#if ALIBI
      int query = 8 * n + lane % 4 * 2 + j;
      queries.slope[n][j] = query < NUM_QUERIES ? p.slopes[Q_HEAD_OF(kv_head, query)] * LOG2E : 0.0f;
#endif
    }
  }
}

// The online softmax of a split. o[step of the head][octet] holds sums of weight x value, not divided by the sum of
// weights. top holds reference maxima: weight = 2^(logit - top). sum is this lane's share of the sums of weights.
struct State {
  float o[V_STEPS][OCTETS][4], top[OCTETS][2], sum[OCTETS][2];
};

// Attend to one tile: `k_tile` is its K in shared memory, followed by its V; `start` is its first position.
__device__ __forceinline__ void attend_tile(State &state, const Queries &queries, const KVSplit &s, const Params &p,
                                            u32 k_tile, int start, int lane) {
  // Logits K Q^T: a lane holds two tokens and two queries of each octet.
  float logits[SUBTILES][OCTETS][4];
#pragma unroll
  for (int sub = 0; sub < SUBTILES; ++sub) {
    float product[2][OCTETS][4] = {};  // two alternating sums, so that an mma does not wait for the previous one
    u32 token_at = k_tile + (16 * sub + lane % 16) * K_BYTES, column = ((lane / 16) ^ SWIZZLE(lane, K_PIECES)) * 16;
#if KV_FP8
#pragma unroll
    for (int k = 0; k < HEAD_STEPS / 2; ++k) {
      u32 x[4];
      load_matrices(x, token_at + (column ^ (32 * k)));
      u32 low[4] = {widen(x[0]), widen(x[1]), widen(x[0] >> 16), widen(x[1] >> 16)};
      u32 high[4] = {widen(x[2]), widen(x[3]), widen(x[2] >> 16), widen(x[3] >> 16)};
#pragma unroll
      for (int n = 0; n < OCTETS; ++n) {
        multiply(product[0][n], low, queries.b[n][2 * k]);
        multiply(product[1][n], high, queries.b[n][2 * k + 1]);
      }
    }
#else
#pragma unroll
    for (int k = 0; k < HEAD_STEPS; ++k) {
      u32 x[4];
      load_matrices(x, token_at + (column ^ (32 * k)));
#pragma unroll
      for (int n = 0; n < OCTETS; ++n) multiply(product[k % 2][n], x, queries.b[n][k]);
    }
#endif
#pragma unroll
    for (int n = 0; n < OCTETS; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = (product[0][n][i] + product[1][n][i]) * queries.factor[n][i % 2];
#if SOFTCAP
        x = soft_cap(x, p.logit_cap);
#endif
        logits[sub][n][i] = x;
      }
  }
  // Apply masks only if some query does not see the whole tile.
  int first_end = CAUSAL ? s.seq_len - s.query_len + 1 : s.seq_len;  // the first token sees positions below this
  bool masked = start + TILE > first_end;
#if WINDOW == 2
  masked |= start < chunk_start(s.seq_len - 1, p);
#elif WINDOW
  masked |= start <= s.seq_len - 1 - p.window;
#endif
  if (masked || ALIBI) {
#pragma unroll
    for (int sub = 0; sub < SUBTILES; ++sub)
#pragma unroll
      for (int n = 0; n < OCTETS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int position = start + 16 * sub + lane / 4 + i / 2 * 8;
          int query_position = s.seq_len - s.query_len + (8 * n + lane % 4 * 2 + i % 2) / NUM_QUERIES_PER_KV;
#if ALIBI
          float distance = fabsf((float)(query_position - position));
          logits[sub][n][i] -= queries.slope[n][i % 2] * (ALIBI == 2 ? sqrtf(distance) : distance);
#endif
          bool visible = position < s.seq_len && (!CAUSAL || position <= query_position);
#if WINDOW == 2
          visible &= position >= chunk_start(query_position, p);
#elif WINDOW
          visible &= position > query_position - p.window;
#endif
          if (!visible) logits[sub][n][i] = NEG_INF;
        }
  }

  // The reference maximum is updated only if a logit exceeds it by more than 8. Weights are then at most 2^8, which is
  // safe for sums and products. Most tiles need no reduction over the lanes and no rescaling.
  float peak[OCTETS][2];
  bool grown = false;
#pragma unroll
  for (int n = 0; n < OCTETS; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float x = NEG_INF;
#pragma unroll
      for (int sub = 0; sub < SUBTILES; ++sub) x = fmaxf(x, fmaxf(logits[sub][n][j], logits[sub][n][j + 2]));
      peak[n][j] = x;
      grown |= x > state.top[n][j] + 8.0f;
    }
  if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
    for (int n = 0; n < OCTETS; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float x = peak[n][j];
#pragma unroll
        for (int other = 4; other < 32; other *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
        x = fmaxf(x, state.top[n][j]);
        float rescale = power2(state.top[n][j] - finite(x));
        state.top[n][j] = x;
        state.sum[n][j] *= rescale;
#pragma unroll
        for (int m = 0; m < V_STEPS; ++m) {
          state.o[m][n][j] *= rescale;
          state.o[m][n][j + 2] *= rescale;
        }
      }
  }
  // Weights, their sums, and the weights as operands of the next product: movmatrix transposes tokens x queries.
  u32 weights[SUBTILES][OCTETS][2];
#pragma unroll
  for (int n = 0; n < OCTETS; ++n) {
    float base[2] = {finite(state.top[n][0]), finite(state.top[n][1])};
#pragma unroll
    for (int sub = 0; sub < SUBTILES; ++sub) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = power2(logits[sub][n][i] - base[i % 2]);
      state.sum[n][0] += w[0] + w[2];
      state.sum[n][1] += w[1] + w[3];
      weights[sub][n][0] = transpose(pack(w[0], w[1]));
      weights[sub][n][1] = transpose(pack(w[2], w[3]));
    }
  }
#pragma unroll
  for (int sub = 0; sub < SUBTILES; ++sub) {  // V^T x weights
    u32 v_tile = k_tile + TILE * K_BYTES + 16 * sub * V_BYTES;
#if KV_FP8
    // ldmatrix transposes 16 bits at a time, so two adjacent fp8 values of a head stay together. The numbering of
    // the M side accounts for it: its rows g and g + 8 are elements 2g and 2g + 1 of the head.
    u32 token_at = v_tile + lane % 16 * V_BYTES, column = ((lane / 16) ^ SWIZZLE(lane, V_PIECES)) * 16;
#pragma unroll
    for (int m = 0; m < V_STEPS; m += 2) {
      u32 x[4];
      load_matrices_transposed(x, token_at + (column ^ (16 * m)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        u32 y = __byte_perm(x[2 * j], 0, 0x3120), z = __byte_perm(x[2 * j + 1], 0, 0x3120);
        u32 a[4] = {widen(y), widen(y >> 16), widen(z), widen(z >> 16)};
#pragma unroll
        for (int n = 0; n < OCTETS; ++n) multiply(state.o[m + j][n], a, weights[sub][n]);
      }
    }
#else
    u32 token_at = v_tile + (lane % 8 + lane / 16 * 8) * V_BYTES;
    u32 column = ((lane / 8 % 2) ^ SWIZZLE(lane, V_PIECES)) * 16;
#pragma unroll
    for (int m = 0; m < V_STEPS; ++m) {
      u32 a[4];
      load_matrices_transposed(a, token_at + (column ^ (32 * m)));
#pragma unroll
      for (int n = 0; n < OCTETS; ++n) multiply(state.o[m][n], a, weights[sub][n]);
    }
#endif
  }
}

// Reduce the sums of weights over all lanes.
__device__ __forceinline__ void reduce_sums(State &state) {
#pragma unroll
  for (int n = 0; n < OCTETS; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int other = 4; other < 32; other *= 2)
        state.sum[n][j] += __shfl_xor_sync(0xffffffffu, state.sum[n][j], other);
}

// Store a warp's partial result in shared memory: V_HEAD_DIM undivided sums per query, then the reference maximum and
// the sum of weights of each query.
__device__ __forceinline__ void store_partial(const State &state, float *to, int lane) {
  float *stats = to + NUM_QUERIES * OUT_PITCH;
#pragma unroll
  for (int n = 0; n < OCTETS; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int query = 8 * n + lane % 4 * 2 + j;
      if (query < NUM_QUERIES) {
        if (lane < 4) {
          stats[2 * query] = state.top[n][j];
          stats[2 * query + 1] = state.sum[n][j];
        }
#pragma unroll
        for (int m = 0; m < V_STEPS; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            int d = 16 * m + (KV_FP8 ? lane / 4 * 2 + i : lane / 4 + 8 * i);
            to[query * OUT_PITCH + d] = state.o[m][n][j + 2 * i];
          }
      }
    }
}
