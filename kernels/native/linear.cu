// The product of a few tokens with a weight matrix, and the elementwise work that follows it in a decoder layer:
//
//   out[token, row] = sum over k of weight[row, k] * x[token, k]
//
// A decode step is bound by reading the weights, so the kernel keeps as many loads of weights in flight as it can.
//
// 1. Each lane loads its weights from memory into registers, where mma.sync multiplies them: 16 rows of weights are the
//    first operand, and 8 tokens the second. A lane reads 16 adjacent bytes of a row, and x at the same k, so the order
//    of k within a step of 64 bytes does not matter.
// 2. A tile has TILE_ROWS rows. ROW_WARPS warps of a block take different rows of the tile and read the same x, so most
//    of their reads of x hit L1. The other warps, and the blocks of a cluster, split k. The warps of a block add their
//    sums through shared memory. Each block of a cluster then adds the sums of all blocks for its share of the tokens.
//    The order of all additions is fixed, so results are deterministic.
// 3. A block starts to load weights before it waits for the earlier kernels of the step, because no kernel of a step
//    writes weights. A block with several tiles loads the first weights of its next tile before it finishes a tile.
//
// Quantized weights are converted to bfloat16 in registers. 8-bit weights are e4m3 with a scale per row, which the
// epilogue applies. A 4-bit weight is (q - zero) * scale, with a scale and a zero for each row and GROUP elements of k.
//
// RMSNorm is fused. The kernel that writes x stores residual * gain, and sums of squares of SQUARE_ROWS residuals each.
// The next product multiplies its sums over k by 1 / rms of the token.
//
// Compile-time macros: END (the epilogue, below), BITS (per weight: 16, 8 or 4), GROUP (with 4 bits), TOKEN_TILES (of 8
// tokens), ROW_TILES (of 16 rows), WARPS, ROW_WARPS, CLUSTER (blocks that split k), BLOCKS (per multiprocessor), UNROLL
// (steps in flight per warp), EVEN (k is a multiple of STEP * K_PARTS * UNROLL), HEAD_DIM and HALF (ROPE_WRITE: half of
// the rotated dims), PAGE_SIZE, PARAMS_BYTES, Q_BF16 (1)

#include "primitives.cuh"

#define PLAIN 0       // out = sums
#define ADD 1         // residual += sums; out = residual * gain; squares_out = sums of squares of the residual
#define SILU_MUL 2    // out = silu(sums of row) * sums of width + row
#define ROPE_WRITE 3  // queries are rotated and stored in out; keys are rotated and stored in the cache, with values

#define THREADS (32 * WARPS)
#define K_WARPS (WARPS / ROW_WARPS)
#define K_PARTS (K_WARPS * CLUSTER)
#define WARP_ROWS (16 * ROW_TILES)
#define TILE_ROWS (WARP_ROWS * ROW_WARPS)
#define GROUPS (2 * ROW_TILES)  // groups of 8 rows per warp
#define TILE_TOKENS (8 * TOKEN_TILES)
#define BLOCK_TOKENS (TILE_TOKENS / CLUSTER)  // tokens whose outputs a block computes: rank, rank + CLUSTER, ...
#define TOKENS_PER_WARP ((BLOCK_TOKENS + WARPS - 1) / WARPS)  // tokens whose 1 / rms a warp computes
#define SQUARE_ROWS (TILE_ROWS < 32 ? TILE_ROWS : 32)  // rows per sum of squares
#define PITCH (TILE_ROWS + 4)  // floats per token of the sums in shared memory
// SILU_MUL and ROPE_WRITE combine two rows of a tile, which are half a tile apart.
#define PAIRED (END == SILU_MUL || END == ROPE_WRITE)
#define TILE_WIDTH (PAIRED ? TILE_ROWS / 2 : TILE_ROWS)  // outputs per token and tile
#define PER_THREAD ((TILE_WIDTH * BLOCK_TOKENS + THREADS - 1) / THREADS)
#define OPERANDS_EARLY (PER_THREAD <= 2)  // otherwise the sums need the registers
#define STEP_BYTES 64                // bytes of a row that 4 lanes read with one load each
#define EIGHTS (16 / BITS)           // a lane multiplies 8 * EIGHTS elements of k per step, 8 per load of x
#define STEP (32 * EIGHTS)           // elements of k per step
#define LINE (UNROLL % 2 ? 1 : 2)    // adjacent steps that a warp takes: 2 are 128 bytes of a row
#define X_LOADS (UNROLL * EIGHTS)    // loads of x per token in UNROLL steps
#define X_AHEAD (X_LOADS % 4 ? X_LOADS : TOKEN_TILES == 1 ? 4 : TOKEN_TILES < 4 ? 2 : 1)  // loads in flight

