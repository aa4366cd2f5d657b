"""torch.cuda on top of the stand-in: the classes and functions that its compiled part would have.

A stream has its number among the stand-in's as `stream_id`. Torch's own classes of streams, events
and graphs are Python around these bases, and are what runs.
"""

import importlib

import torch

from fake_cuda.machine import host_waits, library, note, note_event, note_wait, report, take_calls
from fake_cuda.nccl_rules import Synchronize, find_line

_DEFAULT = -1
"""What the default stream, number 0, is called where 0 would mean a new one."""
errors = []
"""An error of the device, which all later calls return: only the end of the process clears it."""


def check_device():
    if errors:
        raise RuntimeError(f"CUDA error: {errors[0]}")


class CudaStreamBase:
    device_type = 1

    def __new__(cls, priority=0, stream_id=0, device_index=0, device_type=1):
        assert isinstance(priority, int)
        self = object.__new__(cls)
        self.stream_id = max(stream_id, 0) if stream_id else library.new_stream()
        assert self.stream_id >= 0, "the stand-in has no more streams"
        self.device_index = device_index if stream_id else library.get_device()
        return self

    @property
    def device(self):
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self):
        return self.stream_id

    def synchronize(self):
        check_device()
        library.synchronize_stream(self.stream_id)
        host_waits(self.stream_id)

    def query(self):
        check_device()
        return True

    def __eq__(self, other):
        return isinstance(other, CudaStreamBase) and other.stream_id == self.stream_id

    __hash__ = None


class CudaEventBase:
    """An event is as late as it can be: it has passed when it is queried for the second time, or
    when the host has learnt of it by waiting for it or for something later."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        self = object.__new__(cls)
        self._timing, self._event, self._queried = enable_timing, library.new_event(), False
        return self

    def record(self, stream):
        if self._timing and library.is_capturing():
            report("capture", "an event with a time is recorded during a capture")
        library.event_record(self._event, stream.stream_id)
        note_event(stream.stream_id, self._event)

    def wait(self, stream):
        library.event_wait(self._event, stream.stream_id)
        note_wait(stream.stream_id, self._event)

    def query(self):
        before, self._queried = self._queried, True
        return bool(library.event_query(self._event, before))

    def synchronize(self):
        check_device()
        library.event_synchronize(self._event)
        note(Synchronize(self._event, find_line()))

    def elapsed_time(self, end):
        for event in (self, end):
            if not (event._timing and library.event_recorded(event._event)):
                raise RuntimeError("Both events must have a time and be recorded")
            if not library.event_query(event._event, 0):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return library.event_milliseconds(self._event, end._event)

    def __del__(self):
        library.delete_event(self._event)


class CudaGraphBase:
    def __new__(cls, keep_graph=False):
        self = object.__new__(cls)
        self._graph, self._calls = None, []
        return self

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert library.get_stream() != 0, "a graph cannot be captured on the default stream"
        self._calls = take_calls()
        self._graph = library.begin_capture()

    def capture_end(self):
        library.end_capture()
        before, self._calls = self._calls, take_calls()
        note(*before)

    def replay(self):
        library.replay(self._graph)
        note(*self._calls)

    def reset(self):
        if self._graph is not None:
            library.delete_graph(self._graph)
        self._graph = None


class DeviceProperties:
    name = "NVIDIA H200"
    major, minor = 9, 0
    total_memory = 150_754_820_096
    multi_processor_count = 132


def _synchronize():
    check_device()
    library.synchronize_device()
    host_waits(None)


def _exchange_device(device):
    before = library.get_device()
    if device >= 0:
        library.set_device(device)
    return before


def _memory_stats(device):
    used, peak = library.used_memory(), library.peak_memory()
    stats = {"all": {"current": used, "peak": peak, "allocated": 0, "freed": 0}}
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
    return dict.fromkeys(kinds, stats)


# Functions of ctypes have no hash, which torch asks for: each is wrapped.
_COMPILED = {
    "_CudaStreamBase": CudaStreamBase,
    "_CudaEventBase": CudaEventBase,
    "_CUDAGraph": CudaGraphBase,
    "_CudaDeviceProperties": DeviceProperties,
    "_graph_pool_handle": lambda: (0, 1),
    "_cuda_isCurrentStreamCapturing": lambda: bool(library.is_capturing()),
    "_has_cuda": True,
    "_cuda_init": lambda: None,
    "_cuda_getDeviceCount": lambda: library.count_devices(),
    "_cuda_getDevice": lambda: library.get_device(),
    "_cuda_setDevice": lambda device: library.set_device(device),
    "_cuda_getCurrentStream": lambda device: (library.get_stream() or _DEFAULT, device, 1),
    "_cuda_getDefaultStream": lambda device: (_DEFAULT, device, 1),
    "_cuda_getCurrentRawStream": lambda device: library.get_stream(),
    "_cuda_setStream": lambda stream_id, **device: library.set_stream(max(stream_id, 0)),
    "_cuda_synchronize": lambda: _synchronize(),
    "_cuda_emptyCache": lambda: None,
    "_host_emptyCache": lambda: None,
    "_cuda_memoryStats": _memory_stats,
    "_cuda_resetPeakMemoryStats": lambda device: library.reset_peak_memory(),
    "_cuda_canDeviceAccessPeer": lambda device, other: False,
    "_can_use_flash_attention": lambda parameters, debug: False,
    "_can_use_cudnn_attention": lambda parameters, debug: False,
    "_nccl_version": lambda: 2 << 32 | 29 << 16 | 7,
    "_nccl_version_suffix": lambda: b"",
}


def _record_stream(x, stream):
    named = torch.Stream(stream.stream_id, stream.device_index, stream.device_type)
    torch.ops.aten.record_stream(x, named)


def install():
    """Make torch find devices."""
    torch._C.__dict__.update(_COMPILED)
    cuda = torch.cuda
    for module in (cuda.streams, cuda.graphs):
        importlib.reload(module)  # their classes inherit from the bases above
        vars(cuda).update({name: vars(module)[name] for name in module.__dict__.get("__all__", ())})
    cuda.Stream, cuda.Event = cuda.streams.Stream, cuda.streams.Event
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange_device
    cuda._get_device_properties = lambda device: DeviceProperties()
    cuda.default_generators = (torch.default_generator,) * library.count_devices()
    cuda.manual_seed_all = lambda seed: None
    cuda._cudart = object()  # it is loaded
    cuda._queued_calls.clear()  # checks of drivers and chips
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = _record_stream
