// From the partial results of warps to the output: within a block, within a cluster, and through global memory.
//
// A unit's output is NUM_QUERIES x V_HEAD_DIM elements, which threads take as pairs of neighbours. A merge adds sums of
// weight x value, each times 2^(its reference point - the common one), and the sums of weights likewise; always in the
// order of the segments, so that the result does not depend on who is first.
//
//                      one part per warp               one part per cluster (COOPERATIVE)
//   within a block     merge_streams, at the end       merge_warps, per segment
//   between blocks     letters                         InputRing: distributed shared memory
//   between clusters                                   Places and counters: arrive_and_merge

#include "attend.cuh"

#define COOPERATIVE (CLUSTER > 1 || FIXED_SPLITS > 0)
#define THREADS (32 * WARPS)
#define UNIT_PAIRS (NUM_QUERIES * V_HEAD_DIM / 2)   // pairs of neighbouring output elements
#define SLICE ((UNIT_PAIRS + CLUSTER - 1) / CLUSTER)  // of these, for each block of a cluster
#define KV_HEADS gridDim.x

static_assert((WARPS & (WARPS - 1)) == 0 && WARPS < 32, "each lane reads what one warp has left");

// A pair of output elements, not divided yet, with its query's reference point and sum of weights.
struct Pair {
  float x, y, top, sum;
};

__device__ __forceinline__ int query_of(int pair) { return pair / (V_HEAD_DIM / 2); }
__device__ __forceinline__ int element_of(int pair) { return pair % (V_HEAD_DIM / 2) * 2; }

// What a query's sum of weight x value is multiplied by to become the output. Writes the log-sum-exp on the way. A sink
// is one more logit without a value.
__device__ __forceinline__ float output_factor(float top, float sum, i64 token, int head, bool writes_lse,
                                               const Params &p, int kv_head) {
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

__device__ __forceinline__ void write_pair(Pair r, int pair, int first_token, const Params &p, int kv_head) {
  int query = query_of(pair), d = element_of(pair), head = kv_head * GROUP + query % GROUP;
  i64 token = first_token + query / GROUP;
  float factor = output_factor(r.top, r.sum, token, head, d == 0, p, kv_head);
  *output_at(token, head, d, p) = pack_output(r.x * factor, r.y * factor);
}

// Write the output of a unit that one warp has attended to alone, from its registers. add_up() has run.
__device__ __forceinline__ void write_unit(const State &state, int first_token, const Params &p, int kv_head,
                                           int lane) {
#pragma unroll
  for (int n = 0; n < OCTETS; ++n) {
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int query = 8 * n + lane % 4 * 2 + j, head = kv_head * GROUP + query % GROUP;
      factor[j] = output_factor(state.top[n][j], state.sum[n][j], first_token + query / GROUP, head,
                                lane < 4 && query < NUM_QUERIES, p, kv_head);
    }
#pragma unroll
    for (int m = 0; m < V_STEPS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#if KV_FP8
        int query = 8 * n + lane % 4 * 2 + i, d = 16 * m + lane / 4 * 2;
        u32 pair = pack_output(state.o[m][n][i] * factor[i], state.o[m][n][i + 2] * factor[i]);
#else
        int query = 8 * n + lane / 4, d = 16 * m + 8 * i + lane % 4 * 2;
        u32 pair = transpose(pack_output(state.o[m][n][2 * i] * factor[0], state.o[m][n][2 * i + 1] * factor[1]));
#endif
        if (query < NUM_QUERIES) *output_at(first_token + query / GROUP, kv_head * GROUP + query % GROUP, d, p) = pair;
      }
  }
}

// Sum COUNT partial results in shared memory, in order. `values(i)` and `stats(i)` are those of the i-th for one pair.
template <int COUNT, typename Values, typename Stats>
__device__ __forceinline__ Pair merge_shared(Values values, Stats stats) {
  float top = NEG_INF;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) top = fmaxf(top, stats(i).x);
  Pair r = {0.0f, 0.0f, top, 0.0f};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float weight = power2(stats(i).x - finite(top));
    float2 x = values(i);
    r = {r.x + weight * x.x, r.y + weight * x.y, top, r.sum + weight * stats(i).y};
  }
  return r;
}

