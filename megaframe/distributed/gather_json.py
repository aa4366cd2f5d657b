"""All-gathers plain data as JSON, so that data from other ranks is never unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from megaframe.distributed.collectives import Group, all_gather


def gather_json(group: Group, value: Any) -> list[Any]:
    """Return each rank's JSON value, in rank order. The group must communicate host tensors."""
    texts = gather_rows(group, torch.tensor([*json.dumps(value).encode()], dtype=torch.uint8))
    return [json.loads(text.numpy().tobytes()) for text in texts]


def gather_rows(group: Group, row: Tensor) -> list[Tensor]:
    """Return each rank's row [any length], in rank order."""
    lengths = all_gather(torch.tensor([len(row)]), group).wait().tolist()
    if not any(lengths):
        return [row] * group.size
    # With rows of one length the group may pass them around a ring, and need not connect all pairs.
    padded = row.new_zeros(max(lengths))
    padded[: len(row)] = row
    rows = all_gather(padded, group).wait().view(group.size, -1)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
