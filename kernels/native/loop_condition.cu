// The last node of the body of a WHILE loop: it decides whether the body runs again. See capture/loop.py.

// A function of the device runtime, which the driver resolves when it loads the kernel.
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle handle,
                                                                                unsigned int value);

struct Params {
  const int *flag;                    // [1]
  cudaGraphConditionalHandle handle;  // of the WHILE node
};

// Launch with one thread: if several threads set the condition, the result is undefined.
extern "C" __global__ void loop_condition(Params params) {
  cudaGraphSetConditional(params.handle, *params.flag != 0);
}
