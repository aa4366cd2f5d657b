"""Plain data of all ranks, as JSON: what ranks tell each other is not unpickled either."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from megaframe.comm import Group, all_gather
from megaframe.comm.uneven import all_gather_uneven


def gather_json(group: Group, value: Any) -> list[Any]:
    """The value of each rank of a group that is on the host's memory, in order."""
    texts = gather_rows(group, torch.tensor([*json.dumps(value).encode()], dtype=torch.uint8))
    return [json.loads(text.numpy().tobytes()) for text in texts]


def gather_rows(group: Group, row: Tensor) -> list[Tensor]:
    """The row [any length] of each rank, in order."""
    lengths = all_gather(torch.tensor([len(row)]), group).wait().tolist()
    return list(all_gather_uneven(row, lengths, group).wait().split(lengths))
