"""The compiled part of the stand-in, as Python calls it, what it has reported, and the calls that
the rules of NCCL and CUDA apply to (`nccl_rules.py`).

To be imported before anything imports torch, because torch asks only once which devices there are.
"""

import ctypes
import json
import os
import pickle
import sys
import threading
from ctypes import CFUNCTYPE, c_char_p, c_double, c_int, c_int64, c_void_p
from itertools import count
from pathlib import Path

from fake_cuda.nccl_rules import (
    QUEUES,
    LaunchKernel,
    RecordEvent,
    Synchronize,
    WaitEvent,
    find_line,
)

assert "torch" not in sys.modules, "the stand-in comes before torch"
library = ctypes.CDLL(os.environ["FAKE_CUDA_LIBRARY"], ctypes.RTLD_GLOBAL)

_HERE = Path(__file__).resolve().parent
_PROJECT = tuple(str(_HERE.parents[2] / name) for name in ("megaframe", "kernels", "tests"))
_SUPPORT, _PROGRAMS = str(_HERE), str(_HERE / "programs.py")
_REPORTER, _CALL = CFUNCTYPE(None, c_char_p, c_char_p), CFUNCTYPE(None)
_SIGNATURES = {
    "set_reporter": (None, _REPORTER),
    "get_device": (c_int,),
    "set_device": (None, c_int),
    "count_devices": (c_int,),
    "used_memory": (c_int64,),
    "peak_memory": (c_int64,),
    "reset_peak_memory": (None,),
    "get_stream": (c_int,),
    "set_stream": (None, c_int),
    "new_stream": (c_int,),
    "set_pace": (None, c_double, c_double),
    "has_pace": (c_int,),
    "stream_time": (c_double, c_int),
    "host_spends": (None, c_double),
    "event_not_before": (None, c_void_p, c_double),
    "synchronize_stream": (None, c_int),
    "synchronize_device": (None,),
    "new_event": (c_void_p,),
    "delete_event": (None, c_void_p),
    "event_record": (None, c_void_p, c_int),
    "event_wait": (None, c_void_p, c_int),
    "event_recorded": (c_int, c_void_p),
    "event_synchronize": (None, c_void_p),
    "event_query": (c_int, c_void_p, c_int),
    "event_milliseconds": (c_double, c_void_p, c_void_p),
    "begin_work": (None, c_char_p),
    "touch_memory": (None, c_void_p, c_void_p, c_int),
    "is_capturing": (c_int,),
    "begin_capture": (c_void_p,),
    "end_capture": (None,),
    "capture_call": (None, _CALL),
    "replay": (None, c_void_p),
    "delete_graph": (None, c_void_p),
}
for _name, (_result, *_arguments) in _SIGNATURES.items():
    getattr(library, _name).restype = _result
    getattr(library, _name).argtypes = _arguments

_file, _known = None, set()
_KEPT = []
"""What compiled code refers to."""


def report_to(path):
    """Write reports to a file from now on."""
    global _file
    _file = path


def report(kind, text):
    """Report what a GPU could not do, or would leave to chance: once, as a line of JSON with kind,
    text and place. The place is the innermost functions of this project, such as
    `activation_offload.py:take < stage.py:backward`; it is empty in threads of torch's own."""
    entry = (kind, text, _place())
    if entry not in _known and _file:
        _known.add(entry)
        with open(_file, "a") as file:  # at once, as a rank may end without notice
            file.write(json.dumps(entry) + "\n")


def _place():
    names, frame = [], sys._getframe(1)
    while frame is not None and len(names) < 3:
        code = frame.f_code
        supports = code.co_filename.startswith(_SUPPORT) and code.co_filename != _PROGRAMS
        if code.co_filename.startswith(_PROJECT) and not supports:
            names.append(f"{Path(code.co_filename).name}:{code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


def count_as_work(name, reads, writes):
    """Note that work of the current stream reads and writes these tensors of the host's view."""
    library.begin_work(name.encode())
    for tensors, write in ((reads, 0), (writes, 1)):
        for x in tensors:
            if x.numel():
                last = sum(
                    (size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)
                )
                start = x.data_ptr()
                library.touch_memory(start, start + (last + 1) * x.element_size(), write)


def repeat_in_graph(call, *referenced):
    """Let the graph that is being captured, if there is one, call this whenever it is replayed.
    kept: tensors whose memory the graph uses."""
    if library.is_capturing():
        called = _CALL(call)
        _KEPT.append((called, referenced))
        library.capture_call(called)


def _reported(kind, text):
    report(kind.decode(), text.decode())
    if kind == b"wait":
        host_waits(library.get_stream())


_reporter = _REPORTER(_reported)
library.set_reporter(_reporter)

# ----------------------------------------------------------------------------- calls, for the rules

_calls = []
_events = count(1)


def note(*calls):
    """Note calls of the host. A wait of another thread, such as one that saves, is not its
    own."""
    if not (_is_beside_the_host() and isinstance(calls[0], Synchronize)):
        _calls.extend(calls)


def _is_beside_the_host():
    """Return whether this is none of the threads that take turns as the host: the main one, that
    of `distributed/interleaving.py`, and those of backward passes, which Python has not started."""
    thread = threading.current_thread()
    known = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    return not known and not thread.name.startswith("interleaved")


def note_event(stream, event=None):
    """Note that an event is recorded behind the work of a stream. Returns its name."""
    event = next(_events) if event is None else event
    note(LaunchKernel(stream, find_line()))
    note(RecordEvent(stream, event))
    return event


def note_wait(stream, event):
    """Note that a stream waits for an event."""
    note(WaitEvent(stream, event, find_line()))


def host_waits(stream):
    """Note that the host waits for a stream; None for all of them."""
    note(Synchronize(None if stream is None else note_event(stream), find_line()))


def take_calls():
    """Return the calls so far, and begin anew."""
    calls = _calls[:]
    _calls.clear()
    return calls


def save_calls(path):
    """Write what has been noted, and the number of hardware queues, for `nccl_rules.simulate`."""
    queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES))
    with open(path, "wb") as file:
        pickle.dump((_calls, queues), file)
