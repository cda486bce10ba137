// Symmetric buffers. Every rank has a buffer of the same size on its GPU. The other ranks of the host write into it, and
// its own GPU polls it.
//
// 1. A buffer has two halves, which calls use in turn. A half has a region for each sender. A rank stores units of 16
//    bytes in the buffers of the other ranks, and then polls its own. No flags are needed: all words of a buffer are
//    NOT_ARRIVED except those that have arrived. A rank never sends this word. As a float, or as two 16-bit floats, it
//    is a NaN, and the sender replaces it with a different NaN.
// 2. The thread that reads a word resets it to NOT_ARRIVED, so the sizes of calls may differ.
//
// Two halves need no barrier. Assume that rank A stores words of call n + 2 in rank B's buffer. A has finished
// call n + 1, so it has received words of B's call n + 1, and B has started that call. A kernel stores only after the
// earlier kernels of its stream have finished, so B has finished call n. B has thus read and reset the words of call n,
// which were in the same half. A cannot be further ahead, because it starts call n + 3 only after it has received B's
// words of call n + 2.
//
// A rank that has waited for `limit_ms` stores the number of a missing rank in `fault`. The host may report the missing
// rank earlier, in its own memory, because the driver may wait for this kernel before it copies anything. While `fault`
// is set, calls do not wait, and words that have not arrived are read as NaN. The buffers of all ranks must then be
// reset.
//
// Compile-time macros: RANKS, WARPS, PARAMS_BYTES, Q_BF16 (else float16)

#include "primitives.cuh"
#include "peers.cuh"

#define THREADS (32 * WARPS)
#define OTHER_NANS 0x7fff7fffu  // sent instead of NOT_ARRIVED
#define POLLS_PER_CHECK 64
#define POLLS_PER_HOST_CHECK 4096  // a few milliseconds; a load from host memory takes longer than a poll

// In this GPU's memory. The last block to load `calls` counts the call.
struct State {
  u32 calls;
  int blocks_started;
  int fault;  // 0, or 1 + a rank whose words have not arrived in time
  int limit_ms;
  const int *named_by_host;  // pinned host memory; like `fault`
};
// The first parameters of every kernel.
struct Exchange {
  int4 *buffers[RANKS];  // of all ranks: [2, RANKS, capacity]
  State *state;
  int capacity;  // units of a sender in half a buffer
  int units;     // that this rank sends
  int rank, mode;
};

struct Unit { u32 words[4]; };
__device__ __forceinline__ Unit as_unit(int4 x) { return {(u32)x.x, (u32)x.y, (u32)x.z, (u32)x.w}; }
__device__ __forceinline__ Unit load_unit(const void *at, i64 index) {
  return as_unit(static_cast<const int4 *>(at)[index]);
}
__device__ __forceinline__ int4 as_int4(const Unit &x) {
  return make_int4((int)x.words[0], (int)x.words[1], (int)x.words[2], (int)x.words[3]);
}
__device__ __forceinline__ void store_unit(void *at, i64 index, const Unit &x) {
  static_cast<int4 *>(at)[index] = as_int4(x);
}
__device__ __forceinline__ Unit sendable(Unit x) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (x.words[i] == NOT_ARRIVED) x.words[i] = OTHER_NANS;
  return x;
}
__device__ __forceinline__ bool has_arrived(const Unit &x) {
  return x.words[0] != NOT_ARRIVED && x.words[1] != NOT_ARRIVED && x.words[2] != NOT_ARRIVED &&
         x.words[3] != NOT_ARRIVED;
}
__device__ __forceinline__ float low(u32 pair) { return from_query((u16)pair); }
__device__ __forceinline__ float high(u32 pair) { return from_query((u16)(pair >> 16)); }

// If `live`, receive a unit of each rank from buffer[rank * p.capacity], and reset these words. `own` is this rank's
// unit.
__device__ __forceinline__ void receive(const Exchange &p, bool live, Unit (&units)[RANKS], const Unit &own,
                                        int4 *buffer, bool &failed) {
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
    units[r] = r == p.rank ? own : Unit{NOT_ARRIVED, NOT_ARRIVED, NOT_ARRIVED, NOT_ARRIVED};
  if (live) {
    const i64 start = global_time();
    for (int polls = 1;; ++polls) {
#pragma unroll
      for (int r = 0; r < RANKS; ++r)
        if (!has_arrived(units[r])) units[r] = as_unit(load_arriving(buffer + (i64)r * p.capacity));
      int missing = -1;
#pragma unroll
      for (int r = 0; r < RANKS; ++r)
        if (!has_arrived(units[r])) missing = r;
      if (missing < 0 || failed) break;
      if (polls % POLLS_PER_CHECK == 0) {
        failed = *const_cast<volatile int *>(&p.state->fault) != 0;
        if (!failed && global_time() - start > p.state->limit_ms * 1000000ll) p.state->fault = 1 + missing;
        if (!failed && polls % POLLS_PER_HOST_CHECK == 0)
          if (const int named = load_host(p.state->named_by_host)) p.state->fault = named;
      }
    }
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != p.rank) store_not_arrived(buffer + (i64)r * p.capacity);
  }
}
