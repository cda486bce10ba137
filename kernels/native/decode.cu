// Decode attention for small query tiles.
//
// The grid has a column of blocks per KV head. Adjacent blocks read the same pages for different KV heads.
//
// Each warp has a stream of KV tiles: all tiles of its KV splits, one after another. A warp does the following:
//
// 1. It reads its work partition from the work list and starts copying tiles into its own stages of shared memory.
// 2. For each split, it loads the queries. For each tile of the split, it starts copying the tile that is STAGES - 1
//    ahead in the stream, waits for the oldest copy, and multiplies. There is no barrier between warps.
// 3. If a split covers its whole query tile, the warp writes the output from registers.
// 4. Otherwise the warp stores a partial result in shared memory. A warp has at most two such splits: its first and its
//    last.
// 5. When all warps of the block have finished, they merge their partial results. If a query tile ends in this block,
//    they write its output. If it continues in the next block, they send its partial result through global memory. The
//    receiver is the block where the query tile ends, or the last block of its merge group. The receiver waits for it.
// 6. The warp writes zeros to its share of the query tiles that see no KV.
//
// With clusters or fixed splits (COOPERATIVE), all warps of a cluster share a partition. In step 2, each warp takes
// every WORKERS-th tile of a split. Steps 3 to 5 change. After each split, the warps of a block merge through shared
// memory. The blocks of a cluster then merge through distributed shared memory, each for its slice of the output.
// Partial results of several clusters are merged through global memory, with self-resetting counters as in attend.py.
//
// Compile-time macros: HEAD_DIM V_HEAD_DIM NUM_QUERIES_PER_KV QUERY_LEN PAGE_SIZE BLOCK_N WARPS STAGES CLUSTER
// BLOCKS_PER_SM CAUSAL WINDOW (1: a sliding window, 2: chunks) SOFTCAP ALIBI (1: distance, 2: its square root) Q_BF16
// KV_FP8 (0, 1: e4m3, 2: e5m2) FIXED_SPLITS MERGE_GROUP_SIZE PARTIAL_M PARAMS_BYTES

#include "merge.cuh"

#define K_COPIES (16 * K_PIECES / 32)            // 16-byte copies per lane for 16 tokens of K; K_PIECES is even
#define V_COPIES (16 * V_PIECES / 32)            // the same for V
#define QUERY_CACHE_LINES ((HEAD_DIM + 63) / 64)  // lines of 128 bytes per query
#define WORKERS (COOPERATIVE ? CLUSTER * WARPS : 1)  // warps that share a partition
#define PAGES_PER_LOAD (32 / SUBTILES)     // tiles per load of page ids, one id per lane

__device__ __forceinline__ KVSplit load_split(const int *words) {
  int4 a = *reinterpret_cast<const int4 *>(words), b = *reinterpret_cast<const int4 *>(words + 4);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w & 0xffff, b.w >> 16};
}

// The position of a warp's copies. The next split and the page ids of its first tiles are prefetched, because each of
// these loads depends on another.
//
// s, next       the split being copied, and the next one
// split, end    the index of `s` in the splits area, and the end of the partition
// tile          next tile to copy, in units of TILE tokens
// index         tiles copied since page ids were loaded; lane i * SUBTILES has the page of tile i
struct Stream {
  KVSplit s, next;
  int split, end, tile, tile_end, index, pages, next_pages;
  bool next_pages_known;
};

// The tiles of a split for a worker. The work list counts tiles of BLOCK_N tokens; a warp counts tiles of TILE tokens.
__device__ __forceinline__ int first_tile(const KVSplit &s, int worker) {
  return s.tile_begin * (BLOCK_N / TILE) + worker;
}
__device__ __forceinline__ int last_tile(const KVSplit &s) {
  return min(s.tile_end * (BLOCK_N / TILE), (s.seq_len + TILE - 1) / TILE);
}

