// From the partial results of warps to the output: within a block, a cluster, and through global memory.

#include "attend.cuh"

#define COOPERATIVE (CLUSTER > 1 || FIXED_SPLITS > 0)
#define THREADS (32 * WARPS)
#define UNITS (PACKED * HEAD_DIM / 2)      // pairs of output elements
#define SLICE ((UNITS + CLUSTER - 1) / CLUSTER)
#define KV_HEADS gridDim.x

static_assert((WARPS & (WARPS - 1)) == 0 && WARPS < 32, "lanes stand for warps");

// Two neighbouring elements of an output row, not divided yet, with the reference point and sum of their exponentials.
struct Pair {
  float x, y, top, sum;
};

__device__ __forceinline__ int packed_of(int unit) { return unit / (HEAD_DIM / 2); }
__device__ __forceinline__ int element_of(int unit) { return unit % (HEAD_DIM / 2) * 2; }

// What the weighted sum of values of a query row is multiplied by, whose log-sum-exp is written on the way.
__device__ __forceinline__ float output_factor(float top, float sum, i64 token, int head, bool writes_lse, const Params &p,
                                               int kv_head) {
  float rescale = 1.0f;
  if (p.sinks) {
    float sink = p.sinks[head] * LOG2E, with_sink = fmaxf(top, sink);
    rescale = power2(top - finite(with_sink));
    sum = sum * rescale + power2(sink - finite(with_sink));
    top = with_sink;
  }
  float divisor = sum == 0.0f ? 1.0f : sum;  // a token that sees nothing gets zeros
  if (p.lse && writes_lse) p.lse[token * p.lse_token + head] = (top + log2f(divisor)) * LN2;
  return rescale * reciprocal(divisor) * (p.v_scale ? p.v_scale[kv_head * p.v_scale_head] : 1.0f);
}

__device__ __forceinline__ u32 *output_at(i64 token, int head, int d, const Params &p) {
  return reinterpret_cast<u32 *>(static_cast<u16 *>(p.out) + token * p.out_token + head * p.out_head + d);
}

__device__ __forceinline__ void write_pair(Pair r, int unit, int query_start, const Params &p, int kv_head) {
  int packed = packed_of(unit), d = element_of(unit), head = kv_head * GROUP + packed % GROUP;
  i64 token = query_start + packed / GROUP;
  float factor = output_factor(r.top, r.sum, token, head, d == 0, p, kv_head);
  *output_at(token, head, d, p) = pack_output(r.x * factor, r.y * factor);
}

// The output of a unit that one warp has attended to alone, from its registers; the sums are added up.
__device__ __forceinline__ void write_rows(const State &state, int query_start, const Params &p, int kv_head, int lane) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int packed = 8 * n + lane % 4 * 2 + j, head = kv_head * GROUP + packed % GROUP;
      factor[j] = output_factor(state.top[n][j], state.sum[n][j], query_start + packed / GROUP, head,
                                lane < 4 && packed < PACKED, p, kv_head);
    }
#pragma unroll
    for (int m = 0; m < KS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#if KV_FP8
        int packed = 8 * n + lane % 4 * 2 + i, d = 16 * m + lane / 4 * 2;
        u32 pair = pack_output(state.o[m][n][i] * factor[i], state.o[m][n][i + 2] * factor[i]);
#else
        int packed = 8 * n + lane / 4, d = 16 * m + 8 * i + lane % 4 * 2;
        u32 pair = transpose(pack_output(state.o[m][n][2 * i] * factor[0], state.o[m][n][2 * i + 1] * factor[1]));
#endif
        if (packed < PACKED) *output_at(query_start + packed / GROUP, kv_head * GROUP + packed % GROUP, d, p) = pair;
      }
  }
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

#if COOPERATIVE
// The places of a unit's partial results in global memory, those of attend.py.
struct Slots {
  int first, next, step;
  __device__ __forceinline__ int of(int split) const { return split == 0 ? first : next + split * step; }
  // Those of the splits from `leader` on, and those of every group's leader.
  __device__ __forceinline__ Slots from(int leader) const { return {of(leader), next + leader * step, step}; }
  __device__ __forceinline__ Slots leaders() const { return {first, next, step * MERGE_GROUP}; }
};

// Of a unit that begins in block, or cluster, `first`.
__device__ __forceinline__ Slots slots_of(int first) { return {2 * first + 1, 2 * first, 2}; }

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
  float factor = reciprocal(divisor);
  *reinterpret_cast<float2 *>(p.partial_out + at * HEAD_DIM + d) = make_float2(r.x * factor, r.y * factor);
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