struct Params {
  const char *weight;    // [rows, row_bytes]
  const void *scale;     // 8 bits: float32 [rows]; 4 bits: bfloat16 [rows, depth / GROUP]; 16 bits: null
  const unsigned char *zero;  // 4 bits: [rows, depth / GROUP]
  const u16 *bias;       // [rows]; or null
  const u16 *x;          // [rows of x, depth]
  const i64 *x_rows;     // [tokens]: row of x of each token; null: its index
  const float *squares;  // [rows of x, parts]; null: x needs no norm
  u16 *out;              // [tokens, width]
  u16 *residual;         // ADD: [tokens, width]
  const u16 *gain;       // ADD: [width]
  float *squares_out;    // ADD: [tokens, width / SQUARE_ROWS]
  u16 *k_cache, *v_cache;        // ROPE_WRITE, as the rest
  const i64 *slots, *positions;  // [tokens]
  const float *cos_sin;          // [positions, 2 * HALF]
  i64 x_stride, out_stride, residual_stride;
  i64 k_page, k_slot, k_head, v_page, v_slot, v_head;  // strides of the cache
  int tokens, width, depth, row_bytes, tiles, parts;
  int steps;  // steps of a warp per tile
  int num_q_heads, num_kv_heads;
  float inverse_width, eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "linear_native.py has the same fields");
static_assert(END != ADD || TILE_WIDTH * BLOCK_TOKENS % 32 == 0, "whole warps add squares");

// The rows of a tile: two ranges of TILE_ROWS / 2 adjacent rows, which start at `low` and `high`.
struct Tile {
  int low, high;
  int head;      // ROPE_WRITE
  bool rotates;  // ROPE_WRITE: RoPE rotates each row of the first range with its counterpart in the second

  __device__ __forceinline__ int row(int i) const { return i < TILE_ROWS / 2 ? low + i : high + i - TILE_ROWS / 2; }
};

__device__ __forceinline__ Tile tile_at(const Params &p, int index) {
#if END == ROPE_WRITE
  const int per_head = HEAD_DIM / TILE_ROWS, of_head = index % per_head, head = index / per_head;
  const int num_rotated = head < p.num_q_heads + p.num_kv_heads ? HALF / TILE_WIDTH : 0;  // tiles of the head
  const bool rotates = of_head < num_rotated;
  const int low = head * HEAD_DIM + (rotates ? of_head * TILE_WIDTH : (of_head - num_rotated) * TILE_ROWS +
                                                                          2 * num_rotated * TILE_WIDTH);
  return {low, low + (rotates ? HALF : TILE_WIDTH), head, rotates};
#else
  const int low = index * TILE_WIDTH;
  return {low, END == SILU_MUL ? p.width + low : low + TILE_ROWS / 2, 0, false};
#endif
}

// Inputs of the epilogue, loaded before the sums are complete.
struct Operands {
  float scale_low, scale_high;  // 8 bits
  float bias_low, bias_high;
  u32 residual_gain;  // residual and gain, 16 bits each
  float cos, sin;
  i64 slot;
};

