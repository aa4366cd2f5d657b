// AdamW over scattered parameters, in a few launches for all of them.
//
// The formula is that of `megaframe_kernels/adamw.py`. Element types are arguments, not templates:
// all threads take the same branches, whose cost is hidden by memory accesses.

#include "scattered.cuh"

namespace megaframe {

struct Step {
  float mean_share;  // 1 - beta1
  float beta2;
  float square_share;  // 1 - beta2
  float eps;
  float keep;    // 1 - lr decay
  float rate;    // lr / (1 - beta1^step)
  float unbias;  // (1 - beta2^step)^(-1/2)
  Kind weights, grads, moments, copy;
  const float* divisor;
  const float* skip;
};

__device__ inline void update(const Step& step, float by, float& w, float g, float& m, float& v) {
  g *= by;
  m += step.mean_share * (g - m);
  v = step.beta2 * v + step.square_share * g * g;
  w = w * step.keep - step.rate * m / (sqrtf(v) * step.unbias + step.eps);
}

__device__ inline bool aligned(const void* pointer, Kind kind) {
  return reinterpret_cast<uintptr_t>(pointer) % (kind == kFloat ? 16 : 8) == 0;
}

__global__ void __launch_bounds__(kThreads) adamw(const Tensors<5> tensors, const Step step) {
  if (step.skip && *step.skip != 0.0f) return;
  const float by = step.divisor ? 1.0f / *step.divisor : 1.0f;
  const int t = find_tensor(tensors);
  void *weights = tensors.at[0][t], *mean = tensors.at[2][t], *square = tensors.at[3][t];
  void *copy = tensors.at[4][t], *grads = tensors.at[1][t];
  const int64_t first = (static_cast<int64_t>(blockIdx.x) - tensors.first[t]) * kChunk;
  const int64_t last = min(first + kChunk, tensors.length[t]);
  const bool whole = aligned(weights, step.weights) && aligned(grads, step.grads) &&
                     aligned(mean, step.moments) && aligned(square, step.moments) &&
                     (!copy || aligned(copy, step.copy));
  for (int64_t at = first + 4 * threadIdx.x; at < last; at += 4 * kThreads) {
    if (whole && at + 4 <= last) {
      float w[4], g[4], m[4], v[4];
      load4(weights, step.weights, at, w);
      load4(grads, step.grads, at, g);
      load4(mean, step.moments, at, m);
      load4(square, step.moments, at, v);
#pragma unroll
      for (int i = 0; i < 4; ++i) update(step, by, w[i], g[i], m[i], v[i]);
      store4(weights, step.weights, at, w);
      store4(mean, step.moments, at, m);
      store4(square, step.moments, at, v);
      if (copy) store4(copy, step.copy, at, w);
      continue;
    }
    for (int64_t i = at; i < min(at + 4, last); ++i) {
      float w = load1(weights, step.weights, i), m = load1(mean, step.moments, i);
      float v = load1(square, step.moments, i);
      update(step, by, w, load1(grads, step.grads, i), m, v);
      store1(weights, step.weights, i, w);
      store1(mean, step.moments, i, m);
      store1(square, step.moments, i, v);
      if (copy) store1(copy, step.copy, i, w);
    }
  }
}

}  // namespace megaframe

// lists: weights, gradients, means, squares, copies (null if there are none). kinds: the types of
// weights, gradients, both moments, and copies. divisor and skip may be null. Returns a CUDA error,
// 0 for none.
MEGAFRAME_EXPORT int megaframe_adamw(void* const* const* lists, const int64_t* lengths, int count,
                                     const int* kinds, float mean_share, float beta2,
                                     float square_share, float eps, float keep, float rate,
                                     float unbias, const float* divisor, const float* skip,
                                     void* stream) {
  using namespace megaframe;
  const Step step{mean_share,     beta2,          square_share,   eps,
                  keep,           rate,           unbias,         Kind(kinds[0]),
                  Kind(kinds[1]), Kind(kinds[2]), Kind(kinds[3]), divisor,
                  skip};
  return in_batches<5>(lists, lengths, count, [&](const Tensors<5>& tensors, int64_t blocks) {
    return launch(adamw, blocks, stream, tensors, step);
  });
}
