// Decode attention for rows of few query rows.
//
// Each warp is a stream of its own: it copies tiles of K and V STAGES - 1 ahead into its own place in shared memory,
// across segments, and multiplies with mma.sync. No barrier stands in that loop. A part of the work list, which is
// work_list.py's, is one warp's: what is whole in it the warp writes, what it shares it leaves in shared memory until all
// warps of the block are through, and then these merge. What they have of a unit that goes on in the next block they send,
// through global memory, to the block where it ends, or the last one of a group of blocks, which waits for it.
//
// Under clusters and fixed splits (COOPERATIVE) a part is that of all warps of a cluster, each of which takes every
// WORKERS-th tile of a segment. They merge at the end of each segment, the blocks of a cluster through distributed shared
// memory, each for its slice of the output; what several clusters share, with self-resetting counters as in attend.py.
//
// The grid has a column of blocks per KV head: neighbours read the same pages.
//
// Products are transposed: S^T = K Q^T has tokens as the 16 rows of an mma and query rows as its 8 columns, so that a
// group of up to 8 is not padded to 16. The accumulators hold O^T = V^T P^T.
//
// Compile-time macros: HEAD_DIM GROUP QUERY_LEN PAGE_SIZE BLOCK_N WARPS STAGES CLUSTER BLOCKS_PER_SM CAUSAL WINDOW
// SOFTCAP ALIBI (1: distance, 2: its root) Q_BF16 KV_FP8 (0, 1: e4m3, 2: e5m2) FIXED_SPLITS MERGE_GROUP
// PARTIAL_M PARAMS_BYTES

#include "merge.cuh"

#define COPIES (16 * CHUNKS / 32)           // 16-byte copies per lane, of 16 tokens of K or V; CHUNKS is even
#define QUERY_LINES ((HEAD_DIM + 63) / 64)  // of 128 bytes, of a query row
#define WORKERS (COOPERATIVE ? CLUSTER * WARPS : 1)  // warps that share a part
#define PAGES_PER_LOAD (32 / SUBTILES)     // tiles whose page ids the lanes hold

__device__ __forceinline__ Segment load_segment(const int *words) {
  int4 a = *reinterpret_cast<const int4 *>(words), b = *reinterpret_cast<const int4 *>(words + 4);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w & 0xffff, b.w >> 16};
}

// The tiles of a warp's stream, from which copies into shared memory are made. The next segment and the ids of its first
// pages are read ahead: they are two dependent loads.
struct Stream {
  Segment s, next;
  int segment, end, tile, tile_end, index, pages, next_pages;
  bool next_pages_known;
};

__device__ __forceinline__ int first_tile(const Segment &s, int worker) {
  return s.tile_begin * (BLOCK_N / TILE) + worker;
}
__device__ __forceinline__ int last_tile(const Segment &s) {
  return min(s.tile_end * (BLOCK_N / TILE), (s.seq_len + TILE - 1) / TILE);
}

__device__ __forceinline__ int load_pages(const Segment &s, const Params &p, int tile, int lane) {
  int start = (tile + lane / SUBTILES * WORKERS) * TILE + lane % SUBTILES * 16;
  return start < s.seq_len ? p.block_table[s.row * p.table_row + start / PAGE_SIZE] : 0;
}

__device__ __forceinline__ void enter(Stream &t, const Params &p, int kv_head, int worker, int lane) {
  t.tile = first_tile(t.s, worker);
  t.tile_end = last_tile(t.s);
  t.index = 0;
  t.next_pages_known = false;
  if (t.segment + 1 < t.end) t.next = load_segment(p.work_list + p.segments_at + (t.segment + 1) * 8);
  for (int line = lane; line < PACKED * QUERY_LINES; line += 32) {  // the queries into L1
    int packed = line / QUERY_LINES;
    const u16 *q = static_cast<const u16 *>(p.q) + (t.s.query_start + packed / GROUP) * p.q_token +
                   (kv_head * GROUP + packed % GROUP) * p.q_head + line % QUERY_LINES * 64;
    prefetch(q);
  }
}

