// Exchange a few tokens between the GPUs of one host, each of which runs one rank:
//
//   SUM     out = sum of x over ranks
//   NORM    residual += sum of x over ranks, plus bias; out = RMSNorm of the residual
//   GATHER  out[rank] = records of 8 bytes of each rank
//
// symmetric_buffer.cuh describes the exchange. GATHER sends 16 bits per word. Sums are float32, in the order of ranks.
// All ranks get the same bits, for any number of tokens.
//
#include "symmetric_buffer.cuh"

#define SUM 0
#define NORM 1
#define GATHER 2

struct Params : Exchange {  // a unit is 8 values, or a record
  const char *x;    // [tokens, width]; GATHER: [records, 2] words
  const u16 *bias;  // NORM: [width]; or null
  u16 *residual;    // NORM: [tokens, width]
  const u16 *gain;  // NORM: [width]
  char *out;        // [tokens, width]; GATHER: [RANKS, records, 2] words
  int block_units;  // a block has a token, or THREADS records
  float inverse_width, eps;
};
static_assert(sizeof(Params) == PARAMS_BYTES, "all_reduce.py has the same fields");

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  float *const squares_of_warps = reinterpret_cast<float *>(memory);  // [WARPS]
  const int thread = threadIdx.x, token = blockIdx.x;
  const int at = token * p.block_units + thread;
  const bool live = thread < p.block_units && at < p.units;

  wait_for_earlier_kernels();
  const u32 calls = __ldcg(&p.state->calls);
  bool failed = __ldcg(&p.state->fault) != 0;

  // 1. Send the thread's unit to all other ranks.
  Unit own = {}, residual = {}, gain = {}, bias = {};
  int4 *buffer = nullptr;
  if (live) {
    if (p.mode == GATHER) {
      const u32 *record = reinterpret_cast<const u32 *>(p.x) + 2 * at;
      own = {record[0] & 0xffff, record[0] >> 16, record[1] & 0xffff, record[1] >> 16};
    } else {
      own = load_unit(p.x, at);
    }
    if (p.mode == NORM) {
      residual = load_unit(p.residual, at);
      gain = load_unit(p.gain, thread);
      if (p.bias) bias = load_unit(p.bias, thread);
    }
    own = sendable(own);
    const i64 half = (i64)(calls % 2) * RANKS * p.capacity + at;
    buffer = p.buffers[p.rank] + half;
#pragma unroll
    for (int i = 1; i < RANKS; ++i)  // ranks start with different receivers
      store_peer(p.buffers[(p.rank + i) % RANKS] + half + (i64)p.rank * p.capacity, as_int4(own));
  }
  let_next_kernel_start();
  __syncthreads();  // all threads of the block have loaded `calls`
  const int started = thread == 0 ? atomicAdd(&p.state->blocks_started, 1) : -1;  // used after receive()

  // 2. Receive the unit of every rank.
  Unit units[RANKS];
  receive(p, live, units, own, buffer, failed);
  if (started == (int)gridDim.x - 1) {
    p.state->blocks_started = 0;
    p.state->calls = calls + 1;
  }

  // 3. Add them, and the residual.
  float x[8] = {};
  float square = 0.0f;
  if (live && p.mode != GATHER) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sums[2] = {low(units[0].words[i]), high(units[0].words[i])};
#pragma unroll
      for (int r = 1; r < RANKS; ++r) {
        sums[0] += low(units[r].words[i]);
        sums[1] += high(units[r].words[i]);
      }
      u32 pair = pack_output(sums[0], sums[1]);
      if (p.mode == NORM) {
        if (p.bias) pair = pack_output(low(pair) + low(bias.words[i]), high(pair) + high(bias.words[i]));
        pair = pack_output(low(residual.words[i]) + low(pair), high(residual.words[i]) + high(pair));
      }
      own.words[i] = pair;
      x[2 * i] = low(pair);
      x[2 * i + 1] = high(pair);
      square += x[2 * i] * x[2 * i];
      square += x[2 * i + 1] * x[2 * i + 1];
    }
    if (p.mode == NORM) store_unit(p.residual, at, own);
  }

  // 4. Add the squares of the block's token.
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) square += __shfl_xor_sync(0xffffffffu, square, lanes);
  if (thread % 32 == 0) squares_of_warps[thread / 32] = square;
  __syncthreads();
  if (!live) return;
  if (p.mode == GATHER) {
    u32 *const out = reinterpret_cast<u32 *>(p.out);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      out[2 * (r * p.units + at)] = units[r].words[0] | units[r].words[1] << 16;
      out[2 * (r * p.units + at) + 1] = units[r].words[2] | units[r].words[3] << 16;
    }
    return;
  }
  if (p.mode == NORM) {
    float squares = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) squares += squares_of_warps[warp];
    const float scale = rsqrtf(squares * p.inverse_width + p.eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 pair = pack_output(x[2 * i] * scale, x[2 * i + 1] * scale);
      own.words[i] = pack_output(low(pair) * low(gain.words[i]), high(pair) * high(gain.words[i]));
    }
  }
  store_unit(p.out, at, own);
}
