// Emulate the instructions of kernels/native/warpgroups.cuh on a CPU, so that the source of the kernel runs as C++.
//
// A CUDA thread is a context that runs until it must wait for other threads. Where the hardware leaves behaviour open,
// the emulation takes the worst case: shared memory is NaN at first; a copy poisons its destination and arrives late,
// in any order; a wgmma is computed when it starts or when a thread waits for it, and until then its registers are NaN;
// and some warps are slow. Blocks are independent, so they run one after another.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace {  // the file that includes the kernel's source closes it

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define NEG_INF (-INFINITY)

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct int4 { int x, y, z, w; };
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// Contexts

constexpr int STACK_BYTES = 256 << 10, THREADS = 384, GUARD_BYTES = 4096;  // after SHARED_BYTES

struct Copy { u32 to; const char *from; int bytes; };
// a is null if the left operand is in shared memory.
struct Wgmma { float *d; const u32 *a[4]; i64 left, right; int n, at; bool adds, done; };
struct Warp { long arrived = 0; unsigned char brought[2][32][32]; };
struct Thread {
  int x;
  std::unique_ptr<char[]> stack;
  ucontext_t begin;
  jmp_buf at;  // where it resumes, once `runs` is set
  bool runs = false, done = false;
  long collectives = 0;
  std::vector<Copy> copies;
  std::vector<std::vector<Wgmma>> groups = std::vector<std::vector<Wgmma>>(1);  // the last one is open
  std::map<float *, std::vector<float>> registers;  // of wgmma in flight
};
struct alignas(64) TensorMap { const char *base; i64 extents[4], steps[3]; int box_rows; };
static_assert(sizeof(TensorMap) == 128, "as large as the driver's");
struct Box { u32 to; const TensorMap *map; i64 *barrier; int at[4]; };
struct NamedBarrier { int arrived = 0; long count = 0; };
struct alignas(1024) Line { char bytes[1024]; };

std::vector<Line> shared;
char *memory;
Thread *current;
std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<Box> boxes;  // in flight
NamedBarrier named_barriers[16];
struct { int x, y; } blockIdx, gridDim;
#define threadIdx (*current)
jmp_buf scheduler;
std::minstd_rand chance;
long progress;  // counts actions; waiting and polling do not count
const char *fault;  // a detected fault, or null

inline void yield() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

template <typename T> struct Lanes {
  const unsigned char (*brought)[32];
  T operator[](int i) const { T r; memcpy(&r, brought[i], sizeof(T)); return r; }
};
// Exchange a value between the lanes of the warp in a collective.
template <typename T> inline Lanes<T> exchange(T mine) {
  Warp &warp = warps[current->x / 32];
  const long number = ++current->collectives;
  memcpy(warp.brought[number % 2][current->x % 32], &mine, sizeof(T));
  ++warp.arrived;
  while (warp.arrived < 32 * number) yield();
  return {warp.brought[number % 2]};
}
inline void __syncwarp() { exchange(0); }
inline bool __any_sync(u32, bool x) {
  auto lanes = exchange(x);
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= lanes[i];
  return any;
}
template <typename T> inline T __shfl_sync(u32, T x, int lane) { return exchange(x)[lane]; }
template <typename T> inline T __shfl_xor_sync(u32, T x, int mask) { return exchange(x)[(current->x % 32) ^ mask]; }
inline bool elect() { return current->x % 32 == 0; }
inline void barrier_arrive(int barrier, int count) {
  NamedBarrier &named_barrier = named_barriers[barrier];
  if (++named_barrier.arrived == count) named_barrier.arrived = 0, ++named_barrier.count;
  ++progress;
}
inline void barrier_sync(int barrier, int count) {
  const long before = named_barriers[barrier].count;
  barrier_arrive(barrier, count);
  while (named_barriers[barrier].count == before) yield();
}
inline void __syncthreads() { barrier_sync(0, THREADS); }
template <int COUNT> inline void dealloc_registers() {}
template <int COUNT> inline void alloc_registers() {}

// Barriers

struct Barrier { short count, missing; int state; };  // state: missing bytes, times 2, and the phase
inline void end_of_phase(Barrier &b) {
  if (b.missing < 0) fault = "more threads arrive at a barrier than it expects";
  if (b.missing == 0 && b.state >> 1 == 0) b.missing = b.count, b.state ^= 1;
  ++progress;
}
inline void init_barrier(i64 *at, int count) { *(Barrier *)at = {(short)count, (short)count, 0}; }
inline void fence_barrier_init() {}
inline void arrive_and_expect(i64 *at, int bytes) {
  Barrier &b = *(Barrier *)at;
  b.state += 2 * bytes;
  --b.missing;
  end_of_phase(b);
}
inline void arrive(i64 *at) { arrive_and_expect(at, 0); }
inline void wait_for(i64 *at, int phase) {
  while ((((Barrier *)at)->state & 1) == phase) yield();
}