#if COOPERATIVE
// The places in global memory for the partial results of a unit. attend.py numbers them in the same way.
struct Places {
  int first, next, step;
  __device__ __forceinline__ int of(int split) const { return split == 0 ? first : next + split * step; }
  // The places of the splits from `leader` on; those of the first split of every bundle.
  __device__ __forceinline__ Places from(int leader) const { return {of(leader), next + leader * step, step}; }
  __device__ __forceinline__ Places leaders() const { return {first, next, step * MERGE_BUNDLE}; }
};

// Of a unit that begins in the part `first`.
__device__ __forceinline__ Places places_of(int first) { return {2 * first + 1, 2 * first, 2}; }

// Level 0: log-sum-exps of partial results; level 1: of merged bundles. They lie apart, since other warps may still
// read that of the bundle's first split.
__device__ __forceinline__ float *lse_of(int level, const Params &p) {
  return p.partial_lse + (i64)level * p.num_places * KV_HEADS * PARTIAL_M;
}

// Store a pair of a partial result, divided by its sum of weights.
__device__ __forceinline__ void store_pair(Pair r, int pair, int first_pair, int level, i64 place, const Params &p,
                                           int kv_head) {
  int query = query_of(pair), d = element_of(pair);
  i64 at = (place * KV_HEADS + kv_head) * PARTIAL_M + query;
  float divisor = r.sum == 0.0f ? 1.0f : r.sum;
  // Blocks of a cluster whose slices meet within a query write the same value.
  if (d == 0 || pair == first_pair) lse_of(level, p)[at] = r.top + log2f(divisor);
  float factor = reciprocal(divisor);
  *reinterpret_cast<float2 *>(p.partial_out + at * V_HEAD_DIM + d) = make_float2(r.x * factor, r.y * factor);
}

// Sum `count` partial results in global memory, in the order of the splits. The loads skip L1, which is not coherent.
__device__ __forceinline__ Pair merge_places(int pair, Places places, int count, int level, const Params &p,
                                             int kv_head) {
  constexpr int AT_A_TIME = 8;
  int query = query_of(pair), d = element_of(pair);
  Pair r = {0.0f, 0.0f, NEG_INF, 0.0f};
  for (int from = 0; from < count; from += AT_A_TIME) {
    float lses[AT_A_TIME], top = r.top;
    float2 outs[AT_A_TIME];
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      bool exists = from + i < count;
      i64 at = ((i64)places.of(from + i) * KV_HEADS + kv_head) * PARTIAL_M + query;
      lses[i] = exists ? __ldcg(lse_of(level, p) + at) : NEG_INF;
      outs[i] = exists ? __ldcg(reinterpret_cast<const float2 *>(p.partial_out + at * V_HEAD_DIM + d))
                       : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) top = fmaxf(top, lses[i]);
    float rescale = power2(r.top - finite(top));
    r = {r.x * rescale, r.y * rescale, top, r.sum * rescale};
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      float weight = power2(lses[i] - finite(top));
      r = {r.x + weight * outs[i].x, r.y + weight * outs[i].y, top, r.sum + weight};
    }
  }
  return r;
}

// Count that this block has stored its results of a unit, which are split `index` of `count`. The last to arrive
// merges.
//
// Level 0: the last of a bundle of MERGE_BUNDLE splits merges the bundle into the place of its first split. Level 1:
// the last of the unit merges the bundles. Units of one bundle have level 0 only. The blocks of a cluster do so apart,
// each for its slice and with counters of its own. A counter is set back to 0 by who was last.
__device__ __forceinline__ void arrive_and_merge(int count, int index, Places places, int first_token, int first_pair,
                                                 int end_pair, int rank, const Params &p, int kv_head) {
  __shared__ bool is_last;
  const int leader = index / MERGE_BUNDLE * MERGE_BUNDLE, bundles = (count + MERGE_BUNDLE - 1) / MERGE_BUNDLE;
  for (int level = 0; level < 2; ++level) {
    const int expected = level == 0 ? min(count - leader, MERGE_BUNDLE) : bundles;
    __syncthreads();
    if (threadIdx.x == 0) {
      const int counter = level == 0 ? places.of(leader) : p.num_places + places.first;
      int *at = p.counters + ((i64)counter * KV_HEADS + kv_head) * CLUSTER + rank;
      is_last = count_arrival(at) == expected - 1;
      if (is_last) *at = 0;
    }
    __syncthreads();
    if (!is_last) return;
    const bool goes_on = level == 0 && bundles > 1;
    const Places from = level == 0 ? places.from(leader) : places.leaders();
    for (int pair = first_pair + threadIdx.x; pair < end_pair; pair += THREADS) {
      Pair r = merge_places(pair, from, expected, level, p, kv_head);
      if (goes_on)
        store_pair(r, pair, first_pair, 1, from.first, p, kv_head);
      else
        write_pair(r, pair, first_token, p, kv_head);
    }
    if (!goes_on) return;
  }
}