// The stream of segments `begin` to `end`, `s` being the first; without segments it has no tiles.
__device__ __forceinline__ Stream open_stream(const Segment &s, int begin, int end, const Params &p, int kv_head,
                                              int worker, int lane) {
  Stream t = {};
  t.s = t.next = s;
  t.segment = begin;
  t.end = end;
  if (begin < end) {
    t.pages = load_pages(s, p, first_tile(s, worker), lane);
    enter(t, p, kv_head, worker, lane);
  }
  return t;
}

__device__ __forceinline__ void copy_tile(Stream &t, const Params &p, const char *k, const char *v, u32 to, int kv_head,
                                          int worker, int lane) {
  while (t.tile >= t.tile_end && t.segment < t.end) {
    if (++t.segment < t.end) {
      t.s = t.next;
      t.pages = t.next_pages_known ? t.next_pages : load_pages(t.s, p, first_tile(t.s, worker), lane);
      enter(t, p, kv_head, worker, lane);
    }
  }
  if (t.segment < t.end) {
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
      for (int i = 0; i < COPIES; ++i) {
        int chunk = i * 32 + lane, token = chunk / CHUNKS, column = chunk % CHUNKS * 16;
        // Positions outside become zeros: unfilled tails of pages may hold anything, NaN included.
        int bytes = start + token < t.s.seq_len && start + token >= from ? 16 : 0;
        u32 at = to + (16 * sub + token) * ROW_BYTES + (column ^ (SWIZZLE(token) * 16));
        copy_async(at, k_page + token * p.k_slot * ELEMENT + column, bytes);
        copy_async(at + TILE_BYTES, v_page + token * p.v_slot * ELEMENT + column, bytes);
      }
    }
    if (!t.next_pages_known && t.segment + 1 < t.end && t.index > 0) {
      t.next_pages = load_pages(t.next, p, first_tile(t.next, worker), lane);
      t.next_pages_known = true;
    }
    ++t.index;
    t.tile += WORKERS;
  }
  commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_attention(const __grid_constant__ Params p) {
  // Stages of all warps; their partial results; the inbox.
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = blockIdx.x, block = blockIdx.y;
  const int rank = block % CLUSTER;
  const int part = COOPERATIVE ? block / CLUSTER : block * WARPS + warp, worker = COOPERATIVE ? rank * WARPS + warp : 0;
  char *const stages = memory + warp * (STAGES * STAGE_BYTES);
  const u32 stages_at = shared_address(stages);
  float *const results = reinterpret_cast<float *>(memory + WARPS * STAGES * STAGE_BYTES);
#if CLUSTER > 1
  Inbox inbox;
  inbox.open(results + WARPS * PARTIAL_FLOATS);
  __syncwarp();
  cluster_arrive();  // the others' inboxes are open once all have arrived
  bool met = false;
#endif
  wait_for_earlier_kernels();

  const int *part_words = p.work_list + part * 16;
  const int begin = part_words[0], end = part_words[16 + 2];
  const int zeros_begin = part_words[1], zeros_end = part_words[16 + 1];
#if FIXED_SPLITS
  Segment s = {};
  if (begin < end) s = load_segment(p.work_list + p.segments_at + begin * 8);
#else
  Segment s = load_segment(part_words + 8);  // beside the others and not after them, even where there is none
#endif
#if !COOPERATIVE
  __shared__ Share shares[1 + WARPS];
  if (threadIdx.x == 0) shares[0] = begin + 1 < end ? share_of(s, 1) : Share{};
#endif
  Stream stream = open_stream(s, begin, end, p, kv_head, worker, lane);
  const char *k = static_cast<const char *>(p.k) + kv_head * p.k_head * ELEMENT;
  const char *v = static_cast<const char *>(p.v) + kv_head * p.v_head * ELEMENT;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy_tile(stream, p, k, v, stages_at + i * STAGE_BYTES, kv_head, worker, lane);
  int stage = 0, free_stage = STAGES - 1;
  float factor = p.logit_factor;
  if (p.k_scale) factor *= p.k_scale[kv_head * p.k_scale_head];

  for (int segment = begin; segment < end; ++segment) {
    if (segment > begin) s = load_segment(p.work_list + p.segments_at + segment * 8);
    Queries queries;
    load_queries(queries, s, p, kv_head, factor, lane);
    State state;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      state.top[n][0] = state.top[n][1] = NEG_INF;
      state.sum[n][0] = state.sum[n][1] = 0.0f;
#pragma unroll
      for (int m = 0; m < KS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[m][n][i] = 0.0f;
    }
    const int tile_end = last_tile(s);
    for (int tile = first_tile(s, worker); tile < tile_end; tile += WORKERS) {
      __syncwarp();  // all lanes have read the stage that is filled next
      copy_tile(stream, p, k, v, stages_at + free_stage * STAGE_BYTES, kv_head, worker, lane);
      wait_oldest();
      __syncwarp();
      attend_tile(state, queries, s, p, stages_at + stage * STAGE_BYTES, tile * TILE, lane);
      free_stage = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    add_up(state);
#if COOPERATIVE
    leave_partial(state, results + warp * PARTIAL_FLOATS, lane);
    __syncthreads();

    const bool is_split = s.num_splits > 1;
#if FIXED_SPLITS
    const int first_slot = (s.row * ((s.query_len * GROUP + 15) / 16) + s.first_row / 16) * FIXED_SPLITS;
    const Slots slots = {first_slot, first_slot, 1};
#else
    const Slots slots = slots_of(part - s.split);
#endif
    const int first_unit = rank * SLICE, last_unit = min(first_unit + SLICE, UNITS);
    const auto deliver = [&](Pair r, int unit) {
      if (is_split)
        store_pair(r, unit, first_unit, 0, slots.of(s.split), p, kv_head);
      else
        write_pair(r, unit, s.query_start, p, kv_head);
    };
#if CLUSTER > 1
    if (!met) cluster_wait();
    met = true;
    inbox.expect(max(last_unit - first_unit, 0));
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) inbox.send(merge_warps(unit, results), unit, rank);
    inbox.wait();
    for (int unit = first_unit + threadIdx.x; unit < last_unit; unit += THREADS) deliver(inbox.merge(unit), unit);
    ++inbox.segment;
#else
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) deliver(merge_warps(unit, results), unit);
#endif
    if (is_split)
      arrive_and_merge(s.num_splits, s.split, slots, s.query_start, first_unit, last_unit, rank, p, kv_head);
    if (segment + 1 < end) __syncthreads();  // the partial results have been read
#else
    if (s.num_splits == 1) {
      write_rows(state, s.query_start, p, kv_head, lane);
    } else if (segment + 1 < end) {
      leave_partial(state, results + warp * PARTIAL_FLOATS, lane);
    } else {
      __syncwarp();  // the last tile has been read: nothing is copied to the stages any more
      leave_partial(state, reinterpret_cast<float *>(stages), lane);
    }
#endif
  }
