// Prefill attention: query tiles of 128 queries over KV tiles, on the tensor cores of sm_90a.
//
// Blocks are persistent: each stays on its multiprocessor and fetches the next query tile of the schedule until none is
// left. Its warps are specialized:
//
//   warp 0         fetches query tiles and loads their keys into shared memory, as many tiles ahead as there are stages
//   warp 1         loads their values
//   warps 2 and 3  gather the queries of the next query tile, and write the output of query tiles that see no KV
//   warps 4 to 11  two warpgroups; each multiplies 64 queries by the tiles and writes their output
//
// A warpgroup starts to multiply the next tile's keys before it multiplies weights and values of the current tile,
// so the tensor cores are busy while it computes the next weights. The next tile may be the first one of another query
// tile: the pipeline drains only after the block's last query tile. The two warpgroups alternate on the tensor cores,
// so that one computes weights during the products of the other (ping-pong). The KV tiles of a query tile are processed
// from the last to the first, so that masked tiles come first.
//
// Barriers signal when a stage is full and when it is empty.
//
// Based on FlashAttention-3 (Shah et al. 2024).

#include "warpgroups.cuh"
#include "logits.cuh"

#define BLOCK_M 128                                // queries per query tile
#define PANELS ((HEAD_DIM + 63) / 64)              // a panel is 64 elements of each row: 128 bytes
#define KEY_STEPS ((HEAD_DIM + 15) / 16)           // steps of 16 elements along the head
#define VALUE_DIM ((HEAD_DIM + 31) / 32 * 32)      // columns of the output, in products of 128, 64 and 32
#define CHUNKS (HEAD_DIM / 8)                      // copies of 16 bytes
#define BOXES (BLOCK_N / BOX_ROWS)                 // TMA boxes per tile and panel; each box is within one page
#define QUERY_PANEL (BLOCK_M * 128)                // bytes
#define TILE_PANEL (BLOCK_N * 128)
#define QUERY_BYTES (PANELS * QUERY_PANEL)
#define TILE_BYTES (PANELS * TILE_PANEL)
#define NUM_THREADS 384
#define GATHER_THREADS 64
#define RESCALE_ABOVE 8.0f  // the reference maximum changes only if a logit exceeds it by more: weights are up to 2^8
#define SCALED (SOFTCAP || ALIBI)                  // logits are scaled before the maximum is taken
#define TURN_BARRIER 1                             // and 2: for alternating warpgroups
#define BOTH_BARRIER 3

// The same struct as _Params in prompt_native.py. Strides are in elements.
struct Params {
  TensorMap k_map, v_map;
  const u16 *q;
  u16 *out;
  float *lse;
  const int *block_table;
  int *schedule;
  const float *slopes, *sinks;
  i64 q_token, q_head, out_token, out_head, lse_token, table_row;
  int left, right, num_kv_heads, unused;
  float logit_factor, logit_cap;
};

static_assert(sizeof(Params) == PARAMS_BYTES, "the struct of prompt_native.py and this one differ");
static_assert(BOXES <= 32 && BOX_ROWS % 8 == 0, "a lane reads one page id; boxes are whole patterns of the swizzle");

// The stage and the phase of a ring buffer.
template <int COUNT> struct Ring {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == COUNT) stage = 0, phase ^= 1;
  }
};

// A query tile in the schedule, for one KV head; prompt_schedule.py documents it.
struct QTile {
  int req, first_query, first_token, query_len, seq_len, kv_start, kv_head;
  int num_queries;
  int first, last;  // positions of its first and last query
  int first_seen;   // the first position that a new token of the request sees
  int begin, end;   // KV tiles; begin is negative after the last query tile
};

// Shared memory of a block, except tiles and queries.
struct Shared {
  i64 q_full[QUERY_STAGES], q_empty[QUERY_STAGES], k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
  i64 item_full[2], item_empty[2];
  int items[2];                 // work items, from warp 0 to warps 1 to 3
  QTile q_tiles[QUERY_STAGES];  // from the warps that gather queries to the warps that attend
};
static_assert(sizeof(Shared) <= SHARED_VARIABLES, "prompt_native.py reserves less");

