// Included by all sources here: element types, loads and stores, and the launch of a kernel.
//
// No torch header is included, so this compiles in seconds and does not break when torch changes.
// Kernels use a small part of CUDA (shared memory, barriers, warp votes), so that the tests can run
// these same files on a CPU with a header that emulates the CUDA runtime.
#pragma once

#ifndef MEGAFRAME_EMULATED
#include <cuda_runtime.h>
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define MEGAFRAME_EXPORT extern "C" __attribute__((visibility("default")))

namespace megaframe {

constexpr int kThreads = 256;
constexpr int kLanes = 32;

// Element types, with the numbers that Python passes (`cuda_library.KINDS`).
enum Kind : int { kFloat = 0, kBFloat16 = 1, kHalf = 2 };

#ifndef MEGAFRAME_EMULATED
template <typename Kernel, typename... Arguments>
int launch(Kernel kernel, int64_t blocks, void* stream, Arguments... arguments) {
  if (blocks == 0) return 0;
  kernel<<<dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
           static_cast<cudaStream_t>(stream)>>>(arguments...);
  // Get and clear the error: the caller is told of it, so the next launch must not fail with it.
  return static_cast<int>(cudaGetLastError());
}
#endif

// Loads four elements of type `kind`, starting at element `at`, which must be aligned to all four.
__device__ inline void load4(const void* base, Kind kind, int64_t at, float (&out)[4]) {
  if (kind == kFloat) {
    // One load of 16 bytes.
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
    out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
    return;
  }
  const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(base) + at);
  if (kind == kBFloat16) {
    // bf16 is the upper half of fp32, so widening is a shift.
    out[0] = __uint_as_float(bits.x << 16), out[1] = __uint_as_float(bits.x & 0xffff0000u);
    out[2] = __uint_as_float(bits.y << 16), out[3] = __uint_as_float(bits.y & 0xffff0000u);
    return;
  }
  const uint32_t words[2] = {bits.x, bits.y};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)))));
}

__device__ inline uint16_t narrow(float value, Kind kind) {
  // _rn: to nearest, ties to even.
  return kind == kBFloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                           : __half_as_ushort(__float2half_rn(value));
}

__device__ inline void store4(void* base, Kind kind, int64_t at, const float (&in)[4]) {
  if (kind == kFloat) {
    *reinterpret_cast<float4*>(static_cast<float*>(base) + at) =
        make_float4(in[0], in[1], in[2], in[3]);
    return;
  }
  uint32_t half[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) half[i] = narrow(in[i], kind);
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(base) + at) =
      make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
}

__device__ inline float load1(const void* base, Kind kind, int64_t at) {
  if (kind == kFloat) return static_cast<const float*>(base)[at];
  const uint16_t bits = static_cast<const uint16_t*>(base)[at];
  return kind == kBFloat16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                           : __half2float(__ushort_as_half(bits));
}

__device__ inline void store1(void* base, Kind kind, int64_t at, float value) {
  if (kind == kFloat)
    static_cast<float*>(base)[at] = value;
  else
    static_cast<uint16_t*>(base)[at] = narrow(value, kind);
}

}  // namespace megaframe
