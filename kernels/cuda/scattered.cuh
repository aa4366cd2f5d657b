// Many tensors in one launch.
//
// Addresses are passed as kernel arguments, for up to kMost tensors per launch, so nothing is
// copied to the device first. A block finds its tensor by a binary search in the numbers of the
// tensors' first blocks, so the number of blocks is not limited.
#pragma once

#include "launch.cuh"

namespace megaframe {

constexpr int kMost = 64;
constexpr int64_t kChunk = 16384;  // elements per block

template <int LISTS>
struct Tensors {
  void* at[LISTS][kMost];
  int64_t length[kMost];
  int32_t first[kMost + 1];  // number of each tensor's first block
  int32_t count;
};
static_assert(sizeof(Tensors<5>) < 3600, "arguments of a kernel are limited to 4096 bytes");

// Returns the index of this block's tensor.
template <int LISTS>
__device__ inline int find_tensor(const Tensors<LISTS>& tensors) {
  const int block = static_cast<int>(blockIdx.x);
  int low = 0, high = tensors.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tensors.first[middle] <= block ? low : high) = middle;
  }
  return low;
}

// Calls `run(tensors, blocks)` for at most kMost tensors at a time. lists[l][t] is an address; a
// list that is null gives null addresses. Stops at the first error and returns it.
template <int LISTS, typename Run>
int in_batches(void* const* const* lists, const int64_t* lengths, int count, Run run) {
  for (int start = 0; start < count; start += kMost) {
    Tensors<LISTS> tensors{};
    tensors.count = count - start < kMost ? count - start : kMost;
    int64_t blocks = 0;
    for (int t = 0; t < tensors.count; ++t) {
      tensors.first[t] = static_cast<int32_t>(blocks);
      tensors.length[t] = lengths[start + t];
      blocks += (lengths[start + t] + kChunk - 1) / kChunk;
      for (int l = 0; l < LISTS; ++l)
        tensors.at[l][t] = lists[l] ? lists[l][start + t] : nullptr;
    }
    tensors.first[tensors.count] = static_cast<int32_t>(blocks);
    const int error = run(tensors, blocks);
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace megaframe
