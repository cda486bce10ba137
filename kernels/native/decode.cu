// Decode attention for rows of few query rows: one work-list part per cluster of CLUSTER blocks.
//
// Each warp is a stream of its own: it takes every WORKERS-th tile of a segment, copies tiles of K and V STAGES - 1 ahead
// into its own place in shared memory, across segments, and multiplies with mma.sync. No barrier stands in that loop.
// At the end of a segment the warps of a block merge through shared memory and the blocks of a cluster through
// distributed shared memory, each for its slice of the output; only a unit that several parts share goes through global
// memory, with self-resetting counters as in attend.py. The work list is work_list.py's.
//
// Blocks that are neighbours in the grid share a GPC. With one block per multiprocessor these are the parts of one KV
// head, so that every GPC reads parts of all kinds and none has all of a long row. With several they are the KV heads of
// one part, whose keys and values lie side by side in memory.
//
// Products are transposed: S^T = K Q^T has tokens as the 16 rows of an mma and query rows as its 8 columns, so that a
// group of up to 8 is not padded to 16. The accumulators hold O^T = V^T P^T.
//
// Compile-time macros: HEAD_DIM GROUP QUERY_LEN PAGE_SIZE BLOCK_N WARPS STAGES CLUSTER BLOCKS_PER_SM CAUSAL WINDOW
// SOFTCAP ALIBI (1: distance, 2: its root) Q_BF16 KV_FP8 (0, 1: e4m3, 2: e5m2) FIXED_SPLITS MERGE_GROUP
// PARTIAL_M PARAMS_BYTES

#include "attend.cuh"

#define COPIES (16 * CHUNKS / 32)           // 16-byte copies per lane, of 16 tokens of K or V; CHUNKS is even
#define QUERY_LINES ((HEAD_DIM + 63) / 64)  // of 128 bytes, of a query row
#define UNITS (PACKED * HEAD_DIM / 2)      // pairs of output elements
#define SLICE ((UNITS + CLUSTER - 1) / CLUSTER)
#define THREADS (32 * WARPS)
#define WORKERS (CLUSTER * WARPS)
#define HEADS_FIRST (BLOCKS_PER_SM > 1)
#define KV_HEADS (HEADS_FIRST ? gridDim.x : gridDim.y)

static_assert(CLUSTER == 1 || !HEADS_FIRST, "the blocks of a cluster are neighbours");
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

// Two neighbouring elements of an output row, not divided yet, with the reference point and sum of their exponentials.
struct Pair {
  float x, y, top, sum;
};

__device__ __forceinline__ int packed_of(int unit) { return unit / (HEAD_DIM / 2); }
__device__ __forceinline__ int element_of(int unit) { return unit % (HEAD_DIM / 2) * 2; }

__device__ __forceinline__ void write_pair(Pair r, int unit, const Segment &s, const Params &p, int kv_head) {
  int packed = packed_of(unit), d = element_of(unit);
  i64 token = s.query_start + packed / GROUP;
  int head = kv_head * GROUP + packed % GROUP;
  if (p.sinks) {
    float sink = p.sinks[head] * LOG2E, top = fmaxf(r.top, sink), rescale = power2(r.top - finite(top));
    r = {r.x * rescale, r.y * rescale, top, r.sum * rescale + power2(sink - finite(top))};
  }
  float divisor = r.sum == 0.0f ? 1.0f : r.sum;  // a token that sees nothing gets zeros
  if (p.lse && d == 0) p.lse[token * p.lse_token + head] = (r.top + log2f(divisor)) * LN2;
  float scale = 1.0f / divisor;
  if (p.v_scale) scale *= p.v_scale[kv_head * p.v_scale_head];
  u16 *to = static_cast<u16 *>(p.out) + token * p.out_token + head * p.out_head + d;
  *reinterpret_cast<u32 *>(to) = pack_output(r.x * scale, r.y * scale);
}

// COUNT partial results in shared memory, summed in order: pairs and statistics of unit i are `values(i)`, `stats(i)`.
template <int COUNT, typename Values, typename Stats>
__device__ __forceinline__ Pair merge_shared(Values values, Stats stats) {
  float top = NEG_INF;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) top = fmaxf(top, stats(i).x);
  Pair r = {0.0f, 0.0f, top, 0.0f};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float share = power2(stats(i).x - finite(top));
    float2 x = values(i);
    r = {r.x + share * x.x, r.y + share * x.y, top, r.sum + share * stats(i).y};
  }
  return r;
}

// The places of a unit's partial results in global memory, those of attend.py.
struct Slots {
  int first, next, step;
  __device__ __forceinline__ int of(int split) const { return split == 0 ? first : next + split * step; }
  // Those of the splits from `leader` on, and those of every group's leader.
  __device__ __forceinline__ Slots from(int leader) const { return {of(leader), next + leader * step, step}; }
  __device__ __forceinline__ Slots leaders() const { return {first, next, step * MERGE_GROUP}; }
};