// Between blocks

inline void __threadfence() {}
inline int atomicAdd(int *at, int x) {
  const int before = *at;
  *at += x;
  return before;
}

// Copies

inline u32 shared_address(const void *p) { return (u32)((const char *)p - memory); }
inline void copy_async(u32 to, const void *from, int bytes) {
  if (to % 16 || (bytes && (uintptr_t)from % 16)) abort();
  memset(memory + to, 0xff, 16);
  current->copies.push_back({to, (const char *)from, bytes});
}
inline void wait_for_copies() {
  for (const Copy &copy : current->copies) {
    memset(memory + copy.to, 0, 16);
    memcpy(memory + copy.to, copy.from, copy.bytes);
  }
  current->copies.clear();
  ++progress;
}
inline void fence_async_proxy() {}
inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
inline void tma_load(u32 to, const TensorMap *map, i64 *barrier, int x, int y, int z, int w) {
  if (to % 1024) fault = "a box is not aligned to the swizzle pattern";
  memset(memory + to, 0xff, map->box_rows * 128);
  boxes.push_back({to, map, barrier, {x, y, z, w}});
}
inline void deliver(const Box &box) {
  const TensorMap &map = *box.map;
  for (int row = 0; row < map.box_rows; ++row)
    for (int i = 0; i < 64; ++i) {
      const i64 at[4] = {box.at[0] + i, box.at[1] + row, box.at[2], box.at[3]};
      const char *from = map.base + 2 * at[0];
      bool exists = at[0] < map.extents[0];
      for (int dim = 1; dim < 4; ++dim) {
        exists &= at[dim] >= 0 && at[dim] < map.extents[dim];
        from += at[dim] * map.steps[dim - 1];
      }
      u16 x = 0;
      if (exists) memcpy(&x, from, 2);
      memcpy(memory + swizzled(box.to + row * 128 + 2 * i), &x, 2);
    }
  Barrier &b = *(Barrier *)box.barrier;
  b.state -= 2 * map.box_rows * 128;
  end_of_phase(b);
}
inline void store_shared(u32 to, u32 x) { memcpy(memory + to, &x, 4); }
inline void store_shared(u32 to, int4 x) { memcpy(memory + to, &x, 16); }
inline int4 load_shared(u32 from) {
  int4 x;
  memcpy(&x, memory + from, 16);
  return x;
}

// Numbers

