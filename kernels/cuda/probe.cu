// Tests whether this build can use the GPU at all: the driver may be older than the compiler.

#include "launch.cuh"

MEGAFRAME_EXPORT int megaframe_probe() {
  const cudaError_t error = cudaFree(nullptr);
  return static_cast<int>(error);
}
