"""All-to-all with parts of any sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from megaframe.comm import Group, Pending, collective


def all_to_all_uneven(
    parts: Tensor, leaving: Sequence[int], coming: Sequence[int], group: Group
) -> Pending[Tensor]:
    """Flat `parts`, the first leaving[0] elements of which go to rank 0 of the group, and so on.
    The result is flat as well: coming[0] elements from rank 0, and so on."""
    if group.handle is None:
        return Pending(parts)
    out = parts.new_empty(sum(coming))
    group.traffic.count((len(parts) - leaving[group.index]) * parts.element_size())
    return collective(
        out,
        group,
        lambda: dist.all_to_all_single(
            out, parts, list(coming), list(leaving), group.handle, async_op=True
        ),
    )