// Load a work item: a query tile for one KV head. Items of a query tile are consecutive. Return false after the last.
__device__ __forceinline__ bool load_q_tile(const Params &p, int item, int num_q_tiles, QTile &u) {
  if (item >= num_q_tiles * p.num_kv_heads) return false;
  u.kv_head = item % p.num_kv_heads;
  const int *words = p.schedule + 8 * (1 + item / p.num_kv_heads);
  u.req = words[0], u.first_query = words[1], u.first_token = words[2], u.query_len = words[3], u.seq_len = words[4];
  u.kv_start = words[5];
  u.num_queries = min(u.query_len * NUM_QUERIES_PER_KV - u.first_query, BLOCK_M);
  const int begin = u.seq_len - u.query_len;
  u.first = begin + TOKEN_OF(u.first_query);
  u.last = begin + TOKEN_OF(u.first_query + u.num_queries - 1);
  u.first_seen = max(begin - p.left, 0);
  const int from = max(u.first - p.left, 0), to = min(u.last + p.right + 1, u.seq_len);
  u.begin = from / BLOCK_N;
  u.end = to > from ? (to + BLOCK_N - 1) / BLOCK_N : u.begin;
  return true;
}

// Warps 0 and 1: keys and values

// The page of a box in a tile, or the position of the box in packed keys.
__device__ __forceinline__ int find_page(const Params &p, const QTile &u, int tile, int box) {
  const int position = tile * BLOCK_N + box * BOX_ROWS;
#if PAGED
  if (position >= u.seq_len || position + BOX_ROWS <= u.first_seen) return 0;  // the table may contain any id there
  return p.block_table[u.req * p.table_row + position / PAGE_SIZE];
#else
  return u.kv_start + position;
#endif
}

// Load the KV tiles of a query tile, keys or values, from the last to the first. Each lane reads a page id one tile
// ahead.
template <int COUNT> __device__ __forceinline__ void copy_tiles(
    const Params &p, const QTile &u, const TensorMap *map, u32 tiles, i64 *full, i64 *empty, Ring<COUNT> &ring, int lane) {
  const int box_of_lane = lane % BOXES;
  int page_of_lane = find_page(p, u, u.end - 1, box_of_lane);
  for (int tile = u.end - 1; tile >= u.begin; --tile) {
    int pages[BOXES];
#pragma unroll
    for (int box = 0; box < BOXES; ++box) pages[box] = __shfl_sync(0xffffffffu, page_of_lane, box);
    if (tile > u.begin) page_of_lane = find_page(p, u, tile - 1, box_of_lane);
    wait_for(empty + ring.stage, ring.phase ^ 1);
    // One thread issues all loads, so their addresses are uniform, as the instruction requires.
    if (elect()) {
      i64 *const barrier = full + ring.stage;
      const u32 to = tiles + ring.stage * TILE_BYTES;
      expect_bytes(barrier, TILE_BYTES);
#pragma unroll
      for (int box = 0; box < BOXES; ++box) {
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
          const u32 box_at = to + panel * TILE_PANEL + box * BOX_ROWS * 128;
#if PAGED
          const int slot = (tile * BLOCK_N + box * BOX_ROWS) % PAGE_SIZE;
          tma_load(box_at, map, barrier, panel * 64, slot, u.kv_head, pages[box]);
#else
          tma_load(box_at, map, barrier, panel * 64, pages[box], u.kv_head, 0);
#endif
        }
      }
    }
    __syncwarp();
    ring.advance();
  }
}

// The schedule's header counts the work items fetched after each block's first one, and the blocks that have
// finished. The last block to finish resets both counters for the next launch.
__device__ __forceinline__ int take_item(const Params &p) { return gridDim.x + atomicAdd(p.schedule + 1, 1); }
__device__ __forceinline__ void finish(const Params &p) {
  __threadfence();
  if (atomicAdd(p.schedule + 2, 1) == gridDim.x - 1) p.schedule[1] = 0, p.schedule[2] = 0;
}

