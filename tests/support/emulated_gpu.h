// Stands in for CUDA's runtime on a CPU: the threads of a block are threads, blocks run one by one.
//
// Only what the kernels use is here. Shared memory is static, because one block runs at a time; a
// barrier that a kernel lacks shows as a wrong result sooner or later, as it does on a GPU.
#pragma once

#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define MEGAFRAME_EMULATED
#undef __shared__
#undef __global__
#undef __device__
#undef __launch_bounds__
#define __shared__ static
#define __global__
#define __device__
#define __launch_bounds__(...)

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx;

namespace emulated {
constexpr int kThreads = 256, kLanes = 32;
inline std::unique_ptr<std::barrier<>> block;
inline std::vector<std::unique_ptr<std::barrier<>>> warps;
inline int shown[kThreads];
}  // namespace emulated

inline void __syncthreads() { emulated::block->arrive_and_wait(); }
inline void __syncwarp() { emulated::warps[threadIdx.x / emulated::kLanes]->arrive_and_wait(); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

inline unsigned __match_any_sync(unsigned, int value) {
  const int first = threadIdx.x / emulated::kLanes * emulated::kLanes;
  emulated::shown[threadIdx.x] = value;
  __syncwarp();
  unsigned same = 0;
  for (int lane = 0; lane < emulated::kLanes; ++lane)
    same |= static_cast<unsigned>(emulated::shown[first + lane] == value) << lane;
  __syncwarp();
  return same;
}

namespace megaframe {
using std::min;

template <typename Kernel, typename... Arguments>
int launch(Kernel kernel, int64_t blocks, void*, Arguments... arguments) {
  using namespace emulated;
  block = std::make_unique<std::barrier<>>(emulated::kThreads);
  warps.clear();
  for (int warp = 0; warp < emulated::kThreads / emulated::kLanes; ++warp)
    warps.push_back(std::make_unique<std::barrier<>>(emulated::kLanes));
  std::barrier between(emulated::kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < emulated::kThreads; ++thread)
    threads.emplace_back([&, thread] {
      threadIdx.x = thread;
      for (int64_t at = 0; at < blocks; ++at) {
        blockIdx.x = static_cast<unsigned>(at);
        kernel(arguments...);
        between.arrive_and_wait();
      }
    });
  for (auto& thread : threads) thread.join();
  return 0;
}
}  // namespace megaframe