__device__ __forceinline__ Operands operands_at(const Params &p, const Tile &tile, int token, int row) {
  Operands r = {};
  if (token >= p.tokens) return r;
#if BITS == 8
  r.scale_low = static_cast<const float *>(p.scale)[tile.low + row];
  if (PAIRED) r.scale_high = static_cast<const float *>(p.scale)[tile.high + row];
#endif
  if (p.bias) {
    r.bias_low = from_query(p.bias[tile.low + row]);
    if (PAIRED) r.bias_high = from_query(p.bias[tile.high + row]);
  }
#if END == ADD
  r.residual_gain = p.residual[token * p.residual_stride + tile.low + row] | (u32)p.gain[tile.low + row] << 16;
#elif END == ROPE_WRITE
  if (tile.head >= p.num_q_heads) r.slot = p.slots[token];
  if (tile.rotates) {
    const float *angles = p.cos_sin + p.positions[token] * (2 * HALF) + tile.low % HEAD_DIM + row;
    r.cos = angles[0];
    r.sin = angles[HALF];
  }
#endif
  return r;
}

__device__ __forceinline__ float of_row(float sum, float scale) { return BITS == 8 ? sum * scale : sum; }

__device__ __forceinline__ u16 rounded(float x) { return (u16)pack_output(x, 0.0f); }

#if END == ROPE_WRITE
// Store the outputs of two rows of a head: queries in `out`, keys and values in the token's slot.
__device__ __forceinline__ void store_heads(const Params &p, const Tile &tile, int token, int row, i64 slot, float low,
                                            float high) {
  const int of_keys = tile.head - p.num_q_heads, of_values = of_keys - p.num_kv_heads;
  u16 *to;
  if (of_keys < 0) {
    to = p.out + token * p.out_stride + tile.head * HEAD_DIM;
  } else {
    if (slot < 0) return;
    const i64 page = slot / PAGE_SIZE, offset = slot % PAGE_SIZE;
    to = of_values < 0 ? p.k_cache + page * p.k_page + offset * p.k_slot + of_keys * p.k_head
                       : p.v_cache + page * p.v_page + offset * p.v_slot + of_values * p.v_head;
  }
  to[tile.low % HEAD_DIM + row] = rounded(low);
  to[tile.high % HEAD_DIM + row] = rounded(high);
}
#endif

// The weights that a lane reads from one row in one step.
struct Weights {
  int4 bytes;
#if BITS == 4
  u16 scale;
  unsigned char zero;
#endif
};

// Return 8 of the weights as pairs of bfloat16 in the order of k, starting at 8 * `eighth`.
struct Eight { u32 pairs[4]; };
__device__ __forceinline__ Eight widened(const Weights &w, int eighth) {
  const u32 words[4] = {(u32)w.bytes.x, (u32)w.bytes.y, (u32)w.bytes.z, (u32)w.bytes.w};
#if BITS == 16
  return {words[0], words[1], words[2], words[3]};
#elif BITS == 8
  // The sign, exponent and mantissa bits of an e4m3 number, moved to the same fields of a bfloat16, give the number
  // times 2^-120. This also holds for subnormal numbers.
  Eight r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 bytes = __byte_perm(words[2 * eighth + i / 2], 0, i % 2 ? 0x3424 : 0x1404);  // upper bytes of both halves
    r.pairs[i] = multiply_pair(masked_or(bytes >> 4, 0x07f007f0, bytes & 0x80008000), 0x7b807b80);
  }
  return r;
