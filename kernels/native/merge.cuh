// Merges of partial results into the output: within a block, within a cluster, and through global memory.
//
// The output of a query tile is NUM_QUERIES x V_HEAD_DIM elements, which threads process in adjacent pairs. A
// merge adds sums of weight x value, each scaled by 2^(its reference maximum - the common one), and the sums of weights
// in the same way. It always adds in the order of the KV splits, so the result does not depend on the order of arrival.
//
//                      one partition per warp      one partition per cluster (COOPERATIVE)
//   within a block     merge_streams, at the end   merge_warps, after each split
//   between blocks     send_partial (fix-up)       ClusterExchange: distributed shared memory
//   between clusters                               PartialIndices and counters: arrive_and_merge

#include "attend.cuh"

#define COOPERATIVE (CLUSTER > 1 || FIXED_SPLITS > 0)
#define THREADS (32 * WARPS)
#define Q_TILE_PAIRS (NUM_QUERIES * V_HEAD_DIM / 2)     // pairs of adjacent output elements
#define SLICE ((Q_TILE_PAIRS + CLUSTER - 1) / CLUSTER)  // pairs that each block of a cluster merges
#define KV_HEADS gridDim.x

static_assert((WARPS & (WARPS - 1)) == 0 && WARPS < 32, "each lane reads the partial result of one warp");

// A pair of undivided output elements, with the reference maximum and the sum of weights of its query.
struct Pair {
  float x, y, top, sum;
};

__device__ __forceinline__ int query_of(int pair) { return pair / (V_HEAD_DIM / 2); }
__device__ __forceinline__ int element_of(int pair) { return pair % (V_HEAD_DIM / 2) * 2; }

// The factor that converts a query's sum of weight x value to the output. Also writes the log-sum-exp. A sink is an
// extra logit without a value.
__device__ __forceinline__ float output_factor(float top, float sum, i64 token, int head, bool writes_lse,
                                               const Params &p, int kv_head) {
  float rescale = 1.0f;
  if (p.sinks) {
    float sink = p.sinks[head] * LOG2E, with_sink = fmaxf(top, sink);
    rescale = power2(top - finite(with_sink));
    sum = sum * rescale + power2(sink - finite(with_sink));
    top = with_sink;
  }
  float divisor = sum == 0.0f ? 1.0f : sum;  // a token that sees no key has output 0
  if (p.lse && writes_lse) p.lse[token * p.lse_token + head] = (top + log2f(divisor)) * LN2;
  return rescale * reciprocal(divisor) * (p.v_scale ? p.v_scale[kv_head * p.v_scale_head] : 1.0f);
}

__device__ __forceinline__ u32 *output_at(i64 token, int head, int d, const Params &p) {
  return reinterpret_cast<u32 *>(static_cast<u16 *>(p.out) + token * p.out_token + head * p.out_head + d);
}

__device__ __forceinline__ void write_pair(Pair r, int pair, int first_token, const Params &p, int kv_head) {
  int query = query_of(pair), d = element_of(pair), head = Q_HEAD_OF(kv_head, query);
  i64 token = first_token + TOKEN_OF(query);
  float factor = output_factor(r.top, r.sum, token, head, d == 0, p, kv_head);
  *output_at(token, head, d, p) = pack_output(r.x * factor, r.y * factor);
}

// Write the output of a query tile that only one warp processed, from registers. Call reduce_sums() first.
__device__ __forceinline__ void write_q_tile(const State &state, int first_token, const Params &p, int kv_head,
                                           int lane) {
#pragma unroll
  for (int n = 0; n < OCTETS; ++n) {
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int query = 8 * n + lane % 4 * 2 + j, head = Q_HEAD_OF(kv_head, query);
      factor[j] = output_factor(state.top[n][j], state.sum[n][j], first_token + TOKEN_OF(query), head,
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
        if (query < NUM_QUERIES) *output_at(first_token + TOKEN_OF(query), Q_HEAD_OF(kv_head, query), d, p) = pair;
      }
  }
}

