"""Which experts a row goes to, by its scores.

Shape legend: R rows of this rank, K choices, E experts, G groups of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.config import MoEConfig


def choose_experts(moe: MoEConfig, scores_RE: Tensor) -> Tensor:
    """Return the experts of each row with the highest scores, int64 [R, K].

    Args:
        moe: How many are chosen, and from how many groups.
        scores_RE: Scores [R, E] without gradients, with the bias that balances experts.
    """
    if moe.top_groups < moe.groups:
        grouped = scores_RE.unflatten(1, (moe.groups, -1))
        # A group is as good as the sum of its best experts; all others are closed to the row.
        best_RG = grouped.topk(moe.group_best, -1).values.sum(-1)
        groups = best_RG.topk(moe.top_groups, -1).indices
        open_RG = torch.zeros_like(best_RG, dtype=torch.bool).scatter_(1, groups, True)
        grouped = grouped.masked_fill(~open_RG[..., None], -torch.inf)
        scores_RE = grouped.flatten(1)
    return scores_RE.topk(moe.top_k, -1).indices
