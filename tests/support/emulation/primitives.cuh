// Emulate the instructions of kernels/native/primitives.cuh on a CPU, so that the source of the kernels runs as C++.
//
// A CUDA thread is a context that runs until it must wait for other threads. A collective of a warp waits for its 32
// lanes. Everything runs in one thread of the operating system, in an order derived from the seed of the launch, so
// that launches are reproducible. Where the hardware leaves behaviour open, the emulation takes the worst case: shared
// memory is NaN at first, a copy poisons its destination and arrives only when a thread waits for it, words for other
// blocks arrive late and in any order, and some warps and blocks are slow.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
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
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_variables")))

struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
template <typename T> inline T __ldcg(const T *at) { return *at; }
inline float __int_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= (u32)(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << 8 * i;
  return r;
}

#ifndef CLUSTER
#define CLUSTER 1
#endif

// Contexts, barriers

constexpr int STACK_BYTES = 256 << 10, NUM_THREADS = 32 * WARPS, GUARD_BYTES = 4096;  // after SHARED_BYTES
constexpr int MAX_ROUNDS = 50000, LATE_ROUNDS = 64;  // without progress: a deadlock; earlier kernels finish

struct Copy { u32 to; const char *from; int bytes; };
struct Warp { long arrived = 0; unsigned char brought[2][32][32]; };
struct Thread {
  int x;
  char *stack = nullptr;
  ucontext_t begin;
  jmp_buf at;  // where it resumes, once `runs` is set
  bool runs = false, done = false;
  long collectives = 0, block_barriers = 0, cluster_arrivals = 0;
  const long *awaited = nullptr;  // until it reaches `target`, the thread waits
  long target;
  std::deque<std::vector<Copy>> groups = std::deque<std::vector<Copy>>(1);  // the last one is open
  ~Thread() { free(stack); }
};
struct Word { u32 *at, value; };
struct alignas(1024) Line { char bytes[1024]; };
struct Cluster;
struct Block {
  int x, y, delay;
  bool is_late, lets_next_start = false;
  Cluster *cluster;
  std::vector<Line> shared;
  std::vector<char> variables;
  char *memory() { return (char *)shared.data(); }
  std::vector<Warp> warps = std::vector<Warp>(WARPS);
  std::vector<Thread> threads = std::vector<Thread>(NUM_THREADS);
  std::vector<Word> sent;
  long arrived = 0;
  int passes = 0, slow = 0, left = NUM_THREADS;  // left: unfinished threads
};
struct Cluster {
  std::vector<Block> blocks = std::vector<Block>(CLUSTER);
  long arrived = 0;
  bool met = false;
};

char *memory;  // of the running block, as the following variables
Block *running;
Thread *current;
struct { int x, y; } blockIdx, gridDim;
#define threadIdx (*current)
jmp_buf scheduler;
struct Chance {  // std::minstd_rand; the compiler takes long to read <random>
  typedef u32 result_type;
  u32 state;
  static constexpr u32 min() { return 1; }
  static constexpr u32 max() { return 2147483646; }
  u32 operator()() { return state = (unsigned long long)state * 48271 % 2147483647; }
} chance;
long progress;  // counts actions; waiting and polling do not count
const char *fault;  // a detected fault, or null

// What another header adds to the emulation: called when a block starts, after each of its passes, and when it ends;
// and whether an earlier kernel of the running block's stream has not finished.
struct Hooks {
  void (*start)() = [] {}, (*pass)() = [] {}, (*end)() = [] {};
  bool (*waits)() = [] { return false; };
} hooks;

inline void yield() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}
inline void wait_until(const long &count, long target) {
  if (count >= target) return;
  current->awaited = &count, current->target = target;
  yield();
  current->awaited = nullptr;
}

template <typename T> struct Lanes {
  const unsigned char (*brought)[32];
  T operator[](int i) const { T r; memcpy(&r, brought[i], sizeof(T)); return r; }
};