// Load one page id per lane, for the next PAGES_PER_LOAD tiles of this worker.
__device__ __forceinline__ int load_pages(const KVSplit &s, const Params &p, int tile, int lane) {
  int start = (tile + lane / SUBTILES * WORKERS) * TILE + lane % SUBTILES * 16;
  return start < s.seq_len ? p.block_table[s.req * p.table_row + start / PAGE_SIZE] : 0;
}

// Start copying a split: load the next split, and prefetch the queries into L1.
__device__ __forceinline__ void begin_split(Stream &t, const Params &p, int kv_head, int worker, int lane) {
  t.tile = first_tile(t.s, worker);
  t.tile_end = last_tile(t.s);
  t.index = 0;
  t.next_pages_known = false;
  if (t.split + 1 < t.end) t.next = load_split(p.work_list + p.splits_at + (t.split + 1) * 8);
  for (int line = lane; line < NUM_QUERIES * QUERY_CACHE_LINES; line += 32) {
    int query = line / QUERY_CACHE_LINES;
    const u16 *q = static_cast<const u16 *>(p.q) + (t.s.first_token + TOKEN_OF(query)) * p.q_token +
                   Q_HEAD_OF(kv_head, query) * p.q_head + line % QUERY_CACHE_LINES * 64;
    prefetch(q);
  }
}

// Open the stream of splits `begin` to `end`; `s` is the first. Without splits, the stream has no tiles.
__device__ __forceinline__ Stream open_stream(const KVSplit &s, int begin, int end, const Params &p, int kv_head,
                                              int worker, int lane) {
  Stream t = {};
  t.s = t.next = s;
  t.split = begin;
  t.end = end;
  if (begin < end) {
    t.pages = load_pages(s, p, first_tile(s, worker), lane);
    begin_split(t, p, kv_head, worker, lane);
  }
  return t;
}

