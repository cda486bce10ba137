// Exchange query heads, and partial outputs of attention, between ranks that share the KV of each request.
//
//   GATHER  out = the query heads of all ranks; the heads of a KV head are adjacent
//   MERGE   out = the outputs of this rank's heads, merged from the partial outputs and log-sum-exps of all ranks
//
// A thread handles 16 bytes of a head. In MERGE it also sends the log-sum-exp of the head, so it needs no other thread.
// Merges are float32, in the order of ranks. symmetric_buffer.cuh describes the exchange.
//
#include "symmetric_buffer.cuh"

#define GATHER 0
#define MERGE 1

struct Params : Exchange {  // `units` counts those of the heads of one rank in all tokens
  const char *x;       // GATHER: [tokens, KV heads, heads, size]; MERGE: [tokens, KV heads, RANKS, heads, size]
  const float *lses;   // MERGE: [tokens, KV heads, RANKS, heads]
  const float *sinks;  // MERGE: [KV heads, heads]; or null
  char *out;           // GATHER: [tokens, KV heads, RANKS, heads, size]; MERGE: [tokens, KV heads, heads, size]
  float *lse;          // MERGE: [tokens, KV heads, heads]; or null
  int head_units, heads, num_kv_heads, stride_lse;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "exchange_native.py has the same fields");

extern "C" __global__ void __launch_bounds__(THREADS, 1) exchange_heads(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  const int at = blockIdx.x * THREADS + threadIdx.x;
  const bool live = at < p.units;
  const int row = at / p.head_units, unit = at % p.head_units;  // row: a head of a token
  const int group = row / p.heads, head = row % p.heads;        // group: a KV head of a token
  const auto row_of = [&](int rank) { return (i64)(group * RANKS + rank) * p.heads + head; };
  const int places = p.mode == MERGE ? 2 : 1;

  wait_for_earlier_kernels();
  const u32 calls = __ldcg(&p.state->calls);
  bool failed = __ldcg(&p.state->fault) != 0;

  // 1. Send to all other ranks.
  Unit own = {}, own_lse = {};
  const i64 half = (i64)(calls % 2) * RANKS * p.capacity + (i64)places * at;
  if (live) {
#pragma unroll
    for (int i = 0; i < RANKS; ++i) {  // ranks start with different receivers
      const int to = (p.rank + 1 + i) % RANKS;
      int4 *const place = p.buffers[to] + half + (i64)p.rank * p.capacity;
      own = sendable(load_unit(p.x, p.mode == MERGE ? row_of(to) * p.head_units + unit : at));
      if (p.mode == MERGE) own_lse = sendable({__float_as_uint(p.lses[row_of(to)]), 0, 0, 0});
      if (i == RANKS - 1) break;  // to itself
      store_peer(place, as_int4(own));
      if (p.mode == MERGE) store_peer(place + 1, as_int4(own_lse));
    }
  }
  let_next_kernel_start();
  __syncthreads();  // all threads of the block have loaded `calls`
  const int started = threadIdx.x == 0 ? atomicAdd(&p.state->blocks_started, 1) : -1;

  // 2. Receive from all ranks.
  Unit units[RANKS], lses[RANKS];
  int4 *const buffer = p.buffers[p.rank] + half;
  receive(p, live, units, own, buffer, failed);
  receive(p, live && p.mode == MERGE, lses, own_lse, buffer + 1, failed);
  if (started == (int)gridDim.x - 1) {
    p.state->blocks_started = 0;
    p.state->calls = calls + 1;
  }
  if (!live) return;
  if (p.mode == GATHER) {
#pragma unroll
    for (int r = 0; r < RANKS; ++r) store_unit(p.out, row_of(r) * p.head_units + unit, units[r]);
    return;
  }

  // 3. Merge. A rank that saw no key has log-sum-exp -inf and weight 0.
  float top = NEG_INF;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) top = fmaxf(top, __int_as_float(lses[r].words[0]));
  const int of_token = group % p.num_kv_heads * p.heads + head;
  const float sink = p.sinks ? p.sinks[of_token] : NEG_INF;
  top = fmaxf(top, sink);
  const float base = top == NEG_INF ? 0.0f : top;
  float total = __expf(sink - base);
  float sums[8] = {};
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
    const float weight = __expf(__int_as_float(lses[r].words[0]) - base);
    total += weight;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] += weight * low(units[r].words[i]);
      sums[2 * i + 1] += weight * high(units[r].words[i]);
    }
  }
  if (total == 0.0f) total = 1.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) own.words[i] = pack_output(sums[2 * i] / total, sums[2 * i + 1] / total);
  store_unit(p.out, at, own);
  if (p.lse && unit == 0) p.lse[(i64)(group / p.num_kv_heads) * p.stride_lse + of_token] = top + logf(total);
}
