// Vector clocks: which work is known to be done when other work starts.
//
// Every stream counts its own work, and knows how far the other streams had come when it last
// waited for them; so does the host. Two accesses to the same memory are in order only if the
// second stream knew of the first one. If it did not, a GPU may run them in either order, even
// though they run one after the other here.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fake_cuda {

constexpr int kStreams = 96;  // of a process; number 0 is the default stream
using Clock = std::array<uint32_t, kStreams>;

inline void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], other[i]);
}

inline bool reached(const Clock& known, const Clock& wanted) {
  return std::equal(wanted.begin(), wanted.end(), known.begin(), std::less_equal<>());
}

struct Span {
  char* begin;
  char* end;

  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
  bool covers(const Span& other) const { return begin <= other.begin && other.end <= end; }
  size_t size() const { return end - begin; }
};

struct Access {
  Span span;
  int stream;
  uint32_t time;  // of its stream
  bool write;
};

// Memory from one allocation. stream: the one that allocated it, and for which the allocator would
// use it again without any wait. recorded: the streams of record_stream.
struct Block {
  size_t size;
  int stream;
  bool pinned;
  std::vector<Access> accesses;
  std::vector<int> recorded;
};

// A copy between pinned memory and the device that the host does not know to be done. bytes: what
// the host will find there, or what it must not have changed.
struct Transfer {
  Span host;
  std::vector<char> bytes;
  int stream;
  uint32_t time;
  bool to_host;
};

// What work takes if a test wants to know: nanoseconds of the host to launch it, and of the stream
// to run it. With both zero, events have the time at which the host recorded them.
struct Pace {
  double launch = 0, work = 0;

  bool set() const { return launch > 0 || work > 0; }
};

struct State {
  std::map<char*, Block> blocks;  // by first address
  std::vector<Clock> streams{1};
  Clock host{};
  std::vector<Transfer> transfers;
  int64_t used = 0, peak = 0;  // bytes of the device
  std::string work = "?";      // what runs now, for reports
  Pace pace;
  double host_time = 0;  // of the pace, in nanoseconds
  std::array<double, kStreams> times{};
};

inline State state;
inline thread_local int current_stream = 0;

// ------------------------------------------------------------------------------------- reports

using Reporter = void (*)(const char* kind, const char* text);
inline Reporter reporter = nullptr;
inline std::recursive_mutex mutex;
inline thread_local std::vector<std::pair<std::string, std::string>> untold;
inline thread_local int depth = 0;

inline void report(const std::string& kind, const std::string& text) {
  untold.emplace_back(kind, text);
}

// The lock of everything here. Reports are handed over when it is released, because Python, which
// takes them, has a lock of its own.
class Locked {
 public:
  Locked() {
    mutex.lock();
    ++depth;
  }
  ~Locked() {
    mutex.unlock();
    if (--depth) return;
    for (const auto& [kind, text] : std::exchange(untold, {}))
      if (reporter) reporter(kind.c_str(), text.c_str());
  }
};

// ------------------------------------------------------------------------------------ captures

// A graph that is being captured: the streams that take part, and what they access.
struct Capture {
  std::array<bool, kStreams> joined{};
  int origin = -1;  // -1: nothing is captured
  std::vector<Access>* accesses = nullptr;

  bool has(int stream) const { return origin >= 0 && joined[stream]; }
};

inline Capture capture;

inline bool capturing() { return capture.has(current_stream); }

// -------------------------------------------------------------------------------------- memory

inline std::pair<char* const, Block>* find_block(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto found = state.blocks.upper_bound(at);
  if (found == state.blocks.begin()) return nullptr;
  --found;
  return at < found->first + found->second.size ? &*found : nullptr;
}

inline bool is_pinned(const void* address) {
  Locked lock;
  auto* found = find_block(address);
  return found && found->second.pinned;
}