// Exchange a value between the lanes of the warp in a collective.
template <typename T> inline Lanes<T> exchange(T mine) {
  static_assert(sizeof(T) <= 32, "a lane brings 32 bytes at most");
  Warp &warp = running->warps[current->x / 32];
  const long number = ++current->collectives;
  memcpy(warp.brought[number % 2][current->x % 32], &mine, sizeof(T));
  ++warp.arrived;
  wait_until(warp.arrived, 32 * number);
  return {warp.brought[number % 2]};
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
inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
template <typename T> inline T __shfl_sync(u32, T x, int lane) { return exchange(x)[lane % 32]; }
template <typename T> inline T __shfl_xor_sync(u32, T x, int mask) { return exchange(x)[(current->x % 32) ^ mask]; }
template <typename T> inline T __shfl_up_sync(u32, T x, int step) {
  auto lanes = exchange(x);
  return current->x % 32 >= step ? lanes[current->x % 32 - step] : x;
}
template <typename T> inline T __shfl_down_sync(u32, T x, int step) {
  auto lanes = exchange(x);
  return current->x % 32 + step < 32 ? lanes[current->x % 32 + step] : x;
}
inline u32 __reduce_max_sync(u32, u32 x) {
  auto lanes = exchange(x);
  for (int i = 0; i < 32; ++i) x = max(x, lanes[i]);
  return x;
}
inline u32 __reduce_min_sync(u32, u32 x) {
  auto lanes = exchange(x);
  for (int i = 0; i < 32; ++i) x = min(x, lanes[i]);
  return x;
}
inline void __syncthreads() {
  const long number = ++current->block_barriers;
  ++running->arrived;
  wait_until(running->arrived, NUM_THREADS * number);
  ++progress;
}

// Copies

inline u32 shared_address(const void *p) { return (u32)((const char *)p - memory); }
inline void copy_async(u32 to, const void *from, int bytes) {
  if (to % 16 || (bytes && (uintptr_t)from % 16)) abort();
  memset(memory + to, 0xff, 16);
  current->groups.back().push_back({to, (const char *)from, bytes});
}
inline void commit() { current->groups.emplace_back(); }
// Wait until at most `pending` groups are in flight.
inline void wait_for_groups(int pending) {
  while ((int)current->groups.size() - 1 > pending) {
    for (const Copy &copy : current->groups.front()) {
      memset(memory + copy.to, 0, 16);
      memcpy(memory + copy.to, copy.from, copy.bytes);
    }
    current->groups.pop_front();
    ++progress;
  }
}
#ifdef STAGES
inline void wait_oldest() { wait_for_groups(STAGES - 1); }
#endif

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
inline u32 masked_or(u32 x, u32 mask, u32 bits) { return (x & mask) | bits; }
inline u32 multiply_pair(u32 x, u32 y) {
  return to_bfloat(from_bfloat(x) * from_bfloat(y)) | (u32)to_bfloat(from_bfloat(x >> 16) * from_bfloat(y >> 16)) << 16;
}
inline u32 subtract_pair(u32 x, u32 y) {
  return to_bfloat(from_bfloat(x) - from_bfloat(y)) | (u32)to_bfloat(from_bfloat(x >> 16) - from_bfloat(y >> 16)) << 16;
}
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
inline float logarithm2(float x) { return log2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }

// Matrices

inline u16 element(u32 at, int index) { u16 r; memcpy(&r, memory + at + 2 * index, 2); return r; }
inline void load_matrices(u32 (&r)[4], u32 at) {
  auto given = exchange(at);
  const int lane = current->x % 32;
  for (int j = 0; j < 4; ++j) {
    u32 line = given[8 * j + lane / 4];
    if (line % 16) abort();
    r[j] = element(line, lane % 4 * 2) | (u32)element(line, lane % 4 * 2 + 1) << 16;
  }
  __syncwarp();
}
inline void load_matrices_transposed(u32 (&r)[4], u32 at) {
  auto given = exchange(at);
  const int lane = current->x % 32;
  for (int j = 0; j < 4; ++j) {
    u32 first = given[8 * j + lane % 4 * 2], second = given[8 * j + lane % 4 * 2 + 1];
    r[j] = element(first, lane / 4) | (u32)element(second, lane / 4) << 16;
  }
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
  ++progress;
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
inline int4 load_once(const void *at) {
  if ((uintptr_t)at % 16) fault = "a load of 16 bytes is not aligned";
  return *(const int4 *)at;
}
// What earlier kernels write arrives once all threads that run wait for it, directly or for other threads. A thread
// that reads it without waiting, or before its own wait, reads what was there before.
struct Late { char *at; const char *value; long bytes; };
std::vector<Late> late;
extern "C" void write_late(char *at, const char *value, long bytes) { late.push_back({at, value, bytes}); }
inline void wait_for_earlier_kernels() {
  while (!late.empty() || hooks.waits()) yield();
}
inline void finish_earlier_kernels() {
  for (const Late &write : late) memcpy(write.at, write.value, write.bytes);
  late.clear();
}
inline void let_next_kernel_start() { running->lets_next_start = true; }
inline int count_arrival(int *at) { return (*at)++; }
inline int atomicAdd(int *at, int x) { return (*at += x) - x; }
inline u32 atomicAdd(u32 *at, u32 x) { return (*at += x) - x; }
inline void add_shared_if(bool holds, u32 *at, u32 x) { if (holds) *at += x; }
inline u32 atomicMax(u32 *at, u32 x) { u32 r = *at; *at = max(r, x); return r; }
inline u32 atomicOr(u32 *at, u32 x) { u32 r = *at; *at |= x; return r; }
inline u32 atomicAnd(u32 *at, u32 x) { u32 r = *at; *at &= x; return r; }

// Words arrive after their block has finished and a thread polls one of them, or at the end of the launch. A few arrive
// at a time, in ascending, descending or random order of addresses.
struct Mail {
  std::vector<Word> words;  // delivered from the back
  const u32 *first, *last;
  bool asked;
};
std::list<Mail> mails;
inline void send(float *at, float x, float y) {
  running->sent.push_back({(u32 *)at, __float_as_uint(x)});
  running->sent.push_back({(u32 *)at + 1, __float_as_uint(y)});
}
inline float2 receive(const float *at) {
  const u32 *words = (const u32 *)at;
  if (words[0] == 0 || words[1] == 0)
    for (Mail &mail : mails) mail.asked |= mail.first <= words && words <= mail.last;
  return {__int_as_float(words[0]), __int_as_float(words[1])};
}
inline void abort_kernel() {}  // a launch without progress is stopped
inline void post(std::vector<Word> &words) {
  if (words.empty()) return;
  const auto by_address = [](Word a, Word b) { return a.at < b.at; };
  const auto ends = std::minmax_element(words.begin(), words.end(), by_address);
  const u32 *first = ends.first->at, *last = ends.second->at;
  std::shuffle(words.begin(), words.end(), chance);
  const int kind = chance() % 3;
  if (kind > 0) std::sort(words.begin(), words.end(), by_address);
  if (kind > 1) std::reverse(words.begin(), words.end());
  mails.push_back({std::move(words), first, last, false});
}
inline void deliver(Mail &mail, size_t count) {
  for (; count > 0 && !mail.words.empty(); --count, ++progress) {
    *mail.words.back().at = mail.words.back().value;
    mail.words.pop_back();
  }
}

// Barriers in shared memory

struct Barrier { short count, missing; int state; };  // state: missing bytes, times 2, and the phase
inline void end_of_phase(Barrier &b) {
  if (b.missing < 0) fault = "more threads arrive at a barrier than it expects";
  if (b.missing == 0 && b.state >> 1 == 0) b.missing = b.count, b.state ^= 1;
  ++progress;
}
inline void init_barrier(i64 *at, int count = 1) { *(Barrier *)at = {(short)count, (short)count, 0}; }
inline void fence_barrier_init() {}
inline void expect_bytes(i64 *at, int bytes) {
  Barrier &b = *(Barrier *)at;
  b.state += 2 * bytes;
  --b.missing;
  end_of_phase(b);
}
inline void bytes_arrived(i64 *at, int bytes) {
  ((Barrier *)at)->state -= 2 * bytes;
  end_of_phase(*(Barrier *)at);
}
inline void wait_for_bytes(i64 *at, int phase) {
  while ((((Barrier *)at)->state & 1) == phase) yield();
}

// The blocks of a cluster

inline void store_remote(u32 at, u32 barrier, int rank, float x, float y) {
  const float pair[2] = {x, y};
  Block &block = running->cluster->blocks[rank];
  running->cluster->met = true;
  if (block.left == 0) fault = "a block stores to a finished block";
  memcpy(block.memory() + at, pair, 8);
  bytes_arrived((i64 *)(block.memory() + barrier), 8);
}
inline void cluster_arrive() {
  ++current->cluster_arrivals;
  ++running->cluster->arrived;
}
inline void cluster_wait() {
  running->cluster->met = true;
  wait_until(running->cluster->arrived, (long)NUM_THREADS * CLUSTER * current->cluster_arrivals);
  ++progress;
}

// The grid

struct Params;
extern "C" void ENTRY(const Params);
template <typename P> const P *params_of_launch;
template <typename P> void enter() {
  ENTRY(*params_of_launch<P>);
  current->done = true;
  ++progress;
  while (true) yield();
}

std::vector<char *> stacks;  // of finished threads, for reuse
template <typename P> void prepare(Thread &thread, int x) {
  thread.x = x;
  if (stacks.empty()) stacks.push_back((char *)malloc(STACK_BYTES));
  thread.stack = stacks.back();
  stacks.pop_back();
  getcontext(&thread.begin);
  thread.begin.uc_stack.ss_sp = thread.stack;
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

__shared__ char one_at_least __attribute__((used));
extern "C" char __start_shared_variables[] __attribute__((visibility("hidden")));
extern "C" char __stop_shared_variables[] __attribute__((visibility("hidden")));
const size_t VARIABLE_BYTES = __stop_shared_variables - __start_shared_variables;

// Run each thread of a block until it waits. Seven of eight passes skip the slow warps.
inline void run_pass(Block &block) {
  if (block.passes % 256 == 0) block.slow = chance();
  const bool all = block.passes++ % 8 == 0;
  running = &block;
  memory = block.memory();
  blockIdx = {block.x, block.y};
  memcpy(__start_shared_variables, block.variables.data(), VARIABLE_BYTES);
  for (Thread &thread : block.threads) {
    if (thread.done || (!all && block.slow >> thread.x / 32 & 1)) continue;
    if (thread.awaited && *thread.awaited < thread.target) continue;
    resume(thread);
    block.left -= thread.done;
  }
  hooks.pass();
  memcpy(block.variables.data(), __start_shared_variables, VARIABLE_BYTES);
}

// Prepare the blocks of a cluster.
template <typename P> void start(Cluster &cluster, int index, int grid_y) {
  for (int rank = 0; rank < CLUSTER; ++rank) {
    Block &block = cluster.blocks[rank];
    block.x = index / (grid_y / CLUSTER);
    block.y = index % (grid_y / CLUSTER) * CLUSTER + rank;
    block.cluster = &cluster;
    block.shared.resize((SHARED_BYTES + GUARD_BYTES) / sizeof(Line) + 1);
    memset(block.memory(), 0xff, SHARED_BYTES + GUARD_BYTES);
    block.variables.assign(VARIABLE_BYTES, (char)0xff);
    block.delay = chance() % 2 ? chance() % 1024 : 0;
    block.is_late = rank > 0 && chance() % 2;
    for (int i = 0; i < NUM_THREADS; ++i) prepare<P>(block.threads[i], i);
    hooks.start();
  }
}

inline bool has_ended(Cluster &cluster) {
  for (const Block &block : cluster.blocks)
    if (block.left > 0) return false;
  for (Block &block : cluster.blocks) {
    hooks.end();
    for (int i = 0; i < GUARD_BYTES; ++i)
      if (block.memory()[SHARED_BYTES + i] != (char)0xff) fault = "a block stores past its shared memory";
    post(block.sent);
    for (Thread &thread : block.threads) stacks.push_back(thread.stack), thread.stack = nullptr;
  }
  return true;
}

inline void seed_chance(int seed) {
  chance.state = seed + 1;
  for (int i = 0; i < 8; ++i) chance();  // the first numbers of neighboring seeds are similar
}

// Run clusters of blocks in the order of `order`, `at_a_time` of them concurrently. Return a detected fault, or null.
template <typename P>
const char *run_grid(const P *params, int grid_x, int grid_y, const int *order, int count, int at_a_time, int seed) {
  seed_chance(seed);
  params_of_launch<P> = params;
  gridDim = {grid_x, grid_y};
  fault = nullptr;
  mails.clear();
  std::list<Cluster> live;
  // Late blocks start once another block waits for them or should have.
  const auto may_start = [](const Block &block) {
    if (!block.is_late || block.cluster->met) return true;
    for (const Block &other : block.cluster->blocks)
      if (!other.is_late && other.left > 0) return false;
    return true;
  };
  int next = 0, rounds = 0;
  for (long before = progress; (next < count || !live.empty()) && !fault; before = progress) {
    while ((int)live.size() < at_a_time && next < count) start<P>(live.emplace_back(), order[next++], grid_y);
    for (Mail &mail : mails)
      if (mail.asked) deliver(mail, 1 + chance() % (mail.words.size() / 8 + 1));
    mails.remove_if([](const Mail &mail) { return mail.words.empty(); });
    for (Cluster &cluster : live)
      for (Block &block : cluster.blocks) {
        if (block.left == 0 || !may_start(block) || chance() % 4 == 0) continue;
        if (block.delay > 0) --block.delay;
        else run_pass(block);
      }
    live.remove_if(has_ended);
    rounds = progress == before ? rounds + 1 : 0;
    if (rounds == LATE_ROUNDS) finish_earlier_kernels();
    if (rounds == MAX_ROUNDS) fault = "deadlock: threads wait for each other";
  }
  for (Mail &mail : mails) deliver(mail, mail.words.size());
  late.clear();
  return fault;
}

// The source of the kernel follows.