#if Q_BF16
inline float number(u16 x) { u32 bits = (u32)x << 16; float r; memcpy(&r, &bits, 4); return r; }
inline u16 rounded(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return std::isnan(x) ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
inline float number(u16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
inline u16 rounded(float x) { _Float16 h = (_Float16)x; u16 r; memcpy(&r, &h, 2); return r; }
#endif
inline u32 pack(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
inline float power2(float x) { return exp2f(x); }

// wgmma

inline i64 make_descriptor(u32 at, int panel_bytes) {
  return (i64)1 << 62 | (i64)(1024 >> 4) << 32 | (i64)(panel_bytes >> 4) << 16 | at >> 4;
}
// An element of a matrix in shared memory, which is a sequence of swizzle patterns of 8 rows of 128 bytes.
inline float element(i64 matrix, int row, int column) {
  const u32 begin = (matrix & 0x3fff) << 4, panel = (matrix >> 16 & 0x3fff) << 4, pattern = (matrix >> 32 & 0x3fff) << 4;
  u16 x;
  memcpy(&x, memory + swizzled(begin + row / 8 * pattern + row % 8 * 128 + column / 64 * panel + column % 64 * 2), 2);
  return number(x);
}
inline void compute(const Wgmma &x, std::vector<float> &d) {
  const int lane = current->x % 32, warp = current->x / 32 % 4;
  for (int half = 0; half < 2; ++half) {
    float left[16];
    for (int k = 0; k < 16; ++k)
      left[k] = x.a[0] ? number(x.a[k % 8 / 2][half + k / 8 * 2] >> 16 * (k % 2) & 0xffff)
                       : element(x.left, warp * 16 + lane / 4 + 8 * half, k);
    for (int column = 0; column < x.n; ++column) {
      if (column % 8 / 2 != lane % 4) continue;
      float &sum = d[x.at + column / 8 * 4 + half * 2 + column % 2];
      if (!x.adds) sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += left[k] * (x.a[0] ? element(x.right, k, column) : element(x.right, column, k));
    }
  }
}
inline void wgmma_fence() {}
template <int COUNT> inline void fence_registers(float (&)[COUNT]) {}
inline void start_wgmma(Wgmma x, int count) {
  auto lanes = exchange(x.a[0]);
  for (int i = 0; i < 4; ++i) x.a[i] = lanes[current->x % 32 / 4 * 4 + i];
  if (!current->registers.count(x.d)) {
    current->registers[x.d].assign(x.d, x.d + count);
    std::fill(x.d, x.d + count, NAN);
  }
  current->groups.back().push_back(x);
}
inline void wgmma_ss(float (&d)[64], i64 a, i64 b, bool adds) { start_wgmma({d, {}, a, b, 128, 0, adds, false}, 64); }
inline void wgmma_ss(float (&d)[32], i64 a, i64 b, bool adds) { start_wgmma({d, {}, a, b, 64, 0, adds, false}, 32); }
template <int N, int AT, int COUNT> inline void wgmma_rs(float (&d)[COUNT], const u32 *a, i64 b, bool adds) {
  start_wgmma({d, {a}, 0, b, N, AT, adds, false}, COUNT);
}
// Compute all groups in flight except the last `pending` ones.
inline void compute_groups(int pending) {
  for (int i = 0; i + 1 + pending < (int)current->groups.size(); ++i)
    for (Wgmma &x : current->groups[i]) {
      if (!x.done) compute(x, current->registers[x.d]);
      x.done = true;
    }
}
inline void wgmma_commit() {
  current->groups.emplace_back();
  if (chance() % 2) compute_groups(0);
}
template <int PENDING> inline void wgmma_wait() {
  __syncwarp();
  auto &groups = current->groups;
  compute_groups(PENDING);
  while ((int)groups.size() - 1 > PENDING) groups.erase(groups.begin());
  for (auto each = current->registers.begin(); each != current->registers.end();) {
    bool waits = false;
    for (const auto &group : groups)
      for (const Wgmma &x : group) waits |= x.d == each->first;
    if (waits) { ++each; continue; }
    std::copy(each->second.begin(), each->second.end(), each->first);
    each = current->registers.erase(each);
  }
  ++progress;
  __syncwarp();
}

// The grid

struct Params;
extern "C" void prompt_attention(const Params);
template <typename P> const P *params_of_launch;
template <typename P> void enter() {
  prompt_attention(*params_of_launch<P>);
  current->done = true;
  ++progress;
  while (true) yield();
}
template <typename P> void prepare(Thread &thread, int x) {
  thread.x = x;
  thread.stack.reset(new char[STACK_BYTES]);
  getcontext(&thread.begin);
  thread.begin.uc_stack.ss_sp = thread.stack.get();
  thread.begin.uc_stack.ss_size = STACK_BYTES;
  thread.begin.uc_link = nullptr;
  makecontext(&thread.begin, (void (*)())enter<P>, 0);
}
inline void resume(Thread &thread) {
  current = &thread;
  if (_setjmp(scheduler)) return;
  if (thread.runs) _longjmp(thread.at, 1);
  thread.runs = true;
  setcontext(&thread.begin);
}

// Run one block; sets `fault` if a fault is detected.
template <typename P> void run_block() {
  constexpr int MAX_ROUNDS = 20000;  // without progress
  shared.assign((SHARED_BYTES + GUARD_BYTES) / sizeof(Line) + 1, Line());
  memory = (char *)shared.data();
  memset(memory, 0xff, SHARED_BYTES + GUARD_BYTES);
  threads.clear(), warps.clear(), boxes.clear();
  threads.resize(THREADS), warps.resize(THREADS / 32);
  for (NamedBarrier &named_barrier : named_barriers) named_barrier = NamedBarrier();
  for (int i = 0; i < THREADS; ++i) prepare<P>(threads[i], i);
  int left = THREADS, rounds = 0, slow = 0;
  for (int pass = 0; left > 0 && !fault; ++pass) {
    const long before = progress;
    if (pass % 64 == 0) slow = chance();
    for (Thread &thread : threads) {
      if (thread.done || (pass % 8 && slow >> thread.x / 32 & 1)) continue;
      resume(thread);
      left -= thread.done;
    }
    while (!boxes.empty() && chance() % 3) {
      std::swap(boxes[chance() % boxes.size()], boxes.back());
      deliver(boxes.back());
      boxes.pop_back();
    }
    rounds = progress == before ? rounds + 1 : 0;
    if (rounds == MAX_ROUNDS) fault = "deadlock: threads wait for each other";
  }
  if (!boxes.empty() && !fault) fault = "a copy is in flight when its block ends";
  for (int i = 0; i < GUARD_BYTES; ++i)
    if (memory[SHARED_BYTES + i] != (char)0xff) fault = "a block stores past its shared memory";
}

template <typename P> const char *run_grid(const P *params, int grid_x, int seed) {
  chance.seed(seed + 1);
  chance.discard(8);  // the first numbers of neighbouring seeds are similar
  params_of_launch<P> = params;
  gridDim = {grid_x, 1};
  fault = nullptr;
  for (int block = 0; block < grid_x && !fault; ++block) {
    blockIdx = {block, 0};
    run_block<P>();
  }
  return fault;
}

// The source of the kernel follows.