// Sum the partial results of this block's warps.
__device__ __forceinline__ Pair merge_warps(int pair, const float *results) {
  const int at = query_of(pair) * OUT_PITCH + element_of(pair), stats_at = NUM_QUERIES * OUT_PITCH + 2 * query_of(pair);
  const auto load = [&](int warp, int offset) {
    return *reinterpret_cast<const float2 *>(results + warp * PARTIAL_FLOATS + offset);
  };
  return merge_shared<WARPS>([&](int warp) { return load(warp, at); }, [&](int warp) { return load(warp, stats_at); });
}
#else
// A unit that a warp shares with other warps: where the warp's segment stands in it, and how many segments the warp
// has. num_splits is 0 where there is no such unit.
struct SharedUnit {
  int first_token, num_splits, split, segments;
};

__device__ __forceinline__ SharedUnit shared_unit_of(const Segment &s, int segments) {
  return {s.first_token, s.num_splits > 1 ? s.num_splits : 0, s.split, segments};
}

#define LANE_PAIRS ((V_HEAD_DIM + 63) / 64)  // pairs of a query that each lane of a warp holds

// A letter is what a block sends of a unit that goes on in the next block. For each query it has V_HEAD_DIM sums, the
// reference point and the sum of weights. The last block of a bundle of MERGE_BUNDLE blocks sends the sum of all of
// them.
//
// A word is 0 until it has come. So the reader polls the values themselves, without a fence or a counter; then it makes
// them 0 again, for the next call. A 0 that is meant is sent as -0.
__device__ __forceinline__ float *letter_of(int block, int query, const Params &p, int kv_head) {
  const i64 letters = 2 * (i64)p.num_places * KV_HEADS;
  const i64 number = ((i64)block * KV_HEADS + kv_head) * NUM_QUERIES + query;
  return reinterpret_cast<float *>(p.counters) + letters + number * (V_HEAD_DIM + 2);
}

// The first element of a lane's j-th pair of a query.
__device__ __forceinline__ int element_of_lane(int lane, int j) { return min(2 * (lane + 32 * j), V_HEAD_DIM - 2); }

__device__ __forceinline__ float nonzero(float x) { return x == 0.0f ? -0.0f : x; }
__device__ __forceinline__ bool has_come(float2 x) { return __float_as_uint(x.x) != 0 && __float_as_uint(x.y) != 0; }

__device__ __forceinline__ void send_letter(const Pair (&result)[LANE_PAIRS], float *letter, int lane) {
#pragma unroll
  for (int j = 0; j < LANE_PAIRS; ++j)
    if (lane + 32 * j < V_HEAD_DIM / 2)
      send(letter + element_of_lane(lane, j), nonzero(result[j].x), nonzero(result[j].y));
  if (lane == 0) send(letter + V_HEAD_DIM, nonzero(result[0].top), nonzero(result[0].sum));
}