__device__ __forceinline__ void publish_item(Shared &b, Ring<2> &ring, int item, int lane) {
  if (lane == 0) {
    wait_for(b.item_empty + ring.stage, ring.phase ^ 1);
    b.items[ring.stage] = item;
    arrive(b.item_full + ring.stage);
  }
  ring.advance();
}

__device__ __forceinline__ void copy_keys(const Params &p, int num_q_tiles, u32 tiles, Shared &b, int lane) {
  Ring<K_STAGES> ring;
  Ring<2> item_ring;
  QTile u;
  int item = blockIdx.x;
  publish_item(b, item_ring, item, lane);
  while (load_q_tile(p, item, num_q_tiles, u)) {
    item = __shfl_sync(0xffffffffu, lane == 0 ? take_item(p) : 0, 0);
    publish_item(b, item_ring, item, lane);  // its queries are gathered while the current tiles are copied
    copy_tiles(p, u, &p.k_map, tiles, b.k_full, b.k_empty, ring, lane);
  }
  if (lane == 0) finish(p);
}

// Load the work item that warp 0 fetched. Return false after the last one.
__device__ __forceinline__ bool next_q_tile(
    const Params &p, int num_q_tiles, Shared &b, Ring<2> &ring, int lane, QTile &u) {
  wait_for(b.item_full + ring.stage, ring.phase);
  const int item = b.items[ring.stage];
  __syncwarp();
  if (lane == 0) arrive(b.item_empty + ring.stage);
  ring.advance();
  return load_q_tile(p, item, num_q_tiles, u);
}

__device__ __forceinline__ void copy_values(const Params &p, int num_q_tiles, u32 tiles, Shared &b, int lane) {
  Ring<V_STAGES> ring;
  Ring<2> item_ring;
  QTile u;
  while (next_q_tile(p, num_q_tiles, b, item_ring, lane, u))
    copy_tiles(p, u, &p.v_map, tiles, b.v_full, b.v_empty, ring, lane);
}

// Warps 2 and 3: queries

// Write the output of queries that see no KV.
__device__ __forceinline__ void write_empty_q_tile(const Params &p, const QTile &u, int thread) {
  for (int i = thread; i < u.num_queries * CHUNKS; i += GATHER_THREADS) {
    const int query = u.first_query + i / CHUNKS, head = Q_HEAD_OF(u.kv_head, query);
    const i64 token = u.first_token + TOKEN_OF(query);
    *(int4 *)(p.out + token * p.out_token + head * p.out_head + i % CHUNKS * 8) = int4{0, 0, 0, 0};
    if (p.lse && i % CHUNKS == 0)
      p.lse[token * p.lse_token + head] = p.sinks && u.req >= 0 ? p.sinks[head] : NEG_INF;
  }
}

__device__ __forceinline__ void gather_queries(const Params &p, int num_q_tiles, u32 queries, Shared &b, int thread) {
  Ring<QUERY_STAGES> ring;
  Ring<2> item_ring;
  QTile u;
  // A thread copies the same 16 bytes of every ROWS-th query.
  constexpr int ROWS = GATHER_THREADS / (PANELS * 8);
  const int chunk = thread % (PANELS * 8), first = thread / (PANELS * 8);
  bool exists = true;
  while (exists) {
    exists = next_q_tile(p, num_q_tiles, b, item_ring, thread % 32, u);
    if (exists && u.begin == u.end) {
      write_empty_q_tile(p, u, thread);
      continue;
    }
    if (!exists) u.begin = -1;
    wait_for(b.q_empty + ring.stage, ring.phase ^ 1);
    if (thread == 0) b.q_tiles[ring.stage] = u;
    const u32 to = queries + ring.stage * QUERY_BYTES + chunk / 8 * QUERY_PANEL;
    // Unroll, because the addresses are long dependency chains.
#pragma unroll 4
    for (int m = first; m < (exists && first < ROWS ? BLOCK_M : 0); m += ROWS) {
      const int query = u.first_query + m;
      const bool is_query = m < u.num_queries && chunk < CHUNKS;
      const i64 token = u.first_token + TOKEN_OF(query), head = Q_HEAD_OF(u.kv_head, query);
      const u16 *from = is_query ? p.q + token * p.q_token + head * p.q_head + chunk * 8 : p.q;
      copy_query(to + m * 128 + (chunk ^ m) % 8 * 16, from, is_query ? 16 : 0);
    }
    wait_for_copies();
    fence_async_proxy();
    arrive(b.q_full + ring.stage);
    ring.advance();
  }
}

