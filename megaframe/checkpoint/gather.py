"""All-gathers plain data as JSON, so that data from other ranks is never unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from megaframe.comm import Group, all_gather
from megaframe.comm.uneven import all_gather_uneven


def gather_json(group: Group, value: Any) -> list[Any]:
    """Return each rank's JSON value, in rank order. The group must communicate host tensors."""
    texts = gather_rows(group, torch.tensor([*json.dumps(value).encode()], dtype=torch.uint8))
    return [json.loads(text.numpy().tobytes()) for text in texts]


def gather_rows(group: Group, row: Tensor) -> list[Tensor]:
    """Return each rank's row [any length], in rank order."""
    lengths = all_gather(torch.tensor([len(row)]), group).wait().tolist()
    return list(all_gather_uneven(row, lengths, group).wait().split(lengths))