inline uint32_t tick(int stream, bool takes_time = true) {
  state.host_time += takes_time * state.pace.launch;
  state.times[stream] =
      std::max(state.times[stream], state.host_time) + takes_time * state.pace.work;
  join(state.streams[stream], state.host);  // a launch follows what the host knows
  return ++state.streams[stream][stream];
}

inline void compare(const Access& now, const Access& before, bool pinned) {
  auto does = [](const Access& one, const char* write, const char* read) {
    return std::string(one.write ? write : read) + " on stream " + std::to_string(one.stream);
  };
  report("race", state.work + does(now, " writes", " reads") +
                     does(before, " what is written", " what is read") + ", without an order" +
                     (pinned ? " (pinned memory)" : ""));
}

// Notes that the latest work of a stream reads or writes memory, and reports accesses of others
// that it is not in order with.
inline void touch(Span span, int stream, bool write) {
  if (!span.size()) return;
  auto* found = find_block(span.begin);
  if (!found) {
    report("memory", state.work + " uses memory that is not allocated, or no longer");
    return;
  }
  Block& block = found->second;
  const Clock& clock = state.streams[stream];
  const Access now{span, stream, clock[stream], write};
  std::vector<Access> kept;
  for (const Access& before : block.accesses) {
    const bool in_order = before.stream == stream || clock[before.stream] >= before.time;
    if (span.meets(before.span) && !in_order && (write || before.write))
      compare(now, before, block.pinned);
    const bool replaced = in_order && write && span.covers(before.span);
    const bool repeated =
        before.stream == stream && before.write == write && span.covers(before.span);
    if (!replaced && !repeated) kept.push_back(before);
  }
  kept.push_back(now);
  block.accesses = std::move(kept);
  if (capture.has(stream)) capture.accesses->push_back(now);
}

// Memory that is freed is used again by the stream that allocated it. Others that use it must have
// been waited for, or named by record_stream.
inline void check_lifetime(const Block& block) {
  for (const Access& access : block.accesses) {
    auto knows = [&](int stream) {
      return access.stream == stream || state.streams[stream][access.stream] >= access.time;
    };
    const bool done = knows(block.stream) || state.host[access.stream] >= access.time;
    if (!done && std::none_of(block.recorded.begin(), block.recorded.end(), knows))
      report("lifetime", "memory of stream " + std::to_string(block.stream) +
                             " is freed while stream " + std::to_string(access.stream) +
                             " may use it");
  }
}

// ----------------------------------------------------------------------------------- transfers

inline void remove_transfers(Span host, bool arrive) {
  auto gone = [&](const Transfer& one) {
    if (!one.host.meets(host)) return false;
    if (arrive && one.to_host) std::memcpy(one.host.begin, one.bytes.data(), one.bytes.size());
    return true;
  };
  std::erase_if(state.transfers, gone);
}

// Starts a copy that the host is not going to wait for. What it brings to the host is hidden until
// the host knows that it is there.
inline void start_transfer(Span host, bool to_host) {
  const uint32_t time = state.streams[current_stream][current_stream];
  state.transfers.push_back({host, {host.begin, host.end}, current_stream, time, to_host});
  if (to_host) std::memset(host.begin, 0xff, host.size());
}

inline bool arrived(const Transfer& one) {
  if (state.host[one.stream] < one.time) return false;
  if (one.to_host) {
    std::memcpy(one.host.begin, one.bytes.data(), one.bytes.size());
  } else if (std::memcmp(one.host.begin, one.bytes.data(), one.bytes.size())) {
    report("race",
           "the host changes pinned memory before its copy to the device is known to be done");
  }
  return true;
}

inline void host_learns(const Clock& clock) {
  join(state.host, clock);
  std::erase_if(state.transfers, arrived);
}

inline void host_waits(const std::string& why, const Clock& clock) {
  if (capturing()) report("capture", "the host waits during a capture: " + why);
  host_learns(clock);
}

}  // namespace fake_cuda