// Tell that this block's results of a unit are stored, which is split `index` of `count`, and merge those to which it is
// the last: in groups of MERGE_GROUP splits, and the results of the groups once more. Who comes last to a group merges it
// into its first slot and goes on to the unit's counter. The blocks of a cluster do so apart, each with counters of its
// own.
__device__ __forceinline__ void arrive_and_merge(int count, int index, Slots slots, int query_start, int first_unit,
                                                 int last_unit, int rank, const Params &p, int kv_head) {
  __shared__ bool is_last;
  const int leader = index / MERGE_GROUP * MERGE_GROUP, groups = (count + MERGE_GROUP - 1) / MERGE_GROUP;
  for (int level = 0; level < 2; ++level) {
    const int expected = level == 0 ? min(count - leader, MERGE_GROUP) : groups;
    __syncthreads();
    if (threadIdx.x == 0) {
      const int counter = level == 0 ? slots.of(leader) : p.num_slots + slots.first;
      int *at = p.counters + ((i64)counter * KV_HEADS + kv_head) * CLUSTER + rank;
      is_last = count_arrival(at) == expected - 1;
      if (is_last) *at = 0;
    }
    __syncthreads();
    if (!is_last) return;
    const bool goes_on = level == 0 && groups > 1;
    const Slots from = level == 0 ? slots.from(leader) : slots.leaders();
    for (int unit = first_unit + threadIdx.x; unit < last_unit; unit += THREADS) {
      Pair r = merge_slots(unit, from, expected, level, p, kv_head);
      if (goes_on)
        store_pair(r, unit, first_unit, 1, from.first, p, kv_head);
      else
        write_pair(r, unit, query_start, p, kv_head);
    }
    if (!goes_on) return;
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
#else
// A segment that a warp shares with its neighbours, and how many the warp has; num_splits is 0 where there is none.
struct Share {
  int query_start, num_splits, split, segments;
};

__device__ __forceinline__ Share share_of(const Segment &s, int segments) {
  return {s.query_start, s.num_splits > 1 ? s.num_splits : 0, s.split, segments};
}

#define PAIRS ((HEAD_DIM + 63) / 64)       // of a query row, per lane

// The letter of a block: what it has of the unit that goes on in the next block, and if it is the last one of a group of
// MERGE_GROUP blocks what these have. For each query row HEAD_DIM sums, the reference point of their exponentials and the
// sum of these. Words are 0 until they come, and the reader makes them 0 again; so 0 is sent as -0.
__device__ __forceinline__ float *letter_of(int block, int packed, const Params &p, int kv_head) {
  const i64 at = 2 * (i64)p.num_slots * KV_HEADS + (((i64)block * KV_HEADS + kv_head) * PACKED + packed) * (HEAD_DIM + 2);
  return reinterpret_cast<float *>(p.counters) + at;
}

__device__ __forceinline__ int pair_of(int lane, int j) { return min(2 * (lane + 32 * j), HEAD_DIM - 2); }

__device__ __forceinline__ float nonzero(float x) { return x == 0.0f ? -0.0f : x; }
__device__ __forceinline__ bool has_come(float2 x) { return __float_as_uint(x.x) != 0 && __float_as_uint(x.y) != 0; }

__device__ __forceinline__ void send_row(const Pair (&row)[PAIRS], float *letter, int lane) {
#pragma unroll
  for (int j = 0; j < PAIRS; ++j)
    if (lane + 32 * j < HEAD_DIM / 2) send(letter + pair_of(lane, j), nonzero(row[j].x), nonzero(row[j].y));
  if (lane == 0) send(letter + HEAD_DIM, nonzero(row[0].top), nonzero(row[0].sum));
}

// Add the letters of blocks to a query row, waiting for each: of the leaders of `groups` groups of MERGE_GROUP blocks from
// block `first` on, and of those before block `first + index` that are in no such group. Devices start blocks in the order
// of their indices, which is relied upon, though CUDA does not promise it: so that who is waited for runs.
__device__ __forceinline__ void receive_rows(Pair (&row)[PAIRS], int first, int index, int groups, int packed,
                                             const Params &p, int kv_head, int lane) {
  constexpr int AT_A_TIME = 8, MAX_POLLS = 1 << 24;  // more than ten seconds of them: the work list is not this plan's
  const int member = index / MERGE_GROUP * MERGE_GROUP, count = groups + index - member;
#pragma unroll 1
  for (int from = 0; from < count; from += AT_A_TIME) {
    float *letters[AT_A_TIME];
    float2 stats[AT_A_TIME], values[AT_A_TIME][PAIRS];
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      const int at = min(from + i, count - 1);  // what is read twice does no harm, a branch per load would
      const int sender = at < groups ? (at + 1) * MERGE_GROUP - 1 : member + at - groups;
      letters[i] = letter_of(first + sender, packed, p, kv_head);
    }
    bool missing;
    int polls = 0;
    do {
      if (++polls == MAX_POLLS) give_up();
      missing = false;
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        stats[i] = receive(letters[i] + HEAD_DIM);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) values[i][j] = receive(letters[i] + pair_of(lane, j));
      }
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        missing |= !has_come(stats[i]);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) missing |= !has_come(values[i][j]);
      }
    } while (__any_sync(0xffffffffu, missing));
    float top = row[0].top;
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) top = fmaxf(top, stats[i].x);
    const float rescale = power2(row[0].top - finite(top));
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) row[j] = {row[j].x * rescale, row[j].y * rescale, top, row[j].sum * rescale};
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      if (from + i >= count) continue;
      const float weight = power2(stats[i].x - finite(top));
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        row[j].x += weight * values[i][j].x;
        row[j].y += weight * values[i][j].y;
        row[j].sum += weight * stats[i].y;
        if (lane + 32 * j < HEAD_DIM / 2) send(letters[i] + pair_of(lane, j), 0.0f, 0.0f);
      }
      if (lane == 0) send(letters[i] + HEAD_DIM, 0.0f, 0.0f);
    }
  }
}