#else
  // The bfloat16 128 (0x4300) with q in its lowest bits is 128 + q.
  const u32 zero = (0x4300u | w.zero) * 0x10001u, scale = w.scale * 0x10001u;
  Eight r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 q = masked_or(words[eighth] >> (4 * i), 0x000f000f, 0x43004300);
    r.pairs[i] = multiply_pair(subtract_pair(q, zero), scale);
  }
  return r;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) linear(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  float *const sums_of_warps = reinterpret_cast<float *>(memory);           // [K_WARPS, TILE_TOKENS, PITCH]
  float *const scale = sums_of_warps + K_WARPS * TILE_TOKENS * PITCH;       // [BLOCK_TOKENS]
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row_of_warp = warp % ROW_WARPS * WARP_ROWS, k_warp = warp / ROW_WARPS;
#if CLUSTER > 1
  const int rank = blockIdx.y, k_part = rank * K_WARPS + k_warp;
  float *const sums_of_blocks = scale + TILE_TOKENS;  // [CLUSTER, BLOCK_TOKENS, TILE_ROWS]
  i64 *const arrived = reinterpret_cast<i64 *>(sums_of_blocks + TILE_TOKENS * TILE_ROWS);
#else
  const int rank = 0, k_part = k_warp;
#endif
  const int of_group = lane / 4;                // the lane's row in 8 rows, and its token in 8 tokens
  const int of_step = lane % 4 * (8 * EIGHTS);  // the lane's first k in a step
  const int all_steps = p.depth / STEP;

  // The K_PARTS parts of k take LINE adjacent steps each, in turn.
  const auto step_at = [&](int i) { return k_part * LINE + i * K_PARTS; };  // i: a multiple of LINE
  const auto ahead_by = [&](int u) { return u / LINE * (LINE * K_PARTS) + u % LINE; };
  Weights weights[UNROLL][GROUPS];
  const i64 rows_8 = 8 * (i64)p.row_bytes;
  // Where the lane reads a tile at its i-th step and later, in both halves of its warp's rows.
  struct Source {
    const char *low, *high;
    int step;
#if BITS == 4
    int low_row, high_row;
#endif
  };
  const auto source_at = [&](const Tile &tile, int i) {
    const int column = step_at(i) * STEP_BYTES + lane % 4 * 16;
    Source from;
    const int low = tile.row(row_of_warp) + of_group, high = tile.row(row_of_warp + WARP_ROWS / 2) + of_group;
    from.low = p.weight + low * (i64)p.row_bytes + column;
    from.high = p.weight + high * (i64)p.row_bytes + column;
    from.step = step_at(i);
#if BITS == 4
    from.low_row = low;
    from.high_row = high;
#endif
    return from;
  };
  const auto load_weights = [&](const Source &from, int u) {
    const int step = from.step + ahead_by(u);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int rows = group % ROW_TILES;  // groups of 8 rows before this one
      const char *at = (group < ROW_TILES ? from.low : from.high) + rows * rows_8;
      Weights &w = weights[u][group];
      if (!EVEN && step >= all_steps) {
        w = {};
        continue;
      }
      w.bytes = load_once(at + ahead_by(u) * STEP_BYTES);
#if BITS == 4
      const int row = (group < ROW_TILES ? from.low_row : from.high_row) + 8 * rows;
      const i64 of_scales = row * (i64)(p.depth / GROUP) + (step * STEP + of_step) / GROUP;
      w.scale = static_cast<const u16 *>(p.scale)[of_scales];
      w.zero = p.zero[of_scales];
#endif
    }
  };

  // 1. Load the first weights. Earlier kernels may still run.
  int index = blockIdx.x;
  Tile tile = tile_at(p, index);
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) load_weights(source_at(tile, 0), u);
#if CLUSTER > 1
  const int own_tokens = (p.tokens - rank + CLUSTER - 1) / CLUSTER;
  if (thread == 0) {
    init_barrier(arrived);
    fence_barrier_init();
    expect_bytes(arrived, own_tokens * CLUSTER * TILE_ROWS * (int)sizeof(float));
  }
  cluster_arrive();
#endif
#if END != ROPE_WRITE  // attention follows, and an early start of it makes long contexts slower
  let_next_kernel_start();
#endif
  wait_for_earlier_kernels();

  // 2. Load x, and compute 1 / rms of each token.
  int x_of[TOKEN_TILES];  // offsets of the lane's tokens; token 0 replaces tokens beyond the last
