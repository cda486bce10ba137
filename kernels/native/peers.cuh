// Accesses to memory that the GPUs of one host share over NVLink.
//
// tests/support/emulation/peers.cuh defines the same functions for a CPU.

#define NOT_ARRIVED 0xffffffffu  // a word that no rank sends

// Store 16 bytes in another GPU's memory. A word of 4 bytes is never torn, and words arrive in any order.
__device__ __forceinline__ void store_peer(int4 *at, int4 x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
               ::"l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// Load 16 bytes of this GPU's memory that another GPU stores concurrently.
__device__ __forceinline__ int4 load_arriving(const int4 *at) {
  int4 r;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at) : "memory");
  return r;
}
// Store NOT_ARRIVED in 16 bytes of this GPU's memory. Later kernels see it.
__device__ __forceinline__ void store_not_arrived(int4 *at) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %1, %1, %1};\n" ::"l"(at), "r"(NOT_ARRIVED) : "memory");
}
// Load a word of pinned host memory that the host stores concurrently.
__device__ __forceinline__ int load_host(const int *at) {
  int r;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];\n" : "=r"(r) : "l"(at) : "memory");
  return r;
}
// Nanoseconds of a clock that all kernels of this GPU share.
__device__ __forceinline__ i64 global_time() {
  i64 r;
  asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(r));
  return r;
}