// Merge what the warps of this block share: `shares` are that of the first segment of the block, where its warp has
// others, and that of the last segment of each warp. `firsts(warp)` and `lasts(warp)` are the places of partial results.
// A warp merges a query row at a time, `PAIRS` times two neighbouring elements per lane. What goes on in the next block
// is sent there first, as its last block waits for it; what ends here comes last.
template <typename Firsts, typename Lasts>
__device__ __forceinline__ void merge_streams(const Share *shares, Firsts firsts, Lasts lasts, int block, const Params &p,
                                              int kv_head) {
  // Each lane looks at one share. A unit is the business of the first one of this block, which spans warps `from` to `to`;
  // of the last of them it is the first segment, or the only one, and the last one of the others.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Share mine = shares[min(lane, WARPS)];
  const int from = max(lane - 1, 0), first_part = block * WARPS + from - mine.split;
  const int last_part = first_part + mine.num_splits - 1, first_block = first_part / WARPS;
  const int to = lane == 0 ? 0 : min(last_part - block * WARPS, WARPS - 1);
  const bool goes_on = last_part / WARPS > block;
  const bool leads = lane <= WARPS && mine.num_splits > 0 && (lane <= 1 || mine.split == 0);
  const bool ends_first = lane == 0 || (leads && to > from && shares[1 + to].segments > 1);
  const u32 leaders = __ballot_sync(0xffffffffu, leads);
#pragma unroll 1
  for (int item = WARPS - 1 - warp; item < __popc(leaders) * PACKED; item += WARPS) {
    u32 left = leaders;
    for (int i = 0; i < item / PACKED; ++i) left ^= 1u << (31 - __clz(left));
    const int leader = 31 - __clz(left), packed = item % PACKED;
    const int begin = __shfl_sync(0xffffffffu, from, leader), end = __shfl_sync(0xffffffffu, to, leader);
    const float *at_end = __shfl_sync(0xffffffffu, (int)ends_first, leader) ? firsts(end) : lasts(end);
    // Lane i knows what warp i has left, and so do lanes i + WARPS, i + 2 WARPS, ... Warps without a part of the unit have
    // no share; a place that is read for them is one of the unit's.
    const auto place = [&](int other) { return other < end ? lasts(max(other, begin)) : at_end; };
    const float2 stats = *reinterpret_cast<const float2 *>(place(lane % WARPS) + PACKED * OUT_PITCH + 2 * packed);
    float top = stats.x;
#pragma unroll
    for (int other = 1; other < WARPS; other *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, other));
    const bool exists = lane % WARPS >= begin && lane % WARPS <= end;
    const float share = exists ? power2(stats.x - finite(top)) : 0.0f;
    float sum = share * stats.y;
#pragma unroll
    for (int other = 1; other < WARPS; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    Pair row[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) row[j] = {0.0f, 0.0f, top, sum};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      const float weight = __shfl_sync(0xffffffffu, share, i);
      const float *values = place(i) + packed * OUT_PITCH;
      const bool counts = i >= begin && i <= end;  // else 0 times what may be infinite
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const float2 x = *reinterpret_cast<const float2 *>(values + pair_of(lane, j));
        row[j].x += weight * (counts ? x.x : 0.0f);
        row[j].y += weight * (counts ? x.y : 0.0f);
      }
    }
    const int first = __shfl_sync(0xffffffffu, first_block, leader), index = block - first;
    const bool is_sent = __shfl_sync(0xffffffffu, (int)goes_on, leader);
    if (!is_sent)
      receive_rows(row, first, index, index / MERGE_GROUP, packed, p, kv_head, lane);
    else if (index % MERGE_GROUP == MERGE_GROUP - 1)
      receive_rows(row, first, index, 0, packed, p, kv_head, lane);
    const int query_start = __shfl_sync(0xffffffffu, mine.query_start, leader);
    if (is_sent) {
      send_row(row, letter_of(block, packed, p, kv_head), lane);
    } else {
#pragma unroll
      for (int j = 0; j < PAIRS; ++j)
        if (lane + 32 * j < HEAD_DIM / 2)
          write_pair(row[j], packed * (HEAD_DIM / 2) + lane + 32 * j, query_start, p, kv_head);
    }
  }
}
#endif

#if CLUSTER > 1
// What the blocks of a cluster send each other: [2][CLUSTER][SLICE] pairs and [2][CLUSTER][PACKED] statistics. Units go to
// the block whose slice they are in, statistics to every block. Two of each, as a block may be one segment ahead of the
// others, and not more: it needs their results of a segment before it leaves that.
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