// Warps 4 to 11: attention

// A lane's share of the 64 queries of a warpgroup: two rows, with two adjacent columns of every 8.
struct Queries {
  int position[2];
  float slope[2];
  float top[2];    // reference maximum: weight = 2^(logit - top)
  float total[2];  // sum of the weights in the lane's columns
};

// Convert the products with a tile's keys to logits: scaled if SCALED, -inf if the query does not see the key.
__device__ __forceinline__ void finish_logits(
    float (&s)[BLOCK_N / 2], const Queries &q, const Params &p, const QTile &u, int tile, int lane) {
  const int start = tile * BLOCK_N + lane % 4 * 2;
#if SCALED
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) {
    s[i] *= p.logit_factor;
#if SOFTCAP
    s[i] = soft_cap(s[i], p.logit_cap);
#endif
#if ALIBI
    float distance = fabsf((float)(start + i / 4 * 8 + i % 2 - q.position[i / 2 % 2]));
    s[i] -= q.slope[i / 2 % 2] * (ALIBI == 2 ? sqrtf(distance) : distance);
#endif
  }
#endif
  const int from = tile * BLOCK_N, to = from + BLOCK_N;
  if (to <= min(u.first + p.right + 1, u.seq_len) && from >= u.last - p.left) return;
  int least[2], most[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    least[row] = q.position[row] - p.left - start;
    most[row] = min(q.position[row] + p.right, u.seq_len - 1) - start;
  }
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) {
    const int column = i / 4 * 8 + i % 2, row = i / 2 % 2;
    if (column < least[row] || column > most[row]) s[i] = NEG_INF;
  }
}

// Convert logits to weights. Earlier sums must be multiplied by `rescale`; return false if it is 1 in the whole warp.
__device__ __forceinline__ bool weigh(float (&s)[BLOCK_N / 2], Queries &q, float factor, float (&rescale)[2]) {
  float top[2] = {s[0], s[2]}, base[2];
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    top[row] = fmaxf(top[row], __shfl_xor_sync(0xffffffffu, top[row], 1));
    top[row] = fmaxf(top[row], __shfl_xor_sync(0xffffffffu, top[row], 2)) * factor;
    if (!(top[row] > q.top[row] + RESCALE_ABOVE)) top[row] = q.top[row];
    base[row] = -finite(top[row]);
    rescale[row] = power2(q.top[row] + base[row]);
    q.top[row] = top[row];
    q.total[row] *= rescale[row];
  }
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i) {
    s[i] = power2(fmaf(s[i], factor, base[i / 2 % 2]));
    q.total[i / 2 % 2] += s[i];
  }
  // Using the totals here makes the assembler compute the weights before the branch, not after a wait inside it.
  return __any_sync(0xffffffffu, !(rescale[0] * rescale[1] == 1.0f && q.total[0] + q.total[1] >= 0.0f));
}