// Start copying the stream's next tile to the stage `to`. After the end of the stream nothing is copied, but a group is
// still committed so that wait_oldest() counts correctly.
__device__ __forceinline__ void copy_tile(Stream &t, const Params &p, const char *k, const char *v, u32 to, int kv_head,
                                          int worker, int lane) {
  while (t.tile >= t.tile_end && t.split < t.end) {
    if (++t.split < t.end) {
      t.s = t.next;
      t.pages = t.next_pages_known ? t.next_pages : load_pages(t.s, p, first_tile(t.s, worker), lane);
      begin_split(t, p, kv_head, worker, lane);
    }
  }
  if (t.split < t.end) {
    if (t.index == PAGES_PER_LOAD) {
      t.index = 0;
      t.pages = load_pages(t.s, p, t.tile, lane);
    }
    int from = first_visible(t.s, p);
#pragma unroll
    for (int sub = 0; sub < SUBTILES; ++sub) {
      int start = t.tile * TILE + 16 * sub;
      i64 page = __shfl_sync(0xffffffffu, t.pages, t.index * SUBTILES + sub);
      int slot = start % PAGE_SIZE;
      const char *k_page = k + (page * p.k_page + slot * p.k_slot) * ELEMENT;
      const char *v_page = v + (page * p.v_page + slot * p.v_slot) * ELEMENT;
#pragma unroll
      for (int i = 0; i < (K_COPIES > V_COPIES ? K_COPIES : V_COPIES); ++i) {
        // Positions that no query sees become zeros: a page's tail may contain NaN, and a weight of 0 x NaN is NaN.
        if (i < K_COPIES) {
          int piece = i * 32 + lane, token = piece / K_PIECES, column = piece % K_PIECES * 16;
          int bytes = start + token < t.s.seq_len && start + token >= from ? 16 : 0;
          u32 at = to + (16 * sub + token) * K_BYTES + (column ^ (SWIZZLE(token, K_PIECES) * 16));
          copy_async(at, k_page + token * p.k_slot * ELEMENT + column, bytes);
        }
        if (i < V_COPIES) {
          int piece = i * 32 + lane, token = piece / V_PIECES, column = piece % V_PIECES * 16;
          int bytes = start + token < t.s.seq_len && start + token >= from ? 16 : 0;
          u32 at = to + (16 * sub + token) * V_BYTES + (column ^ (SWIZZLE(token, V_PIECES) * 16));
          copy_async(at + TILE * K_BYTES, v_page + token * p.v_slot * ELEMENT + column, bytes);
        }
      }
    }
    if (!t.next_pages_known && t.split + 1 < t.end && t.index > 0) {
      t.next_pages = load_pages(t.next, p, first_tile(t.next, worker), lane);
      t.next_pages_known = true;
    }
    ++t.index;
    t.tile += WORKERS;
  }
  commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
decode_attention(const __grid_constant__ Params p) {
  // Shared memory: the stages of all warps, their partial results, the exchange buffers of a cluster.
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = blockIdx.x, block = blockIdx.y;
  const int rank = block % CLUSTER;
  const int partition = COOPERATIVE ? block / CLUSTER : block * WARPS + warp;
  const int worker = COOPERATIVE ? rank * WARPS + warp : 0;
  char *const stages = memory + warp * (STAGES * STAGE_BYTES);
  const u32 stages_at = shared_address(stages);
  float *const results = reinterpret_cast<float *>(memory + WARPS * STAGES * STAGE_BYTES);
#if CLUSTER > 1
  ClusterExchange cluster_exchange;
  cluster_exchange.open(results + WARPS * PARTIAL_FLOATS);
  __syncwarp();
  cluster_arrive();  // other blocks' exchange buffers are ready once all blocks have arrived
  bool cluster_ready = false;
#endif
  let_next_kernel_start();
  wait_for_earlier_kernels();

  // 1. The work partition.
  const int *partition_words = p.work_list + partition * 16;
  const int begin = partition_words[0], end = partition_words[16 + 2];
  const int zeros_begin = partition_words[1], zeros_end = partition_words[16 + 1];
#if FIXED_SPLITS
  KVSplit s = {};
  if (begin < end) s = load_split(p.work_list + p.splits_at + begin * 8);
#else
  KVSplit s = load_split(partition_words + 8);  // loaded with the other words; unused if there is no split
#endif
#if !COOPERATIVE
  __shared__ SharedQTile shared[1 + WARPS];
  if (threadIdx.x == 0) shared[0] = begin + 1 < end ? shared_q_tile_of(s, 1) : SharedQTile{};
#endif
  Stream stream = open_stream(s, begin, end, p, kv_head, worker, lane);
  const char *k = static_cast<const char *>(p.k) + kv_head * p.k_head * ELEMENT;
  const char *v = static_cast<const char *>(p.v) + kv_head * p.v_head * ELEMENT;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy_tile(stream, p, k, v, stages_at + i * STAGE_BYTES, kv_head, worker, lane);
  int stage = 0, free_stage = STAGES - 1;
  float factor = p.logit_factor;
  if (p.k_scale) factor *= p.k_scale[kv_head * p.k_scale_head];

  for (int split = begin; split < end; ++split) {
    // 2. The KV split.
    if (split > begin) s = load_split(p.work_list + p.splits_at + split * 8);
    Queries queries;
    load_queries(queries, s, p, kv_head, factor, lane);
    State state;
#pragma unroll
    for (int n = 0; n < OCTETS; ++n) {
      state.top[n][0] = state.top[n][1] = NEG_INF;
      state.sum[n][0] = state.sum[n][1] = 0.0f;
#pragma unroll
      for (int m = 0; m < V_STEPS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[m][n][i] = 0.0f;
    }
    const int tile_end = last_tile(s);
    for (int tile = first_tile(s, worker); tile < tile_end; tile += WORKERS) {
      __syncwarp();  // all lanes have read the stage to fill next
      copy_tile(stream, p, k, v, stages_at + free_stage * STAGE_BYTES, kv_head, worker, lane);
      wait_oldest();
      __syncwarp();
      attend_tile(state, queries, s, p, stages_at + stage * STAGE_BYTES, tile * TILE, lane);
      free_stage = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    reduce_sums(state);
#if COOPERATIVE
    // Steps 3 to 5, cooperative: all warps synchronize after each split.
    store_partial(state, results + warp * PARTIAL_FLOATS, lane);
    __syncthreads();

    const bool is_split = s.num_splits > 1;
#if FIXED_SPLITS
    const int q_tiles_per_req = (s.query_len * NUM_QUERIES_PER_KV + BLOCK_M - 1) / BLOCK_M;
    const int first_partial = (s.req * q_tiles_per_req + s.first_query / BLOCK_M) * FIXED_SPLITS;
    const PartialIndices partials = {first_partial, first_partial, 1};
#else
    const PartialIndices partials = partial_indices_of(partition - s.split_index);
#endif
    const int first_pair = rank * SLICE, end_pair = min(first_pair + SLICE, Q_TILE_PAIRS);
    // Store a pair of output elements, or of the partial result if several clusters share the query tile.
    const auto store_result = [&](Pair r, int pair) {
      if (is_split)
        store_pair(r, pair, first_pair, 0, partials.of(s.split_index), p, kv_head);
      else
        write_pair(r, pair, s.first_token, p, kv_head);
    };
#if CLUSTER > 1
    if (!cluster_ready) cluster_wait();
    cluster_ready = true;
    cluster_exchange.expect(max(end_pair - first_pair, 0));
    for (int pair = threadIdx.x; pair < Q_TILE_PAIRS; pair += THREADS)
      cluster_exchange.send(merge_warps(pair, results), pair, rank);
    cluster_exchange.wait();
    for (int pair = first_pair + threadIdx.x; pair < end_pair; pair += THREADS)
      store_result(cluster_exchange.merge(pair), pair);
    ++cluster_exchange.round;
#else
    for (int pair = threadIdx.x; pair < Q_TILE_PAIRS; pair += THREADS) store_result(merge_warps(pair, results), pair);
#endif
    if (is_split)
      arrive_and_merge(s.num_splits, s.split_index, partials, s.first_token, first_pair, end_pair, rank, p, kv_head);
    if (split + 1 < end) __syncthreads();  // all partial results have been read
#else
    // 3 and 4. The output, or a partial result. The last partial result overwrites the tiles, which are no longer used.
    if (s.num_splits == 1) {
      write_q_tile(state, s.first_token, p, kv_head, lane);
    } else if (split + 1 < end) {
      store_partial(state, results + warp * PARTIAL_FLOATS, lane);
    } else {
      __syncwarp();  // all lanes have read the last tile
      store_partial(state, reinterpret_cast<float *>(stages), lane);
    }
#endif
  }
#if !COOPERATIVE
  // 5. The query tiles that the warps of this block share.
  if (lane == 0) shared[1 + warp] = begin < end ? shared_q_tile_of(s, end - begin) : SharedQTile{};
  __syncthreads();
  merge_streams(shared, [&](int warp) { return results + warp * PARTIAL_FLOATS; },
                [&](int warp) { return reinterpret_cast<float *>(memory + warp * (STAGES * STAGE_BYTES)); }, block, p,
                kv_head);
#endif
#if CLUSTER > 1
  if (!cluster_ready) cluster_wait();
#endif

  // 6. The partition's warp, or the first block of its cluster, writes query tiles that see no KV.
  const int thread = COOPERATIVE ? threadIdx.x : lane, num_threads = COOPERATIVE ? THREADS : 32;
  if (rank == 0)
    for (int entry = zeros_begin; entry < zeros_end; ++entry) {
      const int *words = p.work_list + p.zeros_at + entry * 3;
      int first_token = words[0], first_query = words[1], num_queries = abs(words[2]);
#pragma unroll 1
      for (int pair = thread; pair < num_queries * (V_HEAD_DIM / 2); pair += num_threads) {
        int query = first_query + query_of(pair), d = element_of(pair), head = Q_HEAD_OF(kv_head, query);
        i64 token = first_token + TOKEN_OF(query);
        *output_at(token, head, d, p) = 0;
        if (p.lse && d == 0)
          p.lse[token * p.lse_token + head] = p.sinks && words[2] > 0 ? p.sinks[head] : NEG_INF;
      }
    }
}
