// One warp's attention to its KV tiles in shared memory: query fragments, a tile, and the partial result it leaves.

#include "primitives.cuh"

#define PACKED (QUERY_LEN * GROUP)
#define NT ((PACKED + 7) / 8)              // tiles of 8 query rows
#define KS (HEAD_DIM / 16)                 // steps of 16 along the head
#define ELEMENT (KV_FP8 ? 1 : 2)           // bytes
#define ROW_BYTES (HEAD_DIM * ELEMENT)
#define CHUNKS (ROW_BYTES / 16)
#define SUBTILES (KV_FP8 ? 2 : 1)
#define TILE (16 * SUBTILES)               // tokens
#define TILE_BYTES (TILE * ROW_BYTES)
#define OUT_PITCH (HEAD_DIM + 4)           // floats; keeps the stores of accumulators free of bank conflicts
#define PARTIAL_FLOATS (PACKED * (OUT_PITCH + 2))
#define STAGE_BYTES (2 * TILE_BYTES)
// The 16 bytes of a row are permuted so that ldmatrix meets no bank conflict. Rows are not padded: a sector of 32 bytes
// that falls into two lines of shared memory is fetched twice.
#define SWIZZLE(row) (((row) % 8) >> (CHUNKS % 8 == 0 ? 0 : CHUNKS % 4 == 0 ? 1 : 2))

struct Params {
  const void *q, *k, *v;
  const int *block_table, *work_list;
  void *out;
  float *lse, *partial_out, *partial_lse;
  int *counters;
  const float *k_scale, *v_scale, *slopes, *sinks;
  i64 q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row, out_token, out_head, lse_token;
  int k_scale_head, v_scale_head, segments_at, zeros_at, num_slots, window;
  float logit_factor, logit_cap;
};

static_assert(HEAD_DIM % TILE == 0 && BLOCK_N % TILE == 0 && STAGES >= 2 && PACKED <= 16, "not what the plan chooses");
static_assert(4 * PARTIAL_FLOATS <= STAGES * STAGE_BYTES, "the last partial result of a warp takes the place of its tiles");
static_assert(sizeof(Params) == PARAMS_BYTES, "the struct of native.py and this one differ");

struct Segment {
  int row, first_row, tile_begin, tile_end, seq_len, query_start, query_len, num_splits, split;
};

__device__ __forceinline__ float finite(float top) { return top == NEG_INF ? 0.0f : top; }  // -inf - -inf is NaN

// cap * tanh(t) where x is 2 log2(e) t, as logit_constants() scales it; see soft_cap() of tile.py.
__device__ __forceinline__ float soft_cap(float x, float cap) {
  const float h = LN2 / 2, square = x * x;
  float series = x * (h + square * (-h * h * h / 3 + square * (2 * h * h * h * h * h / 15 -
                                                                square * 17 * h * h * h * h * h * h * h / 315)));
  float quotient = 1.0f - 2.0f / (power2(x > 64.0f ? 64.0f : x) + 1.0f);
  return cap * (square < 0.0625f / (h * h) ? series : quotient);
}

__device__ __forceinline__ int first_visible(const Segment &s, const Params &p) {
#if WINDOW
  return max(s.seq_len - s.query_len + 1 - p.window, 0);
#else
  return 0;
#endif
}

// Query rows as the columns of an mma, and what turns products into logits.
struct Queries {
  u32 b[NT][KS][2];
  float factor[NT][2];
#if ALIBI
  float slope[NT][2];
#endif
};

__device__ __forceinline__ void load_queries(Queries &queries, const Segment &s, const Params &p, int kv_head,
                                             float factor, int lane) {
  const u16 *q = static_cast<const u16 *>(p.q);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    int packed = 8 * n + lane / 4;
    bool valid = packed < PACKED;
    const u16 *row = q + (s.query_start + packed / GROUP) * p.q_token + (kv_head * GROUP + packed % GROUP) * p.q_head;
    // fp8 comes four to a register, so there the four lanes of a row take four elements in turn.
#pragma unroll
    for (int k = 0; k < KS; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int d = 16 * k + (KV_FP8 ? lane % 4 * 4 + 2 * half : lane % 4 * 2 + 8 * half);
        queries.b[n][k][half] = valid ? *reinterpret_cast<const u32 *>(row + d) : 0;
      }
    float scale = factor;
#if KV_FP8
    // A power of two per row makes the queries fit float16.
    float peak = 1e-30f;
#pragma unroll
    for (int k = 0; k < KS; ++k)
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
    for (int k = 0; k < KS; ++k)
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
      int column = 8 * n + lane % 4 * 2 + j;
      queries.slope[n][j] = column < PACKED ? p.slopes[kv_head * GROUP + column % GROUP] * LOG2E : 0.0f;
#endif
    }
  }
}

struct State {
  float o[KS][NT][4], top[NT][2], sum[NT][2];
};