// Pack weights as the left operand of products, 16 tokens at a time.
__device__ __forceinline__ void pack_weights(u32 (&weights)[BLOCK_N / 4], const float (&s)[BLOCK_N / 2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 4; ++i) weights[i] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void multiply_keys(float (&s)[BLOCK_N / 2], i64 queries, i64 keys) {
#pragma unroll
  for (int step = 0; step < KEY_STEPS; ++step)
    wgmma_ss(s, queries + step / 4 * (QUERY_PANEL >> 4) + step % 4 * 2,
             keys + step / 4 * (TILE_PANEL >> 4) + step % 4 * 2, step > 0);
}

__device__ __forceinline__ void multiply_values(
    float (&sums)[VALUE_DIM / 2], const u32 (&weights)[BLOCK_N / 4], i64 values, bool adds) {
#pragma unroll
  for (int step = 0; step < BLOCK_N / 16; ++step) {
    const u32 *a = weights + 4 * step;
    const i64 rows = values + step * (16 * 128 >> 4);
    const bool adds_now = adds || step > 0;
    constexpr int WHOLE = VALUE_DIM / 128 * 128, HALF = VALUE_DIM % 128 / 64 * 64;
    wgmma_rs<VALUE_DIM >= 128 ? 128 : VALUE_DIM >= 64 ? 64 : 32, 0>(sums, a, rows, adds_now);
    if constexpr (VALUE_DIM >= 256) wgmma_rs<128, 64>(sums, a, rows + 2 * (TILE_PANEL >> 4), adds_now);
    if constexpr (WHOLE > 0 && HALF > 0) wgmma_rs<64, WHOLE / 2>(sums, a, rows + WHOLE / 64 * (TILE_PANEL >> 4), adds_now);
    if constexpr (VALUE_DIM > 32 && VALUE_DIM % 64 > 0)
      wgmma_rs<32, (WHOLE + HALF) / 2>(sums, a, rows + (WHOLE + HALF) / 64 * (TILE_PANEL >> 4), adds_now);
  }
}

// Zero the values that no token of the request sees, after its end or before its window: they may be NaN, and a weight
// of 0 times NaN is NaN. Both warpgroups share the work.
__device__ __forceinline__ void clear_values(
    u32 values, i64 *full, int phase, const QTile &u, int tile, int thread) {
  const int from = u.first_seen - tile * BLOCK_N, to = u.seq_len - tile * BLOCK_N;
  if (from <= 0 && to >= BLOCK_N) return;
  wait_for(full, phase);
  for (int i = thread; i < BLOCK_N * PANELS * 8; i += 256) {
    const int token = i / 8 % BLOCK_N;
    if (token < from || token >= to) store_shared(values + i * 16, int4{0, 0, 0, 0});
  }
  fence_async_proxy();
  barrier_sync(BOTH_BARRIER, 256);
}

// Write the output of a warp's 16 queries, starting at `first`, through the shared memory of those queries.
__device__ __forceinline__ void write_output(
    const Params &p, const QTile &u, float (&sums)[VALUE_DIM / 2], const Queries &q, u32 queries, int first, int lane) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float total = q.total[row], top = q.top[row];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int m = first + lane / 4 + 8 * row, query = u.first_query + min(m, u.num_queries - 1);
    const int head = Q_HEAD_OF(u.kv_head, query);
    float scale = 1.0f;
    if (p.sinks) {  // an extra logit without a value: it changes only the sum of weights
      const float sink = p.sinks[head] * LOG2E, new_top = fmaxf(top, sink);
      scale = power2(top - finite(new_top));
      total = total * scale + power2(sink - finite(new_top));
      top = new_top;
    }
    const float divisor = total == 0.0f ? 1.0f : total;  // a token that sees no key has output 0
    if (p.lse && lane % 4 == 0 && m < u.num_queries)  // -inf if no key is seen, like top
      p.lse[(i64)(u.first_token + TOKEN_OF(query)) * p.lse_token + head] = (top + log2f(divisor)) * LN2;
    scale /= divisor;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; ++i) {
      const u32 pair = pack(sums[4 * i + 2 * row] * scale, sums[4 * i + 2 * row + 1] * scale);
      store_shared(queries + i / 8 * QUERY_PANEL + m * 128 + (i ^ m) % 8 * 16 + lane % 4 * 4, pair);
    }
  }
  __syncwarp();
  for (int i = lane; i < 16 * CHUNKS; i += 32) {
    const int m = first + i / CHUNKS, chunk = i % CHUNKS, query = u.first_query + m;
    if (m >= u.num_queries) break;
    const i64 token = u.first_token + TOKEN_OF(query), head = Q_HEAD_OF(u.kv_head, query);
    const int4 x = load_shared(queries + chunk / 8 * QUERY_PANEL + m * 128 + (chunk ^ m) % 8 * 16);
    *(int4 *)(p.out + token * p.out_token + head * p.out_head + chunk * 8) = x;
  }
}