#if !COOPERATIVE
  if (lane == 0) shares[1 + warp] = begin < end ? share_of(s, end - begin) : Share{};
  __syncthreads();
  merge_streams(shares, [&](int warp) { return results + warp * PARTIAL_FLOATS; },
                [&](int warp) { return reinterpret_cast<float *>(memory + warp * (STAGES * STAGE_BYTES)); }, block, p,
                kv_head);
#endif
#if CLUSTER > 1
  if (!met) cluster_wait();
#endif

  // Units that see nothing: those of a part, by the threads of its first block or by its warp.
  const int thread = COOPERATIVE ? threadIdx.x : lane, num_threads = COOPERATIVE ? THREADS : 32;
  if (rank == 0)
    for (int entry = zeros_begin; entry < zeros_end; ++entry) {
      const int *words = p.work_list + p.zeros_at + entry * 3;
      int query_start = words[0], first_row = words[1], rows = abs(words[2]);
#pragma unroll 1
      for (int unit = thread; unit < rows * (HEAD_DIM / 2); unit += num_threads) {
        int packed = first_row + packed_of(unit), d = element_of(unit), head = kv_head * GROUP + packed % GROUP;
        i64 token = query_start + packed / GROUP;
        *output_at(token, head, d, p) = 0;
        if (p.lse && d == 0)
          p.lse[token * p.lse_token + head] = p.sinks && words[2] > 0 ? p.sinks[head] : NEG_INF;
      }
    }
}