// Sum COUNT partial results in shared memory, in order, for one pair. `values(i)` and `stats(i)` belong to the i-th
// result.
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
// Indices of the partial results of a query tile in global memory. attend.py uses the same numbering.
struct PartialIndices {
  int first, next, step;
  __device__ __forceinline__ int of(int index) const { return index == 0 ? first : next + index * step; }
  // Indices for the splits starting at `leader`, and for the first split of every merge group.
  __device__ __forceinline__ PartialIndices from(int leader) const { return {of(leader), next + leader * step, step}; }
  __device__ __forceinline__ PartialIndices leaders() const { return {first, next, step * MERGE_GROUP_SIZE}; }
};

// Indices for a query tile that begins in partition `first`.
__device__ __forceinline__ PartialIndices partial_indices_of(int first) { return {2 * first + 1, 2 * first, 2}; }

// Level 0 has the log-sum-exps of partial results, level 1 those of merged groups. The arrays are separate because
// other warps may still read the log-sum-exp of a group's first split.
__device__ __forceinline__ float *lse_of(int level, const Params &p) {
  return p.partial_lse + (i64)level * p.max_partials * KV_HEADS * PARTIAL_M;
}

// Store one pair of a partial result, divided by its sum of weights.
__device__ __forceinline__ void store_pair(Pair r, int pair, int first_pair, int level, i64 partial, const Params &p,
                                           int kv_head) {
  int query = query_of(pair), d = element_of(pair);
  i64 at = (partial * KV_HEADS + kv_head) * PARTIAL_M + query;
  float divisor = r.sum == 0.0f ? 1.0f : r.sum;
  // Two blocks of a cluster whose slices share a query write the same value.
  if (d == 0 || pair == first_pair) lse_of(level, p)[at] = r.top + log2f(divisor);
  float factor = reciprocal(divisor);
  *reinterpret_cast<float2 *>(p.partial_out + at * V_HEAD_DIM + d) = make_float2(r.x * factor, r.y * factor);
}

