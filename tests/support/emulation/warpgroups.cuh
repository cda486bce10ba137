// Emulate the instructions of kernels/native/warpgroups.cuh on a CPU, so that the source of the kernel runs as C++.
//
// In addition to primitives.cuh: a box of a TMA load arrives late, in any order. A wgmma is computed when it starts or
// when a thread waits for it, and until then its registers are NaN. Blocks must run one after another.

#include <map>

#include "primitives.cuh"

// a is null if the left operand is in shared memory.
struct Wgmma { float *d; const u32 *a[4]; i64 left, right; int n, at; bool adds, done; };
struct Wgmmas {  // of a thread
  std::vector<std::vector<Wgmma>> groups = std::vector<std::vector<Wgmma>>(1);  // the last one is open
  std::map<float *, std::vector<float>> registers;  // of wgmma in flight
};
struct alignas(64) TensorMap { const char *base; i64 extents[4], steps[3]; int box_rows; };
static_assert(sizeof(TensorMap) == 128, "as large as the driver's");
struct Box { u32 to; const TensorMap *map; i64 *barrier; int at[4]; };
struct NamedBarrier { int arrived = 0; long count = 0; };

// Of the running block
std::vector<Wgmmas> wgmmas;
std::vector<Box> boxes;  // in flight
NamedBarrier named_barriers[16];

inline bool elect() { return current->x % 32 == 0; }
inline void barrier_arrive(int barrier, int count) {
  NamedBarrier &named_barrier = named_barriers[barrier];
  if (++named_barrier.arrived == count) named_barrier.arrived = 0, ++named_barrier.count;
  ++progress;
}
inline void barrier_sync(int barrier, int count) {
  const long before = named_barriers[barrier].count;
  barrier_arrive(barrier, count);
  wait_until(named_barriers[barrier].count, before + 1);
}
template <int COUNT> inline void dealloc_registers() {}
template <int COUNT> inline void alloc_registers() {}

// Barriers and copies

inline void fence_tma_barrier_init() {}
inline void arrive(i64 *at) { expect_bytes(at, 0); }
inline void wait_for(i64 *at, int phase) { wait_for_bytes(at, phase); }
inline void __threadfence() {}
inline void copy_query(u32 to, const void *from, int bytes) { copy_async(to, from, bytes); }
inline void wait_for_copies() {
  commit();
  wait_for_groups(0);
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
  bytes_arrived(box.barrier, map.box_rows * 128);
}
inline void store_shared(u32 to, u32 x) { memcpy(memory + to, &x, 4); }
inline void store_shared(u32 to, int4 x) { memcpy(memory + to, &x, 16); }
inline int4 load_shared(u32 from) {
  int4 x;
  memcpy(&x, memory + from, 16);
  return x;
}

// wgmma

inline i64 make_descriptor(u32 at, int panel_bytes) {
  return (i64)1 << 62 | (i64)(1024 >> 4) << 32 | (i64)(panel_bytes >> 4) << 16 | at >> 4;
}
// An element of a matrix in shared memory, which is a sequence of swizzle patterns of 8 rows of 128 bytes.
inline float element(i64 matrix, int row, int column) {
  const u32 begin = (matrix & 0x3fff) << 4, panel = (matrix >> 16 & 0x3fff) << 4, pattern = (matrix >> 32 & 0x3fff) << 4;
  u16 x;
  memcpy(&x, memory + swizzled(begin + row / 8 * pattern + row % 8 * 128 + column / 64 * panel + column % 64 * 2), 2);
  return from_factor(x);
}
inline void compute(const Wgmma &x, std::vector<float> &d) {
  const int lane = current->x % 32, warp = current->x / 32 % 4;
  for (int half = 0; half < 2; ++half) {
    float left[16];
    for (int k = 0; k < 16; ++k)
      left[k] = x.a[0] ? from_factor(x.a[k % 8 / 2][half + k / 8 * 2] >> 16 * (k % 2) & 0xffff)
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
  Wgmmas &mine = wgmmas[current->x];
  if (!mine.registers.count(x.d)) {
    mine.registers[x.d].assign(x.d, x.d + count);
    std::fill(x.d, x.d + count, NAN);
  }
  mine.groups.back().push_back(x);
}
inline void wgmma_ss(float (&d)[64], i64 a, i64 b, bool adds) { start_wgmma({d, {}, a, b, 128, 0, adds, false}, 64); }
inline void wgmma_ss(float (&d)[32], i64 a, i64 b, bool adds) { start_wgmma({d, {}, a, b, 64, 0, adds, false}, 32); }
template <int N, int AT, int COUNT> inline void wgmma_rs(float (&d)[COUNT], const u32 *a, i64 b, bool adds) {
  start_wgmma({d, {a}, 0, b, N, AT, adds, false}, COUNT);
}
// Compute all groups in flight except the last `pending` ones.
inline void compute_groups(int pending) {
  Wgmmas &mine = wgmmas[current->x];
  for (int i = 0; i + 1 + pending < (int)mine.groups.size(); ++i)
    for (Wgmma &x : mine.groups[i]) {
      if (!x.done) compute(x, mine.registers[x.d]);
      x.done = true;
    }
}
inline void wgmma_commit() {
  wgmmas[current->x].groups.emplace_back();
  if (chance() % 2) compute_groups(0);
}
template <int PENDING> inline void wgmma_wait() {
  __syncwarp();
  auto &[groups, registers] = wgmmas[current->x];
  compute_groups(PENDING);
  while ((int)groups.size() - 1 > PENDING) groups.erase(groups.begin());
  for (auto each = registers.begin(); each != registers.end();) {
    bool waits = false;
    for (const auto &group : groups)
      for (const Wgmma &x : group) waits |= x.d == each->first;
    if (waits) { ++each; continue; }
    std::copy(each->second.begin(), each->second.end(), each->first);
    each = registers.erase(each);
  }
  ++progress;
  __syncwarp();
}

const Hooks of_warpgroups = hooks = {
    [] {
      wgmmas.assign(NUM_THREADS, Wgmmas());
      boxes.clear();
      for (NamedBarrier &barrier : named_barriers) barrier = NamedBarrier();
    },
    [] {
      while (!boxes.empty() && chance() % 3) {
        std::swap(boxes[chance() % boxes.size()], boxes.back());
        deliver(boxes.back());
        boxes.pop_back();
      }
    },
    [] { if (!boxes.empty()) fault = "a copy is in flight when its block ends"; }};

// The source of the kernel follows.
