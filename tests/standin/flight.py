"""A flight recorder like NCCL's: the latest transfers of this process, in torch's format 2.10."""

import pickle
import time
import traceback
from collections import Counter, deque

import torch.distributed as dist
from torch._C import _distributed_c10d

_NAMES = {kind: f"{kind}_single" for kind in ("all_gather", "reduce_scatter", "all_to_all")}
_entries, _groups, _numbers = deque(maxlen=2000), {}, Counter()


def note(group, name, reads, writes, work, peer=None):
    """Note a transfer of a group. peer: the other rank of a message."""
    key = (group.group_name, "undefined")
    _groups[key[0]] = [*map(int, dist.get_process_group_ranks(group.gloo))]
    kind = "p2p_seq_id" if peer is not None else "collective_seq_id"
    _numbers[key[0], kind] += 1
    _numbers[key[0], "op_id"] += 1
    here, what = group.rank(), _NAMES.get(name, name)
    if peer is not None:
        what = f"send {here}->{peer}" if name == "send" else f"recv {here}<-{peer}"
    frames = traceback.extract_stack()[:-3]
    _entries.append(
        (
            {
                "frames": [
                    {"name": one.name, "filename": one.filename, "line": one.lineno}
                    for one in reversed(frames)
                ],
                "pg_id": int(key[0]) if key[0].isdigit() else 0,
                "process_group": key,
                "thread_name": "python",
                "thread_id": "1",
                "collective_seq_id": _numbers[key[0], "collective_seq_id"],
                "p2p_seq_id": _numbers[key[0], "p2p_seq_id"],
                "op_id": _numbers[key[0], "op_id"],
                "profiling_name": f"nccl:{what}",
                "time_created_ns": time.time_ns(),
                "input_sizes": [list(x.shape) for x in (reads or writes)],
                "input_dtypes": [_type(x) for x in (reads or writes)],
                "output_sizes": [list(x.shape) for x in (writes or reads)],
                "output_dtypes": [_type(x) for x in (writes or reads)],
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "timeout_ms": 600_000,
                "is_p2p": peer is not None,
            },
            work,
        )
    )


def dump(includeCollectives=True, includeStackTraces=True, onlyActive=False):
    entries = []
    for number, (entry, work) in enumerate(_entries):
        done = work.is_completed()
        if not (done and onlyActive):
            state = {"state": "completed" if done else "started", "retired": done}
            entries.append({**entry, "record_id": number, **state})
    config = {
        name: {"name": name, "desc": "undefined", "ranks": str(ranks)}
        for name, ranks in _groups.items()
    }
    whole = {"version": "2.10", "pg_config": config, "pg_status": {}, "comm_lib_version": "0"}
    return pickle.dumps({**whole, "entries": entries})


def reset():
    for kept in (_entries, _groups, _numbers):
        kept.clear()


def _type(x):
    name = str(x.dtype).removeprefix("torch.")
    return {"float32": "Float", "float64": "Double", "int64": "Long"}.get(name, name)


def install():
    _distributed_c10d._dump_nccl_trace = dump
    _distributed_c10d._reset_fr_recording_nccl = reset