// Sum `count` partial results in global memory, in the order of the splits. The loads bypass L1, which is not coherent.
__device__ __forceinline__ Pair merge_partials(int pair, PartialIndices partials, int count, int level, const Params &p,
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
      i64 at = ((i64)partials.of(from + i) * KV_HEADS + kv_head) * PARTIAL_M + query;
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

// Count this block's partial results of a query tile, which are split `index` of `count`, as stored. The last block to
// arrive merges.
//
// Level 0: the last block of a merge group merges the group into the partial result of its first split. Level 1: the
// last block of the query tile merges the groups. A query tile with one group needs only level 0. Each block of a
// cluster does this for its own slice, with its own counters. The last block to arrive resets the counter to 0.
__device__ __forceinline__ void arrive_and_merge(int count, int index, PartialIndices partials, int first_token,
                                                 int first_pair, int end_pair, int rank, const Params &p, int kv_head) {
  __shared__ bool is_last;
  const int leader = index / MERGE_GROUP_SIZE * MERGE_GROUP_SIZE;
  const int groups = (count + MERGE_GROUP_SIZE - 1) / MERGE_GROUP_SIZE;
  for (int level = 0; level < 2; ++level) {
    const int expected = level == 0 ? min(count - leader, MERGE_GROUP_SIZE) : groups;
    __syncthreads();
    if (threadIdx.x == 0) {
      const int counter = level == 0 ? partials.of(leader) : p.max_partials + partials.first;
      int *at = p.counters + ((i64)counter * KV_HEADS + kv_head) * CLUSTER + rank;
      is_last = count_arrival(at) == expected - 1;
      if (is_last) *at = 0;
    }
    __syncthreads();
    if (!is_last) return;
    const bool continues = level == 0 && groups > 1;
    const PartialIndices from = level == 0 ? partials.from(leader) : partials.leaders();
    for (int pair = first_pair + threadIdx.x; pair < end_pair; pair += THREADS) {
      Pair r = merge_partials(pair, from, expected, level, p, kv_head);
      if (continues)
        store_pair(r, pair, first_pair, 1, from.first, p, kv_head);
      else
        write_pair(r, pair, first_token, p, kv_head);
    }
    if (!continues) return;
  }
}

// Sum the partial results of the warps of this block.
__device__ __forceinline__ Pair merge_warps(int pair, const float *results) {
  const int at = query_of(pair) * OUT_PITCH + element_of(pair), stats_at = NUM_QUERIES * OUT_PITCH + 2 * query_of(pair);
  const auto load = [&](int warp, int offset) {
    return *reinterpret_cast<const float2 *>(results + warp * PARTIAL_FLOATS + offset);
  };
  return merge_shared<WARPS>([&](int warp) { return load(warp, at); }, [&](int warp) { return load(warp, stats_at); });
}
#else
// A query tile that a warp shares with other warps: the index of the warp's split in it, and the warp's number of
// splits. num_splits is 0 if there is no such query tile.
struct SharedQTile {
  int first_token, num_splits, split_index, splits;
};

__device__ __forceinline__ SharedQTile shared_q_tile_of(const KVSplit &s, int splits) {
  return {s.first_token, s.num_splits > 1 ? s.num_splits : 0, s.split_index, splits};
}

#define LANE_PAIRS ((V_HEAD_DIM + 63) / 64)  // pairs of a query per lane

// Fix-up: a block sends its partial result of a query tile that continues in the next block. It has V_HEAD_DIM sums per
// query, the reference maximum and the sum of weights. The last block of a merge group sends the sum of its group.
//
// A word is 0 until it arrives, so the reader polls the values themselves, without a fence or a counter. The reader
// resets the words to 0 for the next call. A real zero is therefore sent as -0.0.
__device__ __forceinline__ float *fixup_partial(int block, int query, const Params &p, int kv_head) {
  const i64 partials = 2 * (i64)p.max_partials * KV_HEADS;
  const i64 number = ((i64)block * KV_HEADS + kv_head) * NUM_QUERIES + query;
  return reinterpret_cast<float *>(p.counters) + partials + number * (V_HEAD_DIM + 2);
}

// The first element of a lane's j-th pair in a query.
__device__ __forceinline__ int element_of_lane(int lane, int j) { return min(2 * (lane + 32 * j), V_HEAD_DIM - 2); }

__device__ __forceinline__ float nonzero(float x) { return x == 0.0f ? -0.0f : x; }
__device__ __forceinline__ bool has_arrived(float2 x) { return __float_as_uint(x.x) != 0 && __float_as_uint(x.y) != 0; }

__device__ __forceinline__ void send_partial(const Pair (&result)[LANE_PAIRS], float *partial, int lane) {
#pragma unroll
  for (int j = 0; j < LANE_PAIRS; ++j)
    if (lane + 32 * j < V_HEAD_DIM / 2)
      send(partial + element_of_lane(lane, j), nonzero(result[j].x), nonzero(result[j].y));
  if (lane == 0) send(partial + V_HEAD_DIM, nonzero(result[0].top), nonzero(result[0].sum));
}

// Wait for partial results of other blocks and add them to a query's result, in order. The query tile begins in block
// `first`. The senders are the last blocks of the first `groups` merge groups, then the blocks before `first + index`
// that are in none of these groups.
//
// A block waits only for blocks of lower index. Devices start blocks in index order, so the sender is running
// or has finished. CUDA does not guarantee this order, but the kernel relies on it.
__device__ __forceinline__ void receive_partials(Pair (&result)[LANE_PAIRS], int first, int index, int groups,
                                                int query, const Params &p, int kv_head, int lane) {
  // Reaching the limit takes more than ten seconds. A work list from a different plan causes this.
  constexpr int AT_A_TIME = 8, MAX_POLLS = 1 << 24;
  const int member = index / MERGE_GROUP_SIZE * MERGE_GROUP_SIZE, count = groups + index - member;
#pragma unroll 1
  for (int from = 0; from < count; from += AT_A_TIME) {
    float *partials[AT_A_TIME];
    float2 stats[AT_A_TIME], values[AT_A_TIME][LANE_PAIRS];
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      const int at = min(from + i, count - 1);  // rereading the last one is cheaper than a branch per load
      const int sender = at < groups ? (at + 1) * MERGE_GROUP_SIZE - 1 : member + at - groups;
      partials[i] = fixup_partial(first + sender, query, p, kv_head);
    }
    bool missing;
    int polls = 0;
    do {
      if (++polls == MAX_POLLS) abort_kernel();
      missing = false;
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        stats[i] = receive(partials[i] + V_HEAD_DIM);
#pragma unroll
        for (int j = 0; j < LANE_PAIRS; ++j) values[i][j] = receive(partials[i] + element_of_lane(lane, j));
      }
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        missing |= !has_arrived(stats[i]);
#pragma unroll
        for (int j = 0; j < LANE_PAIRS; ++j) missing |= !has_arrived(values[i][j]);
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
        if (lane + 32 * j < V_HEAD_DIM / 2) send(partials[i] + element_of_lane(lane, j), 0.0f, 0.0f);
      }
      if (lane == 0) send(partials[i] + V_HEAD_DIM, 0.0f, 0.0f);
    }
  }
}

