// sm_90a instructions for warp-specialized kernels: wgmma, TMA loads, barriers.
//
// tests/support/emulation/warpgroups.cuh defines the same functions for a CPU.
//
#include "primitives.cuh"

// Move registers from warps that need few to warps that need many. All four warps of a warpgroup must make the same
// call.
template <int COUNT> __device__ __forceinline__ void dealloc_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void alloc_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(COUNT));
}

// True in one thread of the warp.
__device__ __forceinline__ bool elect() {
  int elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected;
}

// Barriers in shared memory. A phase ends after `count` arrivals and the arrival of all expected bytes. Phases are
// numbered 0, 1, 0, ... A wait for phase 1 of a new barrier returns immediately.
__device__ __forceinline__ void init_barrier(i64 *at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(at)), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_tma_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;\n" ::: "memory");
}
__device__ __forceinline__ void arrive(i64 *at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(at)) : "memory");
}
__device__ __forceinline__ void wait_for(i64 *at, int phase) {
  asm volatile("{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
               "bra WAIT;\nDONE:\n}\n" ::"r"(shared_address(at)), "r"(phase) : "memory");
}
// Named hardware barriers, 1 to 15. `threads` includes threads that only arrive.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// A TMA descriptor of a 4D tensor and of the box that one load copies. The driver encodes it.
struct __align__(64) TensorMap { char bytes[128]; };
// Load a box that starts at the given coordinates. Elements outside the tensor become 0. Rows of 128 bytes are
// swizzled: 16-byte column c of row r is stored at column c ^ (r % 8). The bytes arrive at `barrier`.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap *map, i64 *barrier, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];\n"
               ::"r"(to), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// Copy `bytes` bytes to shared memory and fill the rest of the 16 with zeros.
__device__ __forceinline__ void copy_query(u32 to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }
// Make this thread's writes to shared memory visible to products that start after the next barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
__device__ __forceinline__ void store_shared(u32 to, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, int4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ int4 load_shared(u32 from) {
  int4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}

// Products of a warpgroup, d += a b in float32: a is 64 x 16, b is 16 x N. They are asynchronous: do not access their
// registers before wgmma_wait().
//
// For each 8 columns of d, a lane has two adjacent elements of row lane / 4 and two of row lane / 4 + 8 of its warp's
// 16 rows.

// Describe a swizzled matrix in shared memory with rows of 128 bytes. Panels of 64 columns are `panel_bytes` apart.
// Adding 2 to the descriptor advances it by 32 bytes.
__device__ __forceinline__ i64 make_descriptor(u32 at, int panel_bytes) {
  return (i64)1 << 62 | (i64)(1024 >> 4) << 32 | (i64)(panel_bytes >> 4) << 16 | at >> 4;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}
// Prevent the compiler from moving uses of `d` across this point.
template <int COUNT> __device__ __forceinline__ void fence_registers(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#if Q_BF16
#define TYPES "f32.bf16.bf16 "
#else
#define TYPES "f32.f16.f16 "
#endif
#define D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define D32 D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D64 D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F32(d, i) F16(d, i), F16(d, i + 16)
#define F64(d, i) F32(d, i), F32(d, i + 32)

// The N columns of b are rows in shared memory: keys. Without `adds`, d is overwritten.
#define WGMMA_SS(N, D, F, A, B, S) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES D "}, " A \
               ", " B ", p, 1, 1, 0, 0;\n}\n" : F(d, 0) : "l"(a), "l"(b), "r"((int)adds));
__device__ __forceinline__ void wgmma_ss(float (&d)[64], i64 a, i64 b, bool adds) {
  WGMMA_SS(128, D64, F64, "%64", "%65", "%66")
}
__device__ __forceinline__ void wgmma_ss(float (&d)[32], i64 a, i64 b, bool adds) {
  WGMMA_SS(64, D32, F32, "%32", "%33", "%34")
}

// The 16 rows of b are rows in shared memory: values. a is in registers. AT is the index in d of the first of N
// columns.
#define WGMMA_RS(N, D, F, A, B, S) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES D "}, {" A \
               "}, " B ", p, 1, 1, 1;\n}\n" \
               : F(d, AT) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
template <int N, int AT, int COUNT>
__device__ __forceinline__ void wgmma_rs(float (&d)[COUNT], const u32 *a, i64 b, bool adds) {
  if constexpr (N == 128) {
    WGMMA_RS(128, D64, F64, "%64,%65,%66,%67", "%68", "%69")
  } else if constexpr (N == 64) {
    WGMMA_RS(64, D32, F32, "%32,%33,%34,%35", "%36", "%37")
  } else {
    WGMMA_RS(32, D16, F16, "%16,%17,%18,%19", "%20", "%21")
  }
}