__device__ __forceinline__ Queries begin_q_tile(const Params &p, const QTile &u, int warp, int lane) {
  Queries q;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int query = u.first_query + min(warp * 16 + lane / 4 + 8 * row, u.num_queries - 1);
    q.position[row] = u.seq_len - u.query_len + TOKEN_OF(query);
    q.slope[row] = ALIBI ? p.slopes[Q_HEAD_OF(u.kv_head, query)] * LOG2E : 0.0f;
    q.top[row] = NEG_INF;
    q.total[row] = 0.0f;
  }
  return q;
}

__device__ __forceinline__ void attend(const Params &p, u32 queries, u32 k_tiles, u32 v_tiles, Shared &b, int thread) {
  const int lane = thread % 32, warp = thread / 32, warpgroup = warp / 4;
  const float factor = SCALED ? 1.0f : fmaxf(p.logit_factor, 1e-37f);  // a factor of 0 times -inf is NaN
  Ring<QUERY_STAGES> q_ring;
  Ring<K_STAGES> k_ring;
  Ring<V_STAGES> v_ring;
  float s[BLOCK_N / 2], sums[VALUE_DIM / 2], rescale[2];
  u32 weights[BLOCK_N / 4];
  if (warpgroup == 1) barrier_arrive(TURN_BARRIER, 256);  // warpgroup 0 goes first
  wait_for(b.q_full, 0);
  QTile u = b.q_tiles[0];
  while (u.begin >= 0) {
    // The first weights of the pipeline.
    i64 left_side = make_descriptor(queries + q_ring.stage * QUERY_BYTES + warpgroup * 64 * 128, 16);
    Queries q = begin_q_tile(p, u, warp, lane);
    wait_for(b.k_full + k_ring.stage, k_ring.phase);
    fence_registers(s);
    wgmma_fence();
    multiply_keys(s, left_side, make_descriptor(k_tiles + k_ring.stage * TILE_BYTES, 16));
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(s);
    if (lane == 0) arrive(b.k_empty + k_ring.stage);
    k_ring.advance();
    int tile = u.end - 1, stage = q_ring.stage;
    finish_logits(s, q, p, u, tile, lane);
    weigh(s, q, factor, rescale);
    pack_weights(weights, s);

#pragma unroll 1
    while (true) {
      // The values of this tile, and the keys of the next one, which may belong to another query tile.
      const u32 values = v_tiles + v_ring.stage * TILE_BYTES;
      const bool begins = tile == u.end - 1, ends = tile == u.begin;
      clear_values(values, b.v_full + v_ring.stage, v_ring.phase, u, tile, thread);
      --tile;
      if (ends) {
        q_ring.advance();
        if (QUERY_STAGES == 1) break;  // write_output overwrites the queries
        wait_for(b.q_full + q_ring.stage, q_ring.phase);
        u = b.q_tiles[q_ring.stage];
        if (u.begin < 0) break;
        left_side = make_descriptor(queries + q_ring.stage * QUERY_BYTES + warpgroup * 64 * 128, 16);
        tile = u.end - 1;
      }
      wait_for(b.k_full + k_ring.stage, k_ring.phase);
      barrier_sync(TURN_BARRIER + warpgroup, 256);
      fence_registers(s), fence_registers(sums);
      wgmma_fence();
      multiply_keys(s, left_side, make_descriptor(k_tiles + k_ring.stage * TILE_BYTES, 16));
      wgmma_commit();
      wait_for(b.v_full + v_ring.stage, v_ring.phase);
      multiply_values(sums, weights, make_descriptor(values, TILE_PANEL), !begins);
      wgmma_commit();
      barrier_arrive(TURN_BARRIER + 1 - warpgroup, 256);

      // The weights of the next tile.
      wgmma_wait<1>();
      fence_registers(s);
      if (lane == 0) arrive(b.k_empty + k_ring.stage);
      k_ring.advance();
      const Queries ended = q;
      if (ends) q = begin_q_tile(p, u, warp, lane);
      finish_logits(s, q, p, u, tile, lane);
      const bool grows = weigh(s, q, factor, rescale);

      // The sums of this tile.
      if (grows) {
        wgmma_wait<0>();
        fence_registers(sums);
        if (!ends) {
#pragma unroll
          for (int i = 0; i < VALUE_DIM / 2; ++i) sums[i] *= rescale[i / 2 % 2];
        }
      } else {
        wgmma_wait<0>();
        fence_registers(sums);
      }
      if (lane == 0) arrive(b.v_empty + v_ring.stage);
      v_ring.advance();
      if (ends) {
        write_output(p, b.q_tiles[stage], sums, ended, queries + stage * QUERY_BYTES, warp * 16, lane);
        __syncwarp();
        if (lane == 0) arrive(b.q_empty + stage);
        stage = q_ring.stage;
      }
      pack_weights(weights, s);
    }

    // The last values of the pipeline.
    const QTile &last = b.q_tiles[stage];
    wait_for(b.v_full + v_ring.stage, v_ring.phase);
    fence_registers(sums);
    wgmma_fence();
    multiply_values(sums, weights, make_descriptor(v_tiles + v_ring.stage * TILE_BYTES, TILE_PANEL), last.end - last.begin > 1);
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(sums);
    if (lane == 0) arrive(b.v_empty + v_ring.stage);
    v_ring.advance();
    write_output(p, last, sums, q, queries + stage * QUERY_BYTES, warp * 16, lane);
    __syncwarp();
    if (lane == 0) arrive(b.q_empty + stage);
    if (QUERY_STAGES == 1) {
      wait_for(b.q_full, q_ring.phase);
      u = b.q_tiles[0];
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) prompt_attention(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const u32 queries = shared_address(memory), k_tiles = queries + QUERY_STAGES * QUERY_BYTES;
  const u32 v_tiles = k_tiles + K_STAGES * TILE_BYTES;
  Shared &b = *(Shared *)(memory + QUERY_STAGES * QUERY_BYTES + (K_STAGES + V_STAGES) * TILE_BYTES);
  if (threadIdx.x == 0) {
    for (int i = 0; i < QUERY_STAGES; ++i) init_barrier(b.q_full + i, GATHER_THREADS), init_barrier(b.q_empty + i, 8);
    for (int i = 0; i < K_STAGES; ++i) init_barrier(b.k_full + i, 1), init_barrier(b.k_empty + i, 8);
    for (int i = 0; i < V_STAGES; ++i) init_barrier(b.v_full + i, 1), init_barrier(b.v_empty + i, 8);
    for (int i = 0; i < 2; ++i) init_barrier(b.item_full + i, 1), init_barrier(b.item_empty + i, 3);
    fence_tma_barrier_init();
  }
  __syncthreads();
  const int num_q_tiles = p.schedule[0], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    dealloc_registers<56>();
    if (warp == 0) copy_keys(p, num_q_tiles, k_tiles, b, lane);
    else if (warp == 1) copy_values(p, num_q_tiles, v_tiles, b, lane);
    else gather_queries(p, num_q_tiles, queries, b, threadIdx.x - 64);
  } else {
    alloc_registers<224>();
    attend(p, queries, k_tiles, v_tiles, b, threadIdx.x - 128);
  }
}