// Merge the query tiles that the warps of this block share.
//
// shared          [0]: the query tile of the block's first split, if that split's warp also has other splits;
//                 [1 + warp]: the query tile of each warp's last or only split
// firsts, lasts   the partial results of each warp's first split, and of its last or only split
//
// A warp merges one query at a time, LANE_PAIRS pairs per lane. Warps process the query tiles of a block from the last
// to the first. The last one may continue in the next block, where another block waits for its partial result. A query
// tile that began in an earlier block needs partial results of that block, so it comes last.
template <typename Firsts, typename Lasts>
__device__ __forceinline__ void merge_streams(const SharedQTile *shared, Firsts firsts, Lasts lasts, int block,
                                              const Params &p, int kv_head) {
  // Each lane reads one entry of `shared`. A query tile is in the entries of several warps, `from` to `to` of this
  // block; the first of these entries leads. In warp `to`, the query tile's split is the warp's first one if that
  // warp also has other splits.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const SharedQTile mine = shared[min(lane, WARPS)];
  const int from = max(lane - 1, 0), first_partition = block * WARPS + from - mine.split_index;
  const int last_partition = first_partition + mine.num_splits - 1, first_block = first_partition / WARPS;
  const int to = lane == 0 ? 0 : min(last_partition - block * WARPS, WARPS - 1);
  const bool continues = last_partition / WARPS > block;
  const bool leads = lane <= WARPS && mine.num_splits > 0 && (lane <= 1 || mine.split_index == 0);
  const bool ends_first = lane == 0 || (leads && to > from && shared[1 + to].splits > 1);
  const u32 leaders = __ballot_sync(0xffffffffu, leads);
#pragma unroll 1
  for (int item = WARPS - 1 - warp; item < __popc(leaders) * NUM_QUERIES; item += WARPS) {
    u32 left = leaders;
    for (int i = 0; i < item / NUM_QUERIES; ++i) left ^= 1u << (31 - __clz(left));
    const int leader = 31 - __clz(left), query = item % NUM_QUERIES;
    const int begin = __shfl_sync(0xffffffffu, from, leader), end = __shfl_sync(0xffffffffu, to, leader);
    const float *at_end = __shfl_sync(0xffffffffu, (int)ends_first, leader) ? firsts(end) : lasts(end);
    // The warps' partial results of the query tile. Lane i reads that of warp i, as do lanes i + WARPS, i + 2 WARPS,
    // ... For warps without a split of the query tile, another partial result is read and ignored.
    const auto partial_of_warp = [&](int other) { return other < end ? lasts(max(other, begin)) : at_end; };
    const float *my_partial = partial_of_warp(lane % WARPS);
    const float2 stats = *reinterpret_cast<const float2 *>(my_partial + NUM_QUERIES * OUT_PITCH + 2 * query);
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
      const float *values = partial_of_warp(i) + query * OUT_PITCH;
      const bool counts = i >= begin && i <= end;  // a weight of 0 times an infinite sum is NaN
#pragma unroll
      for (int j = 0; j < LANE_PAIRS; ++j) {
        const float2 x = *reinterpret_cast<const float2 *>(values + element_of_lane(lane, j));
        result[j].x += weight * (counts ? x.x : 0.0f);
        result[j].y += weight * (counts ? x.y : 0.0f);
      }
    }
    const int first = __shfl_sync(0xffffffffu, first_block, leader), index = block - first;
    const bool is_sent = __shfl_sync(0xffffffffu, (int)continues, leader);
    if (!is_sent)
      receive_partials(result, first, index, index / MERGE_GROUP_SIZE, query, p, kv_head, lane);
    else if (index % MERGE_GROUP_SIZE == MERGE_GROUP_SIZE - 1)
      receive_partials(result, first, index, 0, query, p, kv_head, lane);
    const int first_token = __shfl_sync(0xffffffffu, mine.first_token, leader);
    if (is_sent) {
      send_partial(result, fixup_partial(block, query, p, kv_head), lane);
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
// The exchange between the blocks of a cluster after each split. Pairs [2][CLUSTER][SLICE] go to the block that owns
// their slice. Statistics [2][CLUSTER][NUM_QUERIES] go to every block. There are two buffers, for even and odd
// rounds: a block can be at most one round ahead, since it needs the results of all blocks to finish a round.
//
// A barrier in shared memory counts the bytes that arrive, so no fence is needed.
struct ClusterExchange {
  float2 *pairs, *stats;
  i64 *bytes;  // [2] barriers
  int round;

  __device__ __forceinline__ void open(void *at) {
    pairs = static_cast<float2 *>(at);
    stats = pairs + 2 * CLUSTER * SLICE;
    bytes = reinterpret_cast<i64 *>(stats + 2 * CLUSTER * NUM_QUERIES);
    round = 0;
    if (threadIdx.x == 0) {
      init_barrier(bytes);
      init_barrier(bytes + 1);
      fence_barrier_init();
    }
  }
  __device__ __forceinline__ void expect(int count) const {
    if (threadIdx.x == 0) expect_bytes(bytes + round % 2, CLUSTER * (count + NUM_QUERIES) * (int)sizeof(float2));
  }
  __device__ __forceinline__ void send(Pair r, int pair, int rank) const {
    const int source = round % 2 * CLUSTER + rank, block = element_of(pair) / 2;
    const u32 barrier = shared_address(bytes + round % 2);
    store_remote(shared_address(pairs + source * SLICE + pair % SLICE), barrier, pair / SLICE, r.x, r.y);
    if (block < CLUSTER)
      store_remote(shared_address(stats + source * NUM_QUERIES + query_of(pair)), barrier, block, r.top, r.sum);
  }
  __device__ __forceinline__ void wait() const { wait_for_bytes(bytes + round % 2, round / 2 % 2); }
  __device__ __forceinline__ Pair merge(int pair) const {
    const float2 *of_pair = pairs + round % 2 * CLUSTER * SLICE + pair % SLICE;
    const float2 *of_query = stats + round % 2 * CLUSTER * NUM_QUERIES + query_of(pair);
    return merge_shared<CLUSTER>([&](int i) { return of_pair[i * SLICE]; },
                                 [&](int i) { return of_query[i * NUM_QUERIES]; });
  }
};
#endif
