// The order of a batch's choices by expert, as `megaframe_kernels/experts/expert_order.py` defines
// it: a stable counting sort in three launches, without atomics.
//
// Each warp has a run of choices and a row of counts. One instruction finds the lanes that chose
// the same expert, which gives exact and ordered counts and ranks. Atomics would be either fast or
// ordered, not both. Triton has no such instruction.

#include "launch.cuh"

namespace megaframe {

constexpr int kWarps = kThreads / kLanes;
constexpr int kRounds = 8;                           // choices per lane
constexpr int kRun = kRounds * kLanes;               // choices per warp
constexpr int kBlockChoices = kWarps * kRun;         // choices per block
constexpr int kMostExperts = 1024;

// counts[e] += number of lanes of this warp that chose e, with one choice per lane. Returns how
// many lanes before this one chose the same expert; `before` receives the old counts[e].
__device__ inline int count_round(int expert, int32_t* counts, int32_t& before) {
  const int lane = threadIdx.x % kLanes;
  // All lanes take part, those without a choice as expert -1.
  const unsigned same = __match_any_sync(0xffffffffu, expert);
  // Lanes are in the order of choices, so ranks are too and the sort is stable.
  const int rank = __popc(same & ((1u << lane) - 1u));
  before = expert >= 0 ? counts[expert] : 0;
  // All lanes have read the old count before one of them replaces it.
  __syncwarp();
  if (rank == 0 && expert >= 0) counts[expert] = before + __popc(same);
  // The new counts are visible before the warp's next round reads them.
  __syncwarp();
  return rank;
}

// Returns the expert of a choice, or -1 if the choice or the expert does not exist.
__device__ inline int choice_of(const int32_t* experts, int64_t choice, int64_t choices,
                                int count) {
  const int expert = choice < choices ? experts[choice] : -1;
  return 0 <= expert && expert < count ? expert : -1;
}

// Counts this block's choices: counts[w * count + e] for warp w and expert e.
__device__ inline void count_block(const int32_t* experts, int64_t choices, int count,
                                   int32_t* counts) {
  for (int i = threadIdx.x; i < kWarps * count; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockChoices + warp * kRun;
  for (int round = 0; round < kRounds; ++round) {
    int32_t before;
    const int expert = choice_of(experts, first + round * kLanes + lane, choices, count);
    count_round(expert, counts + warp * count, before);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    count_choices(const int32_t* experts, int64_t choices, int count, int32_t* starts) {
  // 32 KiB: one row for each warp, so warps share no counts and need no atomics.
  __shared__ int32_t counts[kWarps * kMostExperts];
  count_block(experts, choices, count, counts);
  for (int expert = threadIdx.x; expert < count; expert += kThreads) {
    int32_t total = 0;
    for (int warp = 0; warp < kWarps; ++warp) total += counts[warp * count + expert];
    starts[static_cast<int64_t>(blockIdx.x) * count + expert] = total;
  }
}

// Runs in one block. Turns the counts of blocks into their first places, and sets `ends` to where
// each expert's places end.
__global__ void __launch_bounds__(kThreads)
    scan_counts(int32_t* starts, int blocks, int count, int32_t* ends) {
  __shared__ int32_t totals[kMostExperts];
  for (int expert = threadIdx.x; expert < count; expert += kThreads) {
    int32_t total = 0;
#pragma unroll 8
    for (int block = 0; block < blocks; ++block)
      total += starts[static_cast<int64_t>(block) * count + expert];
    totals[expert] = total;
  }
  __syncthreads();
  // Inclusive prefix sums by doubling steps. All are read before any is written, with barriers in
  // between.
  for (int step = 1; step < count; step *= 2) {
    int32_t grown[kMostExperts / kThreads];
    for (int i = 0; i < kMostExperts / kThreads; ++i) {
      const int expert = i * kThreads + threadIdx.x;
      if (expert < count) grown[i] = totals[expert] + (expert >= step ? totals[expert - step] : 0);
    }
    __syncthreads();
    for (int i = 0; i < kMostExperts / kThreads; ++i) {
      const int expert = i * kThreads + threadIdx.x;
      if (expert < count) totals[expert] = grown[i];
    }
    __syncthreads();
  }
  for (int expert = threadIdx.x; expert < count; expert += kThreads) {
    ends[expert] = totals[expert];
    int32_t place = expert > 0 ? totals[expert - 1] : 0;
#pragma unroll 8
    for (int block = 0; block < blocks; ++block) {
      int32_t* at = starts + static_cast<int64_t>(block) * count + expert;
      const int32_t mine = *at;
      *at = place;
      place += mine;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    place_choices(const int32_t* experts, int64_t choices, int count, const int32_t* starts,
                  int32_t* order, int32_t* places) {
  __shared__ int32_t counts[kWarps * kMostExperts];
  count_block(experts, choices, count, counts);
  for (int expert = threadIdx.x; expert < count; expert += kThreads) {
    // Counts become first places: warps of a block follow each other in the order of choices.
    int32_t place = starts[static_cast<int64_t>(blockIdx.x) * count + expert];
    for (int warp = 0; warp < kWarps; ++warp) {
      const int32_t mine = counts[warp * count + expert];
      counts[warp * count + expert] = place;
      place += mine;
    }
  }
  __syncthreads();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockChoices + warp * kRun;
  for (int round = 0; round < kRounds; ++round) {
    const int64_t choice = first + round * kLanes + lane;
    int32_t before;
    const int expert = choice_of(experts, choice, choices, count);
    const int rank = count_round(expert, counts + warp * count, before);
    if (expert >= 0) {
      places[choice] = before + rank;
      // places and order are inverse, and each element is written once.
      order[before + rank] = static_cast<int32_t>(choice);
    }
  }
}

}  // namespace megaframe

MEGAFRAME_EXPORT int megaframe_expert_order_blocks(int64_t choices) {
  return static_cast<int>((choices + megaframe::kBlockChoices - 1) / megaframe::kBlockChoices);
}

// experts [choices]: numbers below `count`, which is at most 1024. starts: room for blocks x count.
// Outputs: order, places [choices]; ends [count]. Returns a CUDA error, 0 for none.
MEGAFRAME_EXPORT int megaframe_expert_order(const int32_t* experts, int64_t choices, int count,
                                            int32_t* starts, int32_t* order, int32_t* places,
                                            int32_t* ends, void* stream) {
  using namespace megaframe;
  const int blocks = megaframe_expert_order_blocks(choices);
  int error = launch(count_choices, blocks, stream, experts, choices, count, starts);
  if (error == 0) error = launch(scan_counts, 1, stream, starts, blocks, count, ends);
  if (error == 0)
    error = launch(place_choices, blocks, stream, experts, choices, count,
                   static_cast<const int32_t*>(starts), order, places);
  return error;
}
