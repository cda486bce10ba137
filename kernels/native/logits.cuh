// Queries and logits of both attention kernels. Include the header with the instructions first.

// The query head and the token of a query. Tokens are numbered from the first new token of the request.
#define Q_HEAD_OF(kv_head, query) ((kv_head) * NUM_QUERIES_PER_KV + (query) % NUM_QUERIES_PER_KV)
#define TOKEN_OF(query) ((query) / NUM_QUERIES_PER_KV)

// A maximum that is safe to subtract: -inf - -inf is NaN.
__device__ __forceinline__ float finite(float top) { return top == NEG_INF ? 0.0f : top; }

// cap * tanh(t), where x is 2 log2(e) t, as scaled by logit_constants(). soft_cap() in tile.py explains the series.
__device__ __forceinline__ float soft_cap(float x, float cap) {
  const float h = LN2 / 2, square = x * x;
  float series = x * (h + square * (-h * h * h / 3 + square * (2 * h * h * h * h * h / 15 -
                                                                square * 17 * h * h * h * h * h * h * h / 315)));
  float quotient = 1.0f - 2.0f / (power2(x > 64.0f ? 64.0f : x) + 1.0f);
  return cap * (square < 0.0625f / (h * h) ? series : quotient);
}
