// sm_90 instructions without a CUDA C++ intrinsic, and conversions that depend on the dtypes of queries and cache.
//
// tests/support/emulation/primitives.cuh defines the same functions for a CPU.
//
// Compile-time macros: Q_BF16 (else float16), KV_FP8 (0, 1: e4m3, 2: e5m2), STAGES (of kernels that copy tiles)

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define NEG_INF __int_as_float(0xff800000)

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Copy `bytes` bytes to shared memory and fill the rest of the 16 with zeros. Keys and values are read once per step,
// so L2 evicts them first. Work lists and block tables, which every layer reads, stay in L2.
__device__ __forceinline__ void copy_async(u32 to, const char *from, int bytes) {
  i64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;\n"
               ::"r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}
// The copies since the last commit() form a group. wait_oldest() waits until at most STAGES - 1 groups are in flight.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
#ifdef STAGES
__device__ __forceinline__ void wait_oldest() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 1) : "memory");
}
#endif

// Load four 8 x 8 matrices of 16-bit elements from shared memory, as mma operands. Lane i passes the address of 16
// bytes.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// Transpose an 8 x 8 matrix of 16-bit elements, two per lane.
__device__ __forceinline__ u32 transpose(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

// Products use the query's dtype. With an fp8 cache, queries, keys and values are multiplied as float16.
#if Q_BF16 && !KV_FP8
#define MMA_TYPE "bf16"
#define PACK "cvt.rn.bf16x2.f32 %0, %2, %1;\n"
#else
#define MMA_TYPE "f16"
#define PACK "cvt.rn.f16x2.f32 %0, %2, %1;\n"
#endif
// d += a b: a is 16 x 16, b is 16 x 8, d is 16 x 8 in float32.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Pack two floats as mma operands.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm(PACK : "=r"(r) : "f"(low), "f"(high));
  return r;
}
#if KV_FP8 == 2
#define WIDEN "cvt.rn.f16x2.e5m2x2 %0, %1;\n"
#else
#define WIDEN "cvt.rn.f16x2.e4m3x2 %0, %1;\n"
#endif
__device__ __forceinline__ u32 widen(u16 x) {  // convert two fp8 values to two float16 values
  u32 r;
  asm(WIDEN : "=r"(r) : "h"(x));
  return r;
}
__device__ __forceinline__ float from_query(u16 x) {
#if Q_BF16
  return __int_as_float((u32)x << 16);
#else
  float r;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(r) : "h"(x));
  return r;
#endif
}
// Pack two floats in the query's dtype, which is also the output dtype.
__device__ __forceinline__ u32 pack_output(float low, float high) {
  u32 r;
#if Q_BF16
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;\n" : "=r"(r) : "f"(low), "f"(high));
#else
  asm("cvt.rn.f16x2.f32 %0, %2, %1;\n" : "=r"(r) : "f"(low), "f"(high));
#endif
  return r;
}
// Two bfloat16 numbers at a time. Subnormal numbers are not flushed.
__device__ __forceinline__ u32 multiply_pair(u32 x, u32 y) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
__device__ __forceinline__ u32 subtract_pair(u32 x, u32 y) {
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;\n" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
// (x & mask) | bits in one instruction, even if mask and bits are constants.
__device__ __forceinline__ u32 masked_or(u32 x, u32 mask, u32 bits) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(r) : "r"(x), "r"(mask), "r"(bits));
  return r;
}
// Approximate 2^x, log2(x) and 1 / x by one instruction each.
__device__ __forceinline__ float power2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float logarithm2(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(x));
  return r;
}

// Load 16 bytes of weights, which a step reads once and never writes. L2 evicts them first.
__device__ __forceinline__ int4 load_once(const void *at) {
  i64 policy;
  int4 r;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4], %5;\n"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at), "l"(policy));
  return r;
}
__device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L1 [%0];\n" ::"l"(at)); }
// Add to a word of shared memory if `holds`, without a branch.
__device__ __forceinline__ void add_shared_if(bool holds, u32 *at, u32 x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p red.shared.add.u32 [%0], %1;\n}\n"
               ::"r"(shared_address(at)), "r"(x), "r"((u32)holds) : "memory");
}
// With programmatic dependent launch: wait until the earlier kernels of the stream have finished. Read what they wrote
// only after this wait. A kernel needs no wait if the previous kernel waits before it triggers the launch.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// With programmatic dependent launch: let the next kernel of the stream start once all blocks have called this or have
// exited. The next kernel must call wait_for_earlier_kernels() before it reads what this kernel writes.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
// Count an arrival; return the number before it. Later arrivals see what the block stored before its last barrier.
__device__ __forceinline__ int count_arrival(int *at) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;\n" : "=r"(before) : "l"(at) : "memory");
  return before;
}

// Two words at an even index that another block may access concurrently. They may arrive in any order.
__device__ __forceinline__ void send(float *at, float x, float y) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};\n" ::"l"(at), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ float2 receive(const float *at) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "l"(at) : "memory");
  return x;
}

// Abort the whole grid with an error.
__device__ __forceinline__ void abort_kernel() { asm volatile("trap;\n"); }

// A barrier in shared memory that counts the bytes that arrive from the blocks of a cluster. A phase ends when the
// expected number of bytes has arrived. Phases are numbered 0, 1, 0, ...
__device__ __forceinline__ void init_barrier(i64 *at) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(shared_address(at)) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(i64 *at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
               ::"r"(shared_address(at)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_bytes(i64 *at, int phase) {
  int done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}\n" : "=r"(done) : "r"(shared_address(at)), "r"(phase) : "memory");
  } while (!done);
}

// Map an address in this block's shared memory to the block `rank` of the cluster.
__device__ __forceinline__ u32 remote_address(u32 at, int rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(remote) : "r"(at), "r"(rank));
  return remote;
}
__device__ __forceinline__ void store_remote(u32 at, u32 barrier, int rank, float x, float y) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];\n"
               ::"r"(remote_address(at, rank)), "f"(x), "f"(y), "r"(remote_address(barrier, rank)) : "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory"); }
