// Sum of squares over scattered gradients, in fp64 as in `megaframe_kernels/square_sum.py`.
//
// Each block writes one number, and the caller adds them. The division into blocks depends only on
// the lengths, so results are bitwise repeatable.

#include "scattered.cuh"

namespace megaframe {

__global__ void __launch_bounds__(kThreads)
    square_sum(const Tensors<1> tensors, Kind kind, double* sums) {
  __shared__ double parts[kThreads];
  const int t = find_tensor(tensors);
  const void* x = tensors.at[0][t];
  const int64_t first = (static_cast<int64_t>(blockIdx.x) - tensors.first[t]) * kChunk;
  const int64_t last = min(first + kChunk, tensors.length[t]);
  const bool whole = reinterpret_cast<uintptr_t>(x) % (kind == kFloat ? 16 : 8) == 0;
  double total = 0.0;
  for (int64_t at = first + 4 * threadIdx.x; at < last; at += 4 * kThreads) {
    if (whole && at + 4 <= last) {
      float four[4];
      load4(x, kind, at, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) total += static_cast<double>(four[i]) * four[i];
      continue;
    }
    for (int64_t i = at; i < min(at + 4, last); ++i) {
      const double value = load1(x, kind, i);
      total += value * value;
    }
  }
  parts[threadIdx.x] = total;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}

}  // namespace megaframe

// Returns how many numbers megaframe_square_sum writes.
MEGAFRAME_EXPORT int64_t megaframe_square_sum_blocks(const int64_t* lengths, int count) {
  int64_t blocks = 0;
  for (int t = 0; t < count; ++t) blocks += (lengths[t] + megaframe::kChunk - 1) / megaframe::kChunk;
  return blocks;
}

// addresses: of `count` tensors of type `kind`. Returns a CUDA error, 0 for none.
MEGAFRAME_EXPORT int megaframe_square_sum(void* const* addresses, const int64_t* lengths, int count,
                                          int kind, double* sums, void* stream) {
  using namespace megaframe;
  return in_batches<1>(&addresses, lengths, count, [&](const Tensors<1>& tensors, int64_t blocks) {
    const int error = launch(square_sum, blocks, stream, tensors, Kind(kind), sums);
    sums += blocks;
    return error;
  });
}