#pragma unroll
  for (int j = 0; j < TOKEN_TILES; ++j) {
    const int token = 8 * j + of_group < p.tokens ? 8 * j + of_group : 0;
    x_of[j] = (int)((p.x_rows ? p.x_rows[token] : token) * p.x_stride) + step_at(0) * STEP + of_step;
  }
  int4 x[X_AHEAD][TOKEN_TILES];
  const auto load_x = [&](int slot, int i, int load) {
    const int u = load / EIGHTS, eighth = load % EIGHTS;
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) {
      const u16 *at = p.x + (x_of[j] + (i * K_PARTS + ahead_by(u)) * STEP + 8 * eighth);
      if (EVEN || step_at(i) + ahead_by(u) < all_steps) x[slot][j] = *reinterpret_cast<const int4 *>(at);
      else x[slot][j] = make_int4(0, 0, 0, 0);
    }
  };
#pragma unroll
  for (int load = 0; load < X_AHEAD; ++load) load_x(load, 0, load);
  if (p.squares) {
    float means[TOKENS_PER_WARP] = {};
    for (int part = lane; part < p.parts; part += 4 * 32) {
#pragma unroll
      for (int n = 0; n < TOKENS_PER_WARP; ++n) {
        const int token = (n * WARPS + warp) * CLUSTER + rank;
        if (token >= p.tokens) break;
        const float *squares = p.squares + (p.x_rows ? p.x_rows[token] : token) * p.parts;
#pragma unroll
        for (int i = 0; i < 4; ++i) means[n] += part + 32 * i < p.parts ? squares[part + 32 * i] : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < TOKENS_PER_WARP; ++n) {
      for (int lanes = 16; lanes > 0; lanes /= 2) means[n] += __shfl_xor_sync(0xffffffffu, means[n], lanes);
      const int i = n * WARPS + warp;
      if (lane == 0 && i < BLOCK_TOKENS) scale[i] = rsqrtf(means[n] * p.inverse_width + p.eps);
    }
  } else if (thread < BLOCK_TOKENS) {
    scale[thread] = 1.0f;
  }

  float sums[ROW_TILES][TOKEN_TILES][4] = {};
  for (; index < p.tiles; index += gridDim.x) {
    const bool is_last = index + (int)gridDim.x >= p.tiles;
    const Tile next_tile = tile_at(p, is_last ? index : index + gridDim.x);
    Operands operands[PER_THREAD];
    const auto load_operands = [&] {
#pragma unroll
      for (int n = 0; n < PER_THREAD; ++n) {
        const int element = thread + n * THREADS;
        operands[n] = operands_at(p, tile, element / TILE_WIDTH * CLUSTER + rank, element % TILE_WIDTH);
      }
    };
    if (OPERANDS_EARLY) load_operands();
    // 3. Compute the sums of the warp. Reload registers as soon as they have been used.
    for (int i = 0; i < p.steps; i += UNROLL) {
      const bool ends = i + UNROLL >= p.steps, loads = !ends || !is_last;
      const int next_i = ends ? 0 : i + UNROLL;
      const Source next = ends ? source_at(next_tile, 0) : source_at(tile, next_i);
#pragma unroll
      for (int load = 0; load < X_LOADS; ++load) {
        const int u = load / EIGHTS, eighth = load % EIGHTS;
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          const Eight low = widened(weights[u][2 * r], eighth), high = widened(weights[u][2 * r + 1], eighth);
#pragma unroll
          for (int j = 0; j < TOKEN_TILES; ++j) {
            const int4 &tokens = x[load % X_AHEAD][j];
            multiply(sums[r][j], {low.pairs[0], high.pairs[0], low.pairs[1], high.pairs[1]},
                     {(u32)tokens.x, (u32)tokens.y});
            multiply(sums[r][j], {low.pairs[2], high.pairs[2], low.pairs[3], high.pairs[3]},
                     {(u32)tokens.z, (u32)tokens.w});
          }
        }
        if (loads && eighth == EIGHTS - 1) load_weights(next, u);
        if (load + X_AHEAD < X_LOADS) load_x(load % X_AHEAD, i, load + X_AHEAD);
        else if (loads) load_x(load % X_AHEAD, next_i, load + X_AHEAD - X_LOADS);
      }
    }
    // 4. Add the sums of all warps, and of all blocks of a cluster.
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = 8 * j + lane % 4 * 2 + i % 2, row = row_of_warp + 16 * r + 8 * (i / 2) + of_group;
          sums_of_warps[(k_warp * TILE_TOKENS + token) * PITCH + row] = sums[r][j][i];
          sums[r][j][i] = 0.0f;
        }
    if (!OPERANDS_EARLY) load_operands();
    __syncthreads();
    const auto sum_of_block = [&](int token, int row) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < K_WARPS; ++w) sum += sums_of_warps[(w * TILE_TOKENS + token) * PITCH + row];
      return sum;
    };
