// Sampling: block-wide reductions, prefix sums, the best token, and searches for thresholds.
//
// Sums have a fixed order: within threads, then within warps, then over the warps.

#include "primitives.cuh"

typedef unsigned long long u64;

#define THREADS (32 * WARPS)
#define MAX_GROUPS 4096                   // maximum groups per row
#define QUADS (MAX_GROUPS / 4 / THREADS)  // quads of adjacent groups per thread
#define WORDS_OF_GROUP (GROUP / 32)
#define AT_ONCE 4                         // concurrent reads per thread
#define BINS 256                          // bins of a histogram
#define NOWHERE (1 << 30)                 // larger than every token id
#define NO_TOKEN (-1)
#define LARGEST 3.4028234663852886e38f    // largest finite float
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

// Exchange between warps. The two halves alternate, so that each exchange needs one barrier.
struct Meeting { float sums[2][8][WARPS]; };
struct Team {
  Meeting &meeting;
  int thread, lane, warp, turn;
};
__device__ __forceinline__ Team team_at(Meeting &meeting) {
  return {meeting, (int)threadIdx.x, (int)threadIdx.x % 32, (int)threadIdx.x / 32, 0};
}

// Numbers

// Map a float to an integer that orders like it; both zeros have the same key.
__device__ __forceinline__ u32 key_of(float x) {
  u32 bits = x == 0.0f ? 0u : __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 key) {
  return __int_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
// exp((x - best) / heat): unnormalized probabilities. The best is 1, even if its logit is infinite.
__device__ __forceinline__ float weight(float x, float best, float rate) {
  float w = power2(x >= best ? 0.0f : (x - best) * rate);
  return x > NEG_INF ? w : 0.0f;
}

// Block-wide reductions

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
// Sums over all threads and, with EXTREMES, the largest and the least key.
template <int N, bool EXTREMES>
__device__ __forceinline__ void reduce_all(Team &t, float (&x)[N], u32 &largest, u32 &least) {
  float(&sums)[8][WARPS] = t.meeting.sums[t.turn];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x[n] = warp_sum(x[n]);
    if (t.lane == 0) sums[n][t.warp] = x[n];
  }
  if (EXTREMES) {
    largest = __reduce_max_sync(0xffffffffu, largest);
    least = __reduce_min_sync(0xffffffffu, least);
    if (t.lane == 0) {
      sums[N][t.warp] = __int_as_float(largest);
      sums[N + 1][t.warp] = __int_as_float(least);
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x[n] = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) x[n] += sums[n][w];
  }
  if (EXTREMES) {
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      largest = max(largest, __float_as_uint(sums[N][w]));
      least = min(least, __float_as_uint(sums[N + 1][w]));
    }
  }
  t.turn ^= 1;
}
template <int N> __device__ __forceinline__ void sum_all(Team &t, float (&x)[N]) {
  u32 largest = 0, least = 0;
  reduce_all<N, false>(t, x, largest, least);
}
__device__ __forceinline__ void extremes_all(Team &t, u32 &largest, u32 &least) {
  float none[1] = {0.0f};
  reduce_all<1, true>(t, none, largest, least);
}
// The sum over the threads before this one; `total`: over all threads.
__device__ __forceinline__ int before(Team &t, int mine, int &total) {
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (t.lane >= step) sum += other;
  }
  if (t.lane == 31) t.meeting.sums[t.turn][0][t.warp] = __int_as_float(sum);
  __syncthreads();
  int first = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    int of_warp = (int)__float_as_uint(t.meeting.sums[t.turn][0][w]);
    if (w < t.warp) first += of_warp;
    total += of_warp;
  }
  t.turn ^= 1;
  return first + sum - mine;
}

// A candidate token, its score and its logit. The lower token wins ties.
struct Found {
  float score;
  int token;
  float logit;
};
__device__ __forceinline__ void take(Found &mine, const Found &other) {
  if (other.score > mine.score || (other.score == mine.score && other.token < mine.token)) mine = other;
}
__device__ __forceinline__ void offer(Found &mine, float score, int token, float logit) {
  take(mine, Found{score, token, logit});
}
__device__ __forceinline__ void best_of_warp(Found &mine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    take(mine, Found{__shfl_xor_sync(0xffffffffu, mine.score, step), __shfl_xor_sync(0xffffffffu, mine.token, step),
                     __shfl_xor_sync(0xffffffffu, mine.logit, step)});
}
__device__ __forceinline__ void best_of_all(Team &t, Found &mine) {
  best_of_warp(mine);
  if (t.lane == 0) {
    t.meeting.sums[t.turn][0][t.warp] = mine.score;
    t.meeting.sums[t.turn][1][t.warp] = __int_as_float(mine.token);
    t.meeting.sums[t.turn][2][t.warp] = mine.logit;
  }
  __syncthreads();
  for (int w = 0; w < WARPS; ++w)
    offer(mine, t.meeting.sums[t.turn][0][w], (int)__float_as_uint(t.meeting.sums[t.turn][1][w]),
          t.meeting.sums[t.turn][2][w]);
  t.turn ^= 1;
}

// Narrow keys [low, high): the amounts of keys at and above `low` reach `need`, and the amounts at and above `high` do
// not. The arguments must satisfy this. The search divides the range by five until it has at most `until` keys; with 1,
// the result is the largest such key.
//
// Each step also moves the bounds to existing keys: sums do not change between two keys. Sums in a fixed order are
// monotone, so the result is exact.
template <int N>
__device__ __forceinline__ void largest_reaching(Team &t, const u32 (&keys)[N], const float (&amounts)[N], float need,
                                                 u32 &low, u32 &high, u32 until) {
  while (high - low > until) {
    const u32 fifth = (high - low) / 5 + 1, last = high - 1;
    const u32 at[4] = {low + fifth, min(low + 2 * fifth, last), min(low + 3 * fifth, last), min(low + 4 * fifth, last)};
    float sums[4] = {};
    u32 largest = 0, least = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (keys[i] >= at[n]) sums[n] += amounts[i];
      if (keys[i] >= low && keys[i] <= last) {
        largest = max(largest, keys[i]);
        least = min(least, keys[i]);
      }
    }
    reduce_all<4, true>(t, sums, largest, least);
    u32 reached = low, missed = high;
#pragma unroll
    for (int n = 3; n >= 0; --n)
      if (sums[n] < need) missed = at[n];
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (at[n] < missed) reached = at[n];
    low = max(reached, min(least, missed - 1));
    high = min(missed, max(largest + 1, low + 1));
  }
}
