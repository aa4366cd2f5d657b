"""The experts of a row are those with the highest scores, of the groups that are best."""

import pytest
import torch

from megaframe.config import MoEConfig
from megaframe.model.moe.top_k import choose_experts


def find_experts(moe, scores):
    """Return the experts of one row, one after the other, by sorting in Python."""
    size = moe.experts // moe.groups
    groups = [range(start, start + size) for start in range(0, moe.experts, size)]

    def sum_best(group):
        return sum(sorted((scores[expert] for expert in group), reverse=True)[: moe.group_best])

    best = sorted(groups, key=sum_best, reverse=True)[: moe.top_groups]
    open_experts = [expert for group in best for expert in group]
    return sorted(open_experts, key=lambda expert: scores[expert], reverse=True)[: moe.top_k]


@pytest.mark.parametrize(("groups", "top_groups", "group_best"), [(1, 1, 1), (4, 2, 1), (4, 3, 2)])
def test_experts_are_the_best_of_the_best_groups(groups, top_groups, group_best):
    moe = MoEConfig(
        experts=12, top_k=3, groups=groups, top_groups=top_groups, group_best=group_best
    )
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50, 12, generator=generator, dtype=torch.float64)
    assert choose_experts(moe, scores).tolist() == [
        find_experts(moe, row) for row in scores.tolist()
    ]