__device__ __forceinline__ Slots slots_of(const Segment &s, int part) {
#if FIXED_SPLITS
  int first = (s.row * ((s.query_len * GROUP + 15) / 16) + s.first_row / 16) * FIXED_SPLITS;
  return {first, first, 1};
#else
  int next = 2 * (part - s.split);
  return {next + 1, next, 2};
#endif
}

// Merged groups have log-sum-exps of their own: other warps may still read those of the group's first split.
__device__ __forceinline__ float *lse_of(int level, const Params &p) {
  return p.partial_lse + (i64)level * p.num_slots * KV_HEADS * PARTIAL_M;
}

__device__ __forceinline__ void store_pair(Pair r, int unit, int first_unit, int level, i64 slot, const Params &p,
                                           int kv_head) {
  int packed = packed_of(unit), d = element_of(unit);
  i64 at = (slot * KV_HEADS + kv_head) * PARTIAL_M + packed;
  float divisor = r.sum == 0.0f ? 1.0f : r.sum;
  // Blocks of a cluster that hold parts of the same query row write the same value.
  if (d == 0 || unit == first_unit) lse_of(level, p)[at] = r.top + log2f(divisor);
  *reinterpret_cast<float2 *>(p.partial_out + at * HEAD_DIM + d) = make_float2(r.x / divisor, r.y / divisor);
}

// `count` partial results in global memory, summed in split order. L1 is not coherent, so the loads go to L2.
__device__ __forceinline__ Pair merge_slots(int unit, Slots slots, int count, int level, const Params &p, int kv_head) {
  constexpr int AT_A_TIME = 8;
  int packed = packed_of(unit), d = element_of(unit);
  Pair r = {0.0f, 0.0f, NEG_INF, 0.0f};
  for (int from = 0; from < count; from += AT_A_TIME) {
    float lses[AT_A_TIME], top = r.top;
    float2 outs[AT_A_TIME];
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      bool exists = from + i < count;
      i64 at = ((i64)slots.of(from + i) * KV_HEADS + kv_head) * PARTIAL_M + packed;
      lses[i] = exists ? __ldcg(lse_of(level, p) + at) : NEG_INF;
      outs[i] = exists ? __ldcg(reinterpret_cast<const float2 *>(p.partial_out + at * HEAD_DIM + d))
                       : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) top = fmaxf(top, lses[i]);
    float rescale = power2(r.top - finite(top));
    r = {r.x * rescale, r.y * rescale, top, r.sum * rescale};
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      float share = power2(lses[i] - finite(top));
      r = {r.x + share * outs[i].x, r.y + share * outs[i].y, top, r.sum + share};
    }
  }
  return r;
}

// Tell that this block's units of a split are stored, and merge them if it is the last: in groups of MERGE_GROUP
// splits, and the results of the groups once more. Who comes last to a group merges it into its first slot and goes on
// to the unit's counter. The blocks of a cluster do so apart, each with counters of its own.
__device__ __forceinline__ void arrive_and_merge(const Segment &s, Slots slots, int first_unit, int last_unit, int rank,
                                                 const Params &p, int kv_head) {
  __shared__ bool is_last;
  const int groups = (s.num_splits + MERGE_GROUP - 1) / MERGE_GROUP;
  int leader = s.split / MERGE_GROUP * MERGE_GROUP, expected = min(s.num_splits - leader, MERGE_GROUP);
  int counter = slots.of(leader);
  Slots group = slots.from(leader);
  for (int level = 0; level < (groups > 1 ? 2 : 1); ++level) {
    if (level == 1) {
      expected = groups;
      counter = p.num_slots + slots.first;
      group = slots.leaders();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int *at = p.counters + ((i64)counter * KV_HEADS + kv_head) * CLUSTER + rank;
      is_last = count_arrival(at) == expected - 1;
      if (is_last) *at = 0;
    }
    __syncthreads();
    if (!is_last) return;
    for (int unit = first_unit + threadIdx.x; unit < last_unit; unit += THREADS) {
      Pair r = merge_slots(unit, group, expected, level, p, kv_head);
      if (level == 0 && groups > 1)
        store_pair(r, unit, first_unit, 1, group.first, p, kv_head);
      else
        write_pair(r, unit, s, p, kv_head);
    }
  }
}

// The partial results of this block's warps.
__device__ __forceinline__ Pair merge_warps(int unit, const float *results) {
  const int at = packed_of(unit) * OUT_PITCH + element_of(unit), stats_at = PACKED * OUT_PITCH + 2 * packed_of(unit);
  const auto load = [&](int warp, int offset) {
    return *reinterpret_cast<const float2 *>(results + warp * PARTIAL_FLOATS + offset);
  };
  return merge_shared<WARPS>([&](int warp) { return load(warp, at); }, [&](int warp) { return load(warp, stats_at); });
}

