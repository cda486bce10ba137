// The last node of a loop body, which sets whether the body runs again. See capture/loop.py.

// A device runtime function that the driver resolves when it loads the kernel.
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle handle,
                                                                                unsigned int value);

struct Params {
  const int *condition;               // [1]
  cudaGraphConditionalHandle handle;  // of the WHILE node
};

// One thread, because concurrent calls of the setter are undefined.
extern "C" __global__ void loop_condition(Params params) {
  cudaGraphSetConditional(params.handle, *params.condition != 0);
}
