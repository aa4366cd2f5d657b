// The library that Python loads: registers the device, and what Python asks of streams, events and
// graphs.
#include "dispatch.h"

namespace fake_cuda {

struct AtStart {
  AtStart() {
    c10::SetAllocator(DeviceType::CUDA, &device_memory, 255);
    c10::impl::device_guard_impl_registry[static_cast<int>(DeviceType::CUDA)].store(&guard);
  }
};
inline AtStart at_start;

struct Graph {
  Tape tape;
  std::vector<Access> accesses;
};

inline void host_reaches(double time) { state.host_time = std::max(state.host_time, time); }

inline Clock whole_device() {
  Clock all{};
  for (const Clock& one : state.streams) join(all, one);
  return all;
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

void set_reporter(Reporter given) { reporter = given; }

int get_device() { return current_device; }
void set_device(int device) { current_device = device; }
int count_devices() { return device_count(); }
int64_t used_memory() { return state.used; }
int64_t peak_memory() { return state.peak; }
void reset_peak_memory() { state.peak = state.used; }

int get_stream() { return current_stream; }
void set_stream(int stream) { current_stream = stream; }

// Returns the number of a new stream, or -1 if there are too many.
int new_stream() {
  Locked lock;
  if (state.streams.size() == kStreams) return -1;
  state.streams.push_back(state.host);
  return static_cast<int>(state.streams.size()) - 1;
}

// What launching and running a piece of work takes from now on, in nanoseconds.
void set_pace(double launch, double work) { state.pace = {launch, work}; }
int has_pace() { return state.pace.set(); }
double stream_time(int stream) { return state.times[stream]; }
void host_spends(double nanoseconds) { state.host_time += nanoseconds; }

void synchronize_stream(int stream) {
  Locked lock;
  host_reaches(state.times[stream]);
  host_waits("a stream", state.streams[stream]);
}

void synchronize_device() {
  Locked lock;
  host_reaches(*std::max_element(state.times.begin(), state.times.end()));
  host_waits("the device", whole_device());
}

Event* new_event() { return new Event; }
void delete_event(Event* event) { delete event; }
void event_record(Event* event, int stream) { record_event(*event, stream); }
void event_wait(Event* event, int stream) { wait_event(*event, stream); }
int event_recorded(Event* event) { return event->recorded; }

void event_synchronize(Event* event) {
  Locked lock;
  if (!event->recorded) return;
  host_reaches(event->time);
  host_waits("an event", event->clock);
}

// Returns whether the host knows that an event has passed. now: it has passed by now.
int event_query(Event* event, int now) {
  Locked lock;
  if (capturing()) report("capture", "an event is queried during a capture");
  if (event->captured) report("capture", "an event of a capture is queried");
  const bool passed = state.pace.set() ? event->time <= state.host_time : now;
  if (event->recorded && passed) host_learns(event->clock);
  return !event->recorded || reached(state.host, event->clock);
}

// Moves an event, such as the end of a transfer that waited for another rank.
void event_not_before(Event* event, double time) { event->time = std::max(event->time, time); }

double event_milliseconds(Event* first, Event* last) {
  if (state.pace.set()) return (last->time - first->time) / 1e6;
  return std::chrono::duration<double, std::milli>(last->moment - first->moment).count();
}

// Something that is no operator of torch runs on the current stream: a kernel, a transfer.
void begin_work(const char* name) {
  Locked lock;
  state.work = name;
  tick(current_stream);
}

void touch_memory(char* begin, char* end, int write) {
  Locked lock;
  touch({begin, end}, current_stream, write);
}

int is_capturing() { return capturing(); }

Graph* begin_capture() {
  Locked lock;
  auto* graph = new Graph;
  capture = {{}, current_stream, &graph->accesses};
  capture.joined[current_stream] = true;
  tape = &graph->tape;
  return graph;
}

void end_capture() {
  Locked lock;
  const Clock known = state.streams[capture.origin];
  for (size_t i = 0; i < state.streams.size(); ++i)
    if (capture.has(i) && known[i] < state.streams[i][i])
      report("capture", "a stream that joined a capture is not waited for at its end");
  for (Clock& one : state.streams) join(one, known);  // on a GPU nothing of it has run yet
  capture = {};
  tape = nullptr;
}

void capture_call(void (*call)()) { remember(call); }

void replay(Graph* graph) {
  {
    Locked lock;
    state.work = "a graph";
    tick(current_stream);
    for (const Access& one : graph->accesses) touch(one.span, current_stream, one.write);
  }
  for (const auto& work : graph->tape) work();
}

void delete_graph(Graph* graph) { delete graph; }
}