#if CLUSTER > 1
// What the blocks of a cluster send each other: [2][CLUSTER][SLICE] pairs and [2][CLUSTER][PACKED] statistics. Units go to
// the block whose slice they are in, statistics to every block. Two of each, as a block may be one segment ahead; not
// two, since it needs the others' results of a segment before it leaves that.
struct Inbox {
  float2 *pairs, *stats;
  i64 *bytes;  // [2], what has come
  int segment;

  __device__ __forceinline__ void open(void *at) {
    pairs = static_cast<float2 *>(at);
    stats = pairs + 2 * CLUSTER * SLICE;
    bytes = reinterpret_cast<i64 *>(stats + 2 * CLUSTER * PACKED);
    segment = 0;
    if (threadIdx.x == 0) {
      init_barrier(bytes);
      init_barrier(bytes + 1);
      publish_barriers();
    }
  }
  __device__ __forceinline__ void expect(int units) const {
    if (threadIdx.x == 0) expect_bytes(bytes + segment % 2, CLUSTER * (units + PACKED) * (int)sizeof(float2));
  }
  __device__ __forceinline__ void send(Pair r, int unit, int rank) const {
    const int source = segment % 2 * CLUSTER + rank, block = element_of(unit) / 2;
    const u32 barrier = shared_address(bytes + segment % 2);
    store_remote(shared_address(pairs + source * SLICE + unit % SLICE), barrier, unit / SLICE, r.x, r.y);
    if (block < CLUSTER)
      store_remote(shared_address(stats + source * PACKED + packed_of(unit)), barrier, block, r.top, r.sum);
  }
  __device__ __forceinline__ void wait() const { wait_for_bytes(bytes + segment % 2, segment / 2 % 2); }
  __device__ __forceinline__ Pair merge(int unit) const {
    const float2 *of_unit = pairs + segment % 2 * CLUSTER * SLICE + unit % SLICE;
    const float2 *of_row = stats + segment % 2 * CLUSTER * PACKED + packed_of(unit);
    return merge_shared<CLUSTER>([&](int i) { return of_unit[i * SLICE]; }, [&](int i) { return of_row[i * PACKED]; });
  }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_attention(const __grid_constant__ Params p) {
  // Stages of all warps; their partial results; the inbox.
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = HEADS_FIRST ? blockIdx.x : blockIdx.y, block = HEADS_FIRST ? blockIdx.y : blockIdx.x;
  const int part = block / CLUSTER, rank = block % CLUSTER;
  const int worker = rank * WARPS + warp;
  const u32 stages_at = shared_address(memory) + warp * (STAGES * STAGE_BYTES);
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
  const int begin = part_words[0], end = part_words[16];
  const int zeros_begin = part_words[1], zeros_end = part_words[17];
#if FIXED_SPLITS
  Segment s = {};
  if (begin < end) s = load_segment(p.work_list + p.segments_at + begin * 8);
#else
  Segment s = load_segment(part_words + 8);  // beside the others and not after them, even where there is none
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
    leave_partial(state, results + warp * PARTIAL_FLOATS, lane);
    __syncthreads();

    const bool is_split = s.num_splits > 1;
    const Slots slots = slots_of(s, part);
    const int first_unit = rank * SLICE, last_unit = min(first_unit + SLICE, UNITS);
    const auto deliver = [&](Pair r, int unit) {
      if (is_split)
        store_pair(r, unit, first_unit, 0, slots.of(s.split), p, kv_head);
      else
        write_pair(r, unit, s, p, kv_head);
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
    if (is_split) arrive_and_merge(s, slots, first_unit, last_unit, rank, p, kv_head);
    if (segment + 1 < end) __syncthreads();  // the partial results have been read
  }
#if CLUSTER > 1
  if (!met) cluster_wait();
#endif

  if (rank == 0)
    for (int entry = zeros_begin; entry < zeros_end; ++entry) {
      const int *words = p.work_list + p.zeros_at + entry * 3;
      int query_start = words[0], first_row = words[1], rows = abs(words[2]);
      for (int unit = threadIdx.x; unit < rows * (HEAD_DIM / 2); unit += THREADS) {
        int packed = first_row + unit / (HEAD_DIM / 2), d = unit % (HEAD_DIM / 2) * 2;
        i64 token = query_start + packed / GROUP;
        int head = kv_head * GROUP + packed % GROUP;
        *reinterpret_cast<u32 *>(static_cast<u16 *>(p.out) + token * p.out_token + head * p.out_head + d) = 0;
        if (p.lse && d == 0)
          p.lse[token * p.lse_token + head] = p.sinks && words[2] > 0 ? p.sinks[head] : NEG_INF;
      }
    }
}