#if CLUSTER > 1
    cluster_wait();
    for (int pair = thread; pair < p.tokens * (TILE_ROWS / 2); pair += THREADS) {
      const int token = pair / (TILE_ROWS / 2), row = pair % (TILE_ROWS / 2) * 2;
      float *const at = sums_of_blocks + (rank * BLOCK_TOKENS + token / CLUSTER) * TILE_ROWS + row;
      store_remote(shared_address(at), shared_address(arrived), token % CLUSTER, sum_of_block(token, row),
                   sum_of_block(token, row + 1));
    }
    wait_for_bytes(arrived, 0);
    const auto sum_at = [&](int i, int row) {  // of the block's i-th token
      float sum = 0.0f;
#pragma unroll
      for (int block = 0; block < CLUSTER; ++block)
        sum += sums_of_blocks[(block * BLOCK_TOKENS + i) * TILE_ROWS + row];
      return sum * scale[i];
    };
#else
    const auto sum_at = [&](int token, int row) { return sum_of_block(token, row) * scale[token]; };
#endif

    // 5. Run the epilogue.
#pragma unroll
    for (int n = 0; n < PER_THREAD; ++n) {
      const int element = thread + n * THREADS, i = element / TILE_WIDTH, row = element % TILE_WIDTH;
      if (element >= TILE_WIDTH * BLOCK_TOKENS) break;
      const int token = i * CLUSTER + rank;
      const bool live = token < p.tokens;
      const Operands &o = operands[n];
      const float low = of_row(sum_at(i, row), o.scale_low) + o.bias_low;
#if END == PLAIN
      if (live) p.out[token * p.out_stride + tile.low + row] = rounded(low);
#elif END == SILU_MUL
      const float high = of_row(sum_at(i, TILE_WIDTH + row), o.scale_high) + o.bias_high;
      if (live) p.out[token * p.out_stride + tile.low + row] = rounded(low / (1.0f + __expf(-low)) * high);
#elif END == ROPE_WRITE
      float high = of_row(sum_at(i, TILE_WIDTH + row), o.scale_high) + o.bias_high, turned = low;
      if (tile.rotates) {
        turned = low * o.cos - high * o.sin;
        high = high * o.cos + low * o.sin;
      }
      if (live) store_heads(p, tile, token, row, o.slot, turned, high);
#else
      float square = 0.0f;
      if (live) {
        const u16 total = rounded(from_query((u16)o.residual_gain) + low);
        const float residual = from_query(total);
        p.residual[token * p.residual_stride + tile.low + row] = total;
        p.out[token * p.out_stride + tile.low + row] = rounded(residual * from_query(o.residual_gain >> 16));
        square = residual * residual;
      }
      for (int lanes = SQUARE_ROWS / 2; lanes > 0; lanes /= 2) square += __shfl_xor_sync(0xffffffffu, square, lanes);
      if (live && row % SQUARE_ROWS == 0)
        p.squares_out[((i64)token * p.width + tile.low + row) / SQUARE_ROWS] = square;
#endif
    }
    tile = next_tile;
    if (!is_last) __syncthreads();  // all threads have read the sums
  }
}