__device__ __forceinline__ void attend_tile(State &state, const Queries &queries, const Segment &s, const Params &p,
                                            u32 k_tile, int start, int lane) {
  float logits[SUBTILES][NT][4];
#pragma unroll
  for (int sub = 0; sub < SUBTILES; ++sub) {
    float product[2][NT][4] = {};  // two chains, for the latency of an mma
    u32 row = k_tile + (16 * sub + lane % 16) * ROW_BYTES, column = ((lane / 16) ^ SWIZZLE(lane)) * 16;
#if KV_FP8
#pragma unroll
    for (int k = 0; k < KS / 2; ++k) {
      u32 x[4];
      load_matrices(x, row + (column ^ (32 * k)));
      u32 low[4] = {widen(x[0]), widen(x[1]), widen(x[0] >> 16), widen(x[1] >> 16)};
      u32 high[4] = {widen(x[2]), widen(x[3]), widen(x[2] >> 16), widen(x[3] >> 16)};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        multiply(product[0][n], low, queries.b[n][2 * k]);
        multiply(product[1][n], high, queries.b[n][2 * k + 1]);
      }
    }
#else
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      u32 x[4];
      load_matrices(x, row + (column ^ (32 * k)));
#pragma unroll
      for (int n = 0; n < NT; ++n) multiply(product[k % 2][n], x, queries.b[n][k]);
    }
#endif
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = (product[0][n][i] + product[1][n][i]) * queries.factor[n][i % 2];
#if SOFTCAP
        x = soft_cap(x, p.logit_cap);
#endif
        logits[sub][n][i] = x;
      }
  }
  int first_end = CAUSAL ? s.seq_len - s.query_len + 1 : s.seq_len;  // what the first token sees
  bool masked = start + TILE > first_end;
#if WINDOW
  masked |= start <= s.seq_len - 1 - p.window;
#endif
  if (masked || ALIBI) {
#pragma unroll
    for (int sub = 0; sub < SUBTILES; ++sub)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int position = start + 16 * sub + lane / 4 + i / 2 * 8;
          int query = s.seq_len - s.query_len + (8 * n + lane % 4 * 2 + i % 2) / GROUP;
#if ALIBI
          float distance = fabsf((float)(query - position));
          logits[sub][n][i] -= queries.slope[n][i % 2] * (ALIBI == 2 ? sqrtf(distance) : distance);
#endif
          bool visible = position < s.seq_len && (!CAUSAL || position <= query);
#if WINDOW
          visible &= position > query - p.window;
#endif
          if (!visible) logits[sub][n][i] = NEG_INF;
        }
  }

  // The reference point of the exponentials follows the maximum only when that has grown by 2^8: sums and products
  // have the range, and a tile mostly costs no reduction over lanes.
  float peak[NT][2];
  bool grown = false;
#pragma unroll
  for (int n = 0; n < NT; ++n)
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
    for (int n = 0; n < NT; ++n)
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
        for (int m = 0; m < KS; ++m) {
          state.o[m][n][j] *= rescale;
          state.o[m][n][j + 2] *= rescale;
        }
      }
  }
  u32 weights[SUBTILES][NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
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
  for (int sub = 0; sub < SUBTILES; ++sub) {
    u32 v_tile = k_tile + TILE_BYTES + 16 * sub * ROW_BYTES;
#if KV_FP8
    // A 16-bit transposition keeps neighbours of the head together: rows g and g + 8 of the mma are elements 2g and
    // 2g + 1 of the head.
    u32 row = v_tile + lane % 16 * ROW_BYTES, column = ((lane / 16) ^ SWIZZLE(lane)) * 16;
#pragma unroll
    for (int m = 0; m < KS; m += 2) {
      u32 x[4];
      load_matrices_transposed(x, row + (column ^ (16 * m)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        u32 y = __byte_perm(x[2 * j], 0, 0x3120), z = __byte_perm(x[2 * j + 1], 0, 0x3120);
        u32 a[4] = {widen(y), widen(y >> 16), widen(z), widen(z >> 16)};
#pragma unroll
        for (int n = 0; n < NT; ++n) multiply(state.o[m + j][n], a, weights[sub][n]);
      }
    }
#else
    u32 row = v_tile + (lane % 8 + lane / 16 * 8) * ROW_BYTES, column = ((lane / 8 % 2) ^ SWIZZLE(lane)) * 16;
#pragma unroll
    for (int m = 0; m < KS; ++m) {
      u32 a[4];
      load_matrices_transposed(a, row + (column ^ (32 * m)));
#pragma unroll
      for (int n = 0; n < NT; ++n) multiply(state.o[m][n], a, weights[sub][n]);
    }
#endif
  }
}

__device__ __forceinline__ void add_up(State &state) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int other = 4; other < 32; other *= 2)
        state.sum[n][j] += __shfl_xor_sync(0xffffffffu, state.sum[n][j], other);
}

// A warp's partial result: output rows that are not divided yet, and their statistics, added up.
__device__ __forceinline__ void leave_partial(const State &state, float *to, int lane) {
  float *stats = to + PACKED * OUT_PITCH;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int column = 8 * n + lane % 4 * 2 + j;
      if (column < PACKED) {
        if (lane < 4) {
          stats[2 * column] = state.top[n][j];
          stats[2 * column + 1] = state.sum[n][j];
        }
#pragma unroll
        for (int m = 0; m < KS; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            int d = 16 * m + (KV_FP8 ? lane / 4 * 2 + i : lane / 4 + 8 * i);
            to[column * OUT_PITCH + d] = state.o[m][n][j + 2 * i];
          }
      }
    }
}
