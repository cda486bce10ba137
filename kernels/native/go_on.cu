// The last node of a loop's body: whether the body runs once more. See capture/loop.py.

// A call of the device's runtime, which the driver resolves when it loads the kernel.
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle handle,
                                                                                unsigned int value);

struct Params {
  const int *flag;                    // [1]
  cudaGraphConditionalHandle handle;  // of the WHILE node
};

// One thread: the result of setters that race is undefined.
extern "C" __global__ void go_on(Params params) {
  cudaGraphSetConditional(params.handle, *params.flag != 0);
}
