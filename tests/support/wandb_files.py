"""What an offline run of Weights & Biases has in its file, read without wandb's own reader."""

from __future__ import annotations

import json
import struct

import pytest
from patience import wait_until


def without_wandb_key(monkeypatch, home):
    """Make `home` the user's home, and let nothing name an account or a server."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


def read_wandb_records(path):
    """Return the records of an offline run's file.

    They are protocol buffers, divided into pieces in blocks of 32 KiB as in LevelDB's log. wandb's
    own reader is not used, because some versions of its package lack it.
    """
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data = path.read_bytes()
    position, parts, records = 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            records.append(internal.Record.FromString(parts))
            parts = b""
    return records


def read_wandb_rows(path):
    """Return the history of a finished run. First waits for wandb's own process, which completes
    the run's file."""
    wait_until(lambda: any(record.HasField("exit") for record in read_wandb_records(path)))
    histories = (r.history.item for r in read_wandb_records(path) if r.HasField("history"))
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for items in histories
    ]
