// The instructions of kernels/native/primitives.cuh on a CPU, so that the kernels' own source runs there, compiled as C++.
//
// A block is a thread of the operating system, with shared memory in thread_local variables; a CUDA thread is a context
// in it, which runs until it needs what others have not done yet. A warp's collective waits for its 32 lanes. What the
// hardware leaves open is made as bad as it may be: shared memory is NaN at first, a copy poisons its place at once and
// arrives only when it is waited for, and some warps are slower than others.

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

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
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local

struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
template <typename T> inline T __ldcg(const T *at) { return *at; }
inline float __int_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
inline u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= (u32)(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << 8 * i;
  return r;
}

// Contexts, barriers

constexpr int SHARED_BYTES = 232448, STACK_BYTES = 256 << 10, NUM_THREADS = 32 * WARPS;

struct Copy { u32 to; const char *from; int bytes; };
struct Warp { long arrived = 0; unsigned char slots[2][32][32]; };
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int x;
  long collectives = 0, block_barriers = 0, cluster_arrivals = 0;
  bool done = false;
  std::deque<std::vector<Copy>> groups = std::deque<std::vector<Copy>>(1);  // the last one is not committed yet
};
struct Cluster { std::atomic<long> arrived{0}; char *memories[CLUSTER]; std::atomic<int> ready{0}, ended{0}; std::atomic<bool> met{false}, failed{false}; };

thread_local char memory[SHARED_BYTES] __attribute__((aligned(128)));
thread_local Thread *current;
thread_local ucontext_t scheduler;
thread_local Warp *warps;
thread_local long block_arrived;
thread_local Cluster *cluster;
thread_local struct { int x, y; } blockIdx, gridDim;
#define threadIdx (*current)

inline void yield() { swapcontext(&current->context, &scheduler); }

template <typename T> struct Lanes { const unsigned char (*slots)[32]; T operator[](int i) const { T r; memcpy(&r, slots[i], sizeof(T)); return r; } };

