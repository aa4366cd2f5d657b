"""A flight recorder like NCCL's: the latest transfers of this process, in torch's format 2.10."""

import pickle
import time
import traceback
from collections import Counter, deque
from functools import partial

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.flight_recorder.components.types import COLLECTIVES

_NAMES = {
    "all_gather": ("all_gather_single", "_all_gather_base"),
    "reduce_scatter": ("reduce_scatter_single", "_reduce_scatter_base"),
    "all_to_all": ("all_to_all_single", "all_to_all"),
    "barrier": ("barrier", "all_reduce_barrier"),
}
"""Of a kind of transfer: as torch 2.13 writes it, and as torch 2.11 does."""
_entries, _groups, _numbers = deque(maxlen=2000), {}, Counter()


def note(group, parts, reads, writes, works):
    """Note the transfers of a call of a group. parts: kind and peer of each; collectives have no
    peer. works: what knows whether they are done."""
    sends, receives = iter(reads), iter(writes)
    done = partial(are_all_done, works)
    for kind, peer in parts:
        if peer is None:
            _note(group, kind, reads or writes, writes or reads, done)
        else:
            x = next(sends if kind == "send" else receives)
            name = "send {}->{}" if kind == "send" else "recv {}<-{}"
            _note(group, name.format(group.rank(), peer), [x], [x], done, message=True)


def are_all_done(works):
    return all(work.is_completed() for work in works)


def _note(group, name, reads, writes, done, message=False):
    key = (group.group_name, "undefined")
    _groups[key[0]] = [*map(int, dist.get_process_group_ranks(group.gloo))]
    _numbers[key[0], "p2p_seq_id" if message else "collective_seq_id"] += 1
    _numbers[key[0], "op_id"] += 1
    frames = traceback.extract_stack()[:-4]
    _entries.append(
        (
            {
                "frames": [
                    {"name": frame.name, "filename": frame.filename, "line": frame.lineno}
                    for frame in reversed(frames)
                ],
                "pg_id": int(key[0]) if key[0].isdigit() else 0,
                "process_group": key,
                "thread_name": "python",
                "thread_id": "1",
                "collective_seq_id": _numbers[key[0], "collective_seq_id"],
                "p2p_seq_id": _numbers[key[0], "p2p_seq_id"],
                "op_id": _numbers[key[0], "op_id"],
                "profiling_name": f"nccl:{_name_transfer(name)}",
                "time_created_ns": time.time_ns(),
                "input_sizes": [list(x.shape) for x in reads],
                "input_dtypes": [_name_type(x) for x in reads],
                "output_sizes": [list(x.shape) for x in writes],
                "output_dtypes": [_name_type(x) for x in writes],
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "timeout_ms": 600_000,
                "is_p2p": message,
            },
            done,
        )
    )


def dump(includeCollectives=True, includeStackTraces=True, onlyActive=False):
    entries = []
    for number, (entry, is_done) in enumerate(_entries):
        done = is_done()
        if not (done and onlyActive):
            state = {"state": "completed" if done else "started", "retired": done}
            entries.append({**entry, "record_id": number, **state})
    config = {
        name: {"name": name, "desc": "undefined", "ranks": str(ranks)}
        for name, ranks in _groups.items()
    }
    header = {"version": "2.10", "pg_config": config, "pg_status": {}, "comm_lib_version": "0"}
    return pickle.dumps({**header, "entries": entries})


def reset():
    for records in (_entries, _groups, _numbers):
        records.clear()


def _name_transfer(kind):
    """Return the name that this torch knows."""
    return next((name for name in _NAMES.get(kind, ()) if name in COLLECTIVES), kind)


def _name_type(x):
    name = str(x.dtype).removeprefix("torch.")
    return {"float32": "Float", "float64": "Double", "int64": "Long"}.get(name, name)


def install():
    _distributed_c10d._dump_nccl_trace = dump
    _distributed_c10d._reset_fr_recording_nccl = reset