// Add letters to a query's result, in order, and wait for each. The unit begins in block `first`. The letters come from
// the last blocks of the first `bundles` bundles, then from the blocks before `first + index` that are in no such
// bundle.
//
// A block waits for blocks of lower index only. Devices start blocks in the order of their indices, so the sender runs
// or has run. CUDA does not promise that order; the kernel relies on it.
__device__ __forceinline__ void receive_letters(Pair (&result)[LANE_PAIRS], int first, int index, int bundles,
                                                int query, const Params &p, int kv_head, int lane) {
  constexpr int AT_A_TIME = 8, MAX_POLLS = 1 << 24;  // more than ten seconds: the work list is another plan's
  const int member = index / MERGE_BUNDLE * MERGE_BUNDLE, count = bundles + index - member;
#pragma unroll 1
  for (int from = 0; from < count; from += AT_A_TIME) {
    float *letters[AT_A_TIME];
    float2 stats[AT_A_TIME], values[AT_A_TIME][LANE_PAIRS];
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      const int at = min(from + i, count - 1);  // behind the last one it is read again: cheaper than a branch per load
      const int sender = at < bundles ? (at + 1) * MERGE_BUNDLE - 1 : member + at - bundles;
      letters[i] = letter_of(first + sender, query, p, kv_head);
    }
    bool missing;
    int polls = 0;
    do {
      if (++polls == MAX_POLLS) give_up();
      missing = false;
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        stats[i] = receive(letters[i] + V_HEAD_DIM);
#pragma unroll
        for (int j = 0; j < LANE_PAIRS; ++j) values[i][j] = receive(letters[i] + element_of_lane(lane, j));
      }
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        missing |= !has_come(stats[i]);
#pragma unroll
        for (int j = 0; j < LANE_PAIRS; ++j) missing |= !has_come(values[i][j]);
      }
    } while (__any_sync(0xffffffffu, missing));
    float top = result[0].top;
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) top = fmaxf(top, stats[i].x);
    const float rescale = power2(result[0].top - finite(top));
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j)
      result[j] = {result[j].x * rescale, result[j].y * rescale, top, result[j].sum * rescale};
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      if (from + i >= count) continue;
      const float weight = power2(stats[i].x - finite(top));
#pragma unroll
      for (int j = 0; j < LANE_PAIRS; ++j) {
        result[j].x += weight * values[i][j].x;
        result[j].y += weight * values[i][j].y;
        result[j].sum += weight * stats[i].y;
        if (lane + 32 * j < V_HEAD_DIM / 2) send(letters[i] + element_of_lane(lane, j), 0.0f, 0.0f);
      }
      if (lane == 0) send(letters[i] + V_HEAD_DIM, 0.0f, 0.0f);
    }
  }
}

// Merge what the warps of this block share.
//
// shared          [0]: the unit of the block's first segment, where its warp has other segments too;
//                 [1 + warp]: the unit of each warp's last, or only, segment
// firsts, lasts   the partial result of a warp's first segment, and of its last or only one
//
// A warp merges one query at a time, LANE_PAIRS pairs per lane. Warps begin with the units that stand last in the
// block: of these one may go on in the next block, where another block waits for its letter. The unit that ends here
// and began in an earlier block, whose letters this block waits for, comes last.
template <typename Firsts, typename Lasts>
__device__ __forceinline__ void merge_streams(const SharedUnit *shared, Firsts firsts, Lasts lasts, int block,
                                              const Params &p, int kv_head) {
  // Each lane looks at one entry of `shared`. A unit stands in the entries of several warps, `from` to `to` of this
  // block; the first of these leads. In the last warp the unit's segment is that warp's first one, if the warp has
  // more.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const SharedUnit mine = shared[min(lane, WARPS)];
  const int from = max(lane - 1, 0), first_part = block * WARPS + from - mine.split;
  const int last_part = first_part + mine.num_splits - 1, first_block = first_part / WARPS;
  const int to = lane == 0 ? 0 : min(last_part - block * WARPS, WARPS - 1);
  const bool goes_on = last_part / WARPS > block;
  const bool leads = lane <= WARPS && mine.num_splits > 0 && (lane <= 1 || mine.split == 0);
  const bool ends_first = lane == 0 || (leads && to > from && shared[1 + to].segments > 1);
  const u32 leaders = __ballot_sync(0xffffffffu, leads);
#pragma unroll 1
  for (int item = WARPS - 1 - warp; item < __popc(leaders) * NUM_QUERIES; item += WARPS) {
    u32 left = leaders;
    for (int i = 0; i < item / NUM_QUERIES; ++i) left ^= 1u << (31 - __clz(left));
    const int leader = 31 - __clz(left), query = item % NUM_QUERIES;
    const int begin = __shfl_sync(0xffffffffu, from, leader), end = __shfl_sync(0xffffffffu, to, leader);
    const float *at_end = __shfl_sync(0xffffffffu, (int)ends_first, leader) ? firsts(end) : lasts(end);
    // The warps' partial results of the unit. Lane i reads that of warp i, and so do lanes i + WARPS, i + 2 WARPS, ...
    // For warps without a segment of the unit another one is read, and counts nothing.
    const auto left_by = [&](int other) { return other < end ? lasts(max(other, begin)) : at_end; };
    const float2 stats = *reinterpret_cast<const float2 *>(left_by(lane % WARPS) + NUM_QUERIES * OUT_PITCH + 2 * query);
    float top = stats.x;
#pragma unroll
    for (int other = 1; other < WARPS; other *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, other));
    const bool exists = lane % WARPS >= begin && lane % WARPS <= end;
    const float my_weight = exists ? power2(stats.x - finite(top)) : 0.0f;
    float sum = my_weight * stats.y;
#pragma unroll
    for (int other = 1; other < WARPS; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    Pair result[LANE_PAIRS];
#pragma unroll
    for (int j = 0; j < LANE_PAIRS; ++j) result[j] = {0.0f, 0.0f, top, sum};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      const float weight = __shfl_sync(0xffffffffu, my_weight, i);
      const float *values = left_by(i) + query * OUT_PITCH;
      const bool counts = i >= begin && i <= end;  // a weight of 0 times an infinite sum is NaN
#pragma unroll
      for (int j = 0; j < LANE_PAIRS; ++j) {
        const float2 x = *reinterpret_cast<const float2 *>(values + element_of_lane(lane, j));
        result[j].x += weight * (counts ? x.x : 0.0f);
        result[j].y += weight * (counts ? x.y : 0.0f);
      }
    }
    const int first = __shfl_sync(0xffffffffu, first_block, leader), index = block - first;
    const bool is_sent = __shfl_sync(0xffffffffu, (int)goes_on, leader);
    if (!is_sent)
      receive_letters(result, first, index, index / MERGE_BUNDLE, query, p, kv_head, lane);
    else if (index % MERGE_BUNDLE == MERGE_BUNDLE - 1)
      receive_letters(result, first, index, 0, query, p, kv_head, lane);
    const int first_token = __shfl_sync(0xffffffffu, mine.first_token, leader);
    if (is_sent) {
      send_letter(result, letter_of(block, query, p, kv_head), lane);
    } else {
#pragma unroll
      for (int j = 0; j < LANE_PAIRS; ++j)
        if (lane + 32 * j < V_HEAD_DIM / 2)
          write_pair(result[j], query * (V_HEAD_DIM / 2) + lane + 32 * j, first_token, p, kv_head);
    }
  }
}
#endif