// What every lane of the warp brings to its next collective.
template <typename T> inline Lanes<T> exchange(T mine) {
  static_assert(sizeof(T) <= 32, "a slot");
  Warp &warp = warps[current->x / 32];
  const long number = ++current->collectives;
  memcpy(warp.slots[number % 2][current->x % 32], &mine, sizeof(T));
  ++warp.arrived;
  while (warp.arrived < 32 * number) yield();
  return {warp.slots[number % 2]};
}
inline void __syncwarp() { exchange(0); }
inline bool __any_sync(u32, bool x) {
  auto lanes = exchange(x);
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= lanes[i];
  return any;
}
inline u32 __ballot_sync(u32, bool x) {
  auto lanes = exchange(x);
  u32 mask = 0;
  for (int i = 0; i < 32; ++i) mask |= (u32)lanes[i] << i;
  return mask;
}
inline int __clz(u32 x) { return __builtin_clz(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
template <typename T> inline T __shfl_sync(u32, T x, int lane) { return exchange(x)[lane % 32]; }
template <typename T> inline T __shfl_xor_sync(u32, T x, int mask) { return exchange(x)[(current->x % 32) ^ mask]; }
inline void __syncthreads() {
  const long number = ++current->block_barriers;
  ++block_arrived;
  while (block_arrived < NUM_THREADS * number) yield();
}

// Copies

inline u32 shared_address(const void *p) { return (u32)((const char *)p - memory); }
inline void copy_async(u32 to, const char *from, int bytes) {
  if (to % 16 || (bytes && (uintptr_t)from % 16)) abort();
  memset(memory + to, 0xff, 16);
  current->groups.back().push_back({to, from, bytes});
}
inline void commit() { current->groups.emplace_back(); }
inline void wait_oldest() {
  while ((int)current->groups.size() - 1 > STAGES - 1) {
    for (const Copy &copy : current->groups.front()) {
      memset(memory + copy.to, 0, 16);
      memcpy(memory + copy.to, copy.from, copy.bytes);
    }
    current->groups.pop_front();
  }
}

// Numbers

inline float from_half(u16 x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
inline u16 to_half(float x) { _Float16 h = (_Float16)x; u16 r; memcpy(&r, &h, 2); return r; }
inline float from_bfloat(u16 x) { return __int_as_float((u32)x << 16); }
inline u16 to_bfloat(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  if (std::isnan(x)) return 0x7fff;
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#if Q_BF16
inline float from_query(u16 x) { return from_bfloat(x); }
inline u32 pack_output(float low, float high) { return to_bfloat(low) | (u32)to_bfloat(high) << 16; }
#else
inline float from_query(u16 x) { return from_half(x); }
inline u32 pack_output(float low, float high) { return to_half(low) | (u32)to_half(high) << 16; }
#endif
#if Q_BF16 && !KV_FP8
inline float from_factor(u16 x) { return from_bfloat(x); }
inline u32 pack(float low, float high) { return to_bfloat(low) | (u32)to_bfloat(high) << 16; }
#else
inline float from_factor(u16 x) { return from_half(x); }
inline u32 pack(float low, float high) { return to_half(low) | (u32)to_half(high) << 16; }
#endif
inline u16 widen_one(unsigned char x) {
#if KV_FP8 == 2
  return (u16)x << 8;  // e5m2 is the upper half of float16
#else
  if ((x & 0x7f) == 0x7f) return 0x7fff;
  int exponent = x >> 3 & 15, mantissa = x & 7;
  float value = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return to_half(x & 0x80 ? -value : value);
#endif
}
inline u32 widen(u16 x) { return widen_one(x & 0xff) | (u32)widen_one(x >> 8) << 16; }
inline float power2(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }

// Matrices

inline u16 element(u32 at, int index) { u16 r; memcpy(&r, memory + at + 2 * index, 2); return r; }
inline void load_matrices(u32 (&r)[4], u32 at) {
  auto rows = exchange(at);
  const int lane = current->x % 32;
  for (int j = 0; j < 4; ++j) {
    u32 row = rows[8 * j + lane / 4];
    if (row % 16) abort();
    r[j] = element(row, lane % 4 * 2) | (u32)element(row, lane % 4 * 2 + 1) << 16;
  }
  __syncwarp();
}
inline void load_matrices_transposed(u32 (&r)[4], u32 at) {
  auto rows = exchange(at);
  const int lane = current->x % 32;
  for (int j = 0; j < 4; ++j)
    r[j] = element(rows[8 * j + lane % 4 * 2], lane / 4) | (u32)element(rows[8 * j + lane % 4 * 2 + 1], lane / 4) << 16;
  __syncwarp();
}
inline u32 transpose(u32 x) {
  auto lanes = exchange(x);
  const int lane = current->x % 32, column = lane / 4;
  u32 r = 0;
  for (int i = 0; i < 2; ++i) r |= (lanes[(lane % 4 * 2 + i) * 4 + column / 2] >> 16 * (column % 2) & 0xffff) << 16 * i;
  return r;
}
inline void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  struct Factors { u32 a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  auto lanes = exchange(mine);
  const int lane = current->x % 32;
  Factors of_rows[4], of_columns[2][4];
  for (int t = 0; t < 4; ++t) {
    of_rows[t] = lanes[lane / 4 * 4 + t];
    for (int j = 0; j < 2; ++j) of_columns[j][t] = lanes[(lane % 4 * 2 + j) * 4 + t];
  }
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      int t = k % 8 / 2, shift = 16 * (k % 2);
      float x = from_factor(of_rows[t].a[i / 2 + 2 * (k / 8)] >> shift & 0xffff);
      float y = from_factor(of_columns[i % 2][t].b[k / 8] >> shift & 0xffff);
      d[i] += x * y;
    }
}

// Between blocks

inline void prefetch(const void *) {}
inline void wait_for_earlier_kernels() {}
inline int count_arrival(int *at) { return __atomic_fetch_add(at, 1, __ATOMIC_ACQ_REL); }
// Words come when the block has ended and somebody waits for one of them, unless that takes long: one by one, by address,
// backwards, or in any order.
struct Sent { u32 *at, word; };
thread_local std::vector<Sent> mail;
inline std::atomic<const u32 *> asked_in_vain{nullptr};
inline std::atomic<bool> alone{false};
inline void send(float *at, float x, float y) {
  mail.push_back({(u32 *)at, __float_as_uint(x)});
  mail.push_back({(u32 *)at + 1, __float_as_uint(y)});
}
template <typename Random> void deliver_mail(Random &random) {
  if (mail.empty()) return;
  const auto by_address = [](Sent a, Sent b) { return a.at < b.at; };
  const u32 *first = std::min_element(mail.begin(), mail.end(), by_address)->at;
  const u32 *last = std::max_element(mail.begin(), mail.end(), by_address)->at;
  const auto asked = [&](const u32 *at) { return at >= first && at <= last; };
  for (int i = 0; i < 10000 && !alone && !asked(asked_in_vain); ++i)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  std::shuffle(mail.begin(), mail.end(), random);
  const int kind = random() % 3;
  if (kind > 0) std::sort(mail.begin(), mail.end(), by_address);
  if (kind > 1) std::reverse(mail.begin(), mail.end());
  for (size_t i = 0; i < mail.size(); ++i) {
    if (i % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    __atomic_store_n(mail[i].at, mail[i].word, __ATOMIC_RELAXED);
  }
  mail.clear();
}
inline float2 receive(const float *at) {
  const u32 *words = (const u32 *)at;
  const u32 x = __atomic_load_n(words, __ATOMIC_RELAXED), y = __atomic_load_n(words + 1, __ATOMIC_RELAXED);
  if (x == 0 || y == 0) asked_in_vain = words;
  return {__int_as_float(x), __int_as_float(y)};
}
inline void give_up() {}  // the block's deadline ends it
struct Barrier { int expected, bytes; };  // expected: of this phase, or -1; the phase in the lowest bit of `bytes`
inline std::mutex barriers;
inline void end_of_phase(Barrier &barrier) {
  if (barrier.expected == barrier.bytes >> 1) barrier = {-1, ~barrier.bytes & 1};
}
inline void init_barrier(i64 *at) { *(Barrier *)at = {-1, 0}; }
inline void publish_barriers() {}
inline void expect_bytes(i64 *at, int bytes) {
  std::lock_guard lock(barriers);
  if (((Barrier *)at)->expected >= 0) cluster->failed = true;  // the phase before has not ended
  ((Barrier *)at)->expected = bytes;
  end_of_phase(*(Barrier *)at);
}
inline void wait_for_bytes(i64 *at, int phase) {
  const auto ended = [&] {
    std::lock_guard lock(barriers);
    return (((Barrier *)at)->bytes & 1) != phase;
  };
  while (!ended()) yield();
}
inline void store_remote(u32 at, u32 barrier, int rank, float x, float y) {
  float pair[2] = {x, y};
  cluster->met = true;
  std::lock_guard lock(barriers);
  memcpy(cluster->memories[rank] + at, pair, 8);
  Barrier &there = *(Barrier *)(cluster->memories[rank] + barrier);
  there.bytes += 8 << 1;
  end_of_phase(there);
}
inline void cluster_arrive() {
  ++current->cluster_arrivals;
  ++cluster->arrived;
}
inline void cluster_wait() {
  cluster->met = true;
  while (cluster->arrived < (long)NUM_THREADS * CLUSTER * current->cluster_arrivals) yield();
}

// The grid

struct Params;
extern "C" void decode_attention(const Params);
template <typename P> struct Launch { static thread_local const P *params; };
template <typename P> thread_local const P *Launch<P>::params;

template <typename P> void enter() {
  decode_attention(*Launch<P>::params);
  current->done = true;
  while (true) yield();
}

template <typename P> void run_block(const P *params, int x, int y, int grid_x, int grid_y, Cluster *shared) {
  Launch<P>::params = params;
  blockIdx = {x, y};
  gridDim = {grid_x, grid_y};
  memset(memory, 0xff, sizeof(memory));
  cluster = shared;
  shared->memories[y % CLUSTER] = memory;
  static std::atomic<int> seed{0};
  std::minstd_rand random(++seed);
  random.discard(8);  // the first numbers of neighbouring seeds are alike
  for (++shared->ready; shared->ready < CLUSTER;) std::this_thread::yield();
  std::vector<Warp> of_block(WARPS);
  warps = of_block.data();
  block_arrived = 0;
  std::vector<Thread> threads(NUM_THREADS);
  for (int i = 0; i < NUM_THREADS; ++i) {
    Thread &t = threads[i];
    t.x = i;
    t.stack.reset(new char[STACK_BYTES]);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = STACK_BYTES;
    t.context.uc_link = nullptr;
    makecontext(&t.context, (void (*)())enter<P>, 0);
  }
  // Some blocks are late: they start when another one waits for them, or should have.
  if (y % CLUSTER > 0 && random() % 2)
    while (!shared->met) std::this_thread::yield();
  int slow = 0;  // warps that are, by bits; they change
  auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(15);
  int left = NUM_THREADS;
  for (int pass = 0; left > 0; ++pass) {
    if (shared->failed || std::chrono::steady_clock::now() > deadline) break;  // they wait for each other for ever
    if (pass % 256 == 0) slow = random();
    left = 0;
    for (Thread &t : threads) {
      if (t.done) continue;
      if (slow >> t.x / 32 & 1 && pass % 8) {
        ++left;
        continue;
      }
      current = &t;
      swapcontext(&scheduler, &t.context);
      left += !t.done;
    }
  }
  deliver_mail(random);
  // Another block may still write to this one's shared memory, if wrongly.
  for (++shared->ended; shared->ended < CLUSTER;) std::this_thread::yield();
  if (left > 0) shared->failed = true;
}

#if CLUSTER == 1 && FIXED_SPLITS == 0
// Blocks start in an order that the caller chooses, and some late: a few at a time, and in every other launch one after
// another, which must do. Whether all came to the end.
template <typename P> bool run_grid(const P *params, int grid_x, int grid_y, const int *order, int count) {
  static std::atomic<int> launches{0};
  const int at_a_time = launches++ % 2 == 0 ? 2 * grid_x + 4 : 1;
  alone = at_a_time == 1;
  std::atomic<int> next{0};
  std::atomic<bool> failed{false};
  const auto run = [&](int seed) {
    std::minstd_rand random(seed + count);
    random.discard(8);
    for (int i = next++; i < count && !failed; i = next++) {
      if (random() % 2) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      Cluster block;
      run_block(params, order[i] / grid_y, order[i] % grid_y, grid_x, grid_y, &block);
      if (block.failed) failed = true;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < at_a_time; ++i) threads.emplace_back(run, i + 1);
  for (std::thread &thread : threads) thread.join();
  return !failed;
}
#else
// Runs the clusters one after another, in an order that the caller chooses; the blocks of a cluster at a time. Whether
// all came to the end.
template <typename P> bool run_grid(const P *params, int grid_x, int grid_y, const int *order, int count) {
  for (int i = 0; i < count; ++i) {
    Cluster shared;
    std::vector<std::thread> blocks;
    int first = order[i] % (grid_y / CLUSTER) * CLUSTER, x = order[i] / (grid_y / CLUSTER);
    for (int rank = 0; rank < CLUSTER; ++rank)
      blocks.emplace_back(run_block<P>, params, x, first + rank, grid_x, grid_y, &shared);
    for (std::thread &block : blocks) block.join();
    if (shared.failed) return false;
  }
  return true;
}
#endif
