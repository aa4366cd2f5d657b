// What torch asks of a CUDA device: memory, the current device and stream, events.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>

#include "clocks.h"

namespace fake_cuda {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

inline int device_count() {
  const char* given = std::getenv("FAKE_CUDA_DEVICES");
  return given ? std::atoi(given) : 1;
}

inline thread_local int current_device = 0;

// -------------------------------------------------------------------------------------- memory

constexpr size_t kAlignment = 512;  // that of CUDA's allocator

// Memory is filled with ones, which are NaN in every floating type: what nothing has written shows
// in the results.
inline void* obtain(size_t bytes, bool pinned) {
  Locked lock;
  const size_t size = std::max<size_t>((bytes + kAlignment - 1) / kAlignment, 1) * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, size);
  if (!memory) throw std::bad_alloc();
  std::memset(memory, 0xff, size);
  state.blocks[static_cast<char*>(memory)] = {size, current_stream, pinned, {}, {}};
  if (!pinned) state.peak = std::max(state.peak, state.used += size);
  return memory;
}

inline void give_back(void* memory) {
  Locked lock;
  auto found = state.blocks.find(static_cast<char*>(memory));
  if (found == state.blocks.end()) return;
  const Block& block = found->second;
  if (!block.pinned) {
    check_lifetime(block);
    state.used -= block.size;
  }
  // Torch's allocator of pinned memory waits for copies by itself.
  remove_transfers({found->first, found->first + block.size}, false);
  state.blocks.erase(found);
  std::free(memory);
}

struct Allocator final : c10::Allocator {
  explicit Allocator(bool pinned) : pinned(pinned) {}
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? obtain(bytes, pinned) : nullptr;
    const Device device =
        pinned ? Device(DeviceType::CPU) : Device(DeviceType::CUDA, current_device);
    return {memory, memory, &give_back, device};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  const bool pinned;
};

inline Allocator device_memory(false), pinned_memory(true);

inline void record_memory(const void* address, int stream) {
  Locked lock;
  if (auto* found = find_block(address)) found->second.recorded.push_back(stream);
}

// -------------------------------------------------------------------------------------- events

struct Event {
  bool recorded = false, captured = false;
  Clock clock{};
  std::chrono::steady_clock::time_point moment;
  double time = 0;  // of the pace
};

inline void record_event(Event& event, int stream) {
  Locked lock;
  tick(stream, false);
  event = {true, capture.has(stream), state.streams[stream], std::chrono::steady_clock::now(),
           state.times[stream]};
}

// Makes later work of a stream wait. A stream that waits for an event of a capture joins it.
inline void wait_event(const Event& event, int stream) {
  Locked lock;
  if (!event.recorded) {
    report("event", "a stream waits for an event that was never recorded");
    return;
  }
  if (event.captured && capture.origin < 0)
    report("capture", "a stream waits for an event of a capture that is over");
  if (event.captured && capture.origin >= 0) capture.joined[stream] = true;
  if (!event.captured && capture.has(stream))
    report("capture", "a captured stream waits for an event from outside");
  join(state.streams[stream], event.clock);
  state.times[stream] = std::max(state.times[stream], event.time);
}

// -------------------------------------------------------------------------------- hooks, guard

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  Device getDeviceFromPtr(void*) const override {
    return Device(DeviceType::CUDA, fake_cuda::current_device);
  }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex current_device() const override { return fake_cuda::current_device; }
  DeviceIndex getCurrentDevice() const override { return fake_cuda::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { fake_cuda::current_device = device; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

// What the autograd engine and torch's guards use to change devices and streams.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    return Device(DeviceType::CUDA, std::exchange(current_device, device.index()));
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Stream getStream(Device device) const override { return named(device, current_stream); }
  c10::Stream getDefaultStream(Device device) const override { return named(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return named(stream.device(), std::exchange(current_stream, static_cast<int>(stream.id())));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_memory(memory.get(), static_cast<int>(stream.id()));
  }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    record_event(*static_cast<Event*>(*event), static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_event(*static_cast<Event*>(event), static_cast<int>(stream.id()));
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  c10::Stream named(Device device, int stream) const {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), stream);
  }
};

inline Guard guard;

}  // namespace fake_cuda

namespace at {
using StandinHooks = ::fake_cuda::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", StandinHooks)
}  // namespace at
