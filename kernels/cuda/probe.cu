// Tests whether this build can use the GPU at all: the driver may be older than the compiler.

#include "launch.cuh"

MEGAFRAME_EXPORT int megaframe_probe() {
  // Frees nothing, but makes the runtime initialise the device.
  const cudaError_t error = cudaFree(nullptr);
  return static_cast<int>(error);
}