#if CLUSTER > 1
// What the blocks of a cluster send each other, per segment: pairs [2][CLUSTER][SLICE], to the block whose slice they
// are in, and statistics [2][CLUSTER][NUM_QUERIES], to every block. There are two of each, for even and odd segments: a
// block may be one segment ahead of the others, and no more, since it needs their results of a segment before it leaves
// that.
//
// A barrier in shared memory counts the bytes that have come, so no fence is needed.
struct InputRing {
  float2 *pairs, *stats;
  i64 *bytes;  // [2] barriers
  int segment;

  __device__ __forceinline__ void open(void *at) {
    pairs = static_cast<float2 *>(at);
    stats = pairs + 2 * CLUSTER * SLICE;
    bytes = reinterpret_cast<i64 *>(stats + 2 * CLUSTER * NUM_QUERIES);
    segment = 0;
    if (threadIdx.x == 0) {
      init_barrier(bytes);
      init_barrier(bytes + 1);
      publish_barriers();
    }
  }
  __device__ __forceinline__ void expect(int count) const {
    if (threadIdx.x == 0) expect_bytes(bytes + segment % 2, CLUSTER * (count + NUM_QUERIES) * (int)sizeof(float2));
  }
  __device__ __forceinline__ void send(Pair r, int pair, int rank) const {
    const int source = segment % 2 * CLUSTER + rank, block = element_of(pair) / 2;
    const u32 barrier = shared_address(bytes + segment % 2);
    store_remote(shared_address(pairs + source * SLICE + pair % SLICE), barrier, pair / SLICE, r.x, r.y);
    if (block < CLUSTER)
      store_remote(shared_address(stats + source * NUM_QUERIES + query_of(pair)), barrier, block, r.top, r.sum);
  }
  __device__ __forceinline__ void wait() const { wait_for_bytes(bytes + segment % 2, segment / 2 % 2); }
  __device__ __forceinline__ Pair merge(int pair) const {
    const float2 *of_pair = pairs + segment % 2 * CLUSTER * SLICE + pair % SLICE;
    const float2 *of_query = stats + segment % 2 * CLUSTER * NUM_QUERIES + query_of(pair);
    return merge_shared<CLUSTER>([&](int i) { return of_pair[i * SLICE]; },
                                 [&](int i) { return of_query[i * NUM_QUERIES]; });
  }
};
#endif
