"""Dropout masks: a function of seed, step, place, token and channel, with the given rate."""

import torch

from megaframe.model.dropout import Dropout, DropoutKeys

CHANNELS, LENGTH = 64, 50


def drop_values(samples, place="blocks.0.mlp", step=0, rate=0.3, seed=1):
    tokens = torch.tensor(samples)[:, None] * LENGTH + torch.arange(LENGTH)
    dropout = Dropout(rate, make_keys(seed, step), tokens.flatten())
    rows = dropout(torch.ones(tokens.numel(), CHANNELS, dtype=torch.float64), place)
    return rows.view(*tokens.shape, CHANNELS)


def make_keys(seed, step):
    keys = DropoutKeys(seed)
    keys.begin(step)
    return keys


def test_rate_and_scale():
    y = drop_values(list(range(40)))
    assert set(y.unique().tolist()) == {0.0, 1 / 0.7}
    kept_share = float((y != 0).double().mean())
    assert abs(kept_share - 0.7) < 5 * (0.21 / y.numel()) ** 0.5


def test_a_sample_has_its_mask_in_any_microbatch():
    together = drop_values([3, 9, 4])
    for row, sample in enumerate((3, 9, 4)):
        assert torch.equal(together[row : row + 1], drop_values([sample]))


def test_everything_else_draws_another_mask():
    masks = [
        drop_values([0]),
        drop_values([1]),
        drop_values([0], step=1),
        drop_values([0], place="blocks.1.mlp"),
        drop_values([0], seed=2),
    ]
    size = masks[0].numel()
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            same = float(((mask != 0) == (other != 0)).double().mean())
            chance = 0.7**2 + 0.3**2
            assert abs(same - chance) < 6 * (chance * (1 - chance) / size) ** 0.5


def test_keys_stay_where_they_are_from_step_to_step():
    keys, x = make_keys(1, 0), torch.ones(LENGTH, CHANNELS, dtype=torch.float64)
    dropout = Dropout(0.3, keys, torch.arange(LENGTH))
    first, key = dropout(x, "blocks.0.mlp"), keys.get("blocks.0.mlp", x.device)
    keys.begin(1)
    assert key is keys.get("blocks.0.mlp", x.device)
    redrawn = Dropout(0.3, make_keys(1, 1), torch.arange(LENGTH))(x, "blocks.0.mlp")
    assert torch.equal(dropout(x, "blocks.0.mlp"), redrawn) and not torch.equal(first, redrawn)


def test_backward_drops_the_same_and_keeps_nothing():
    dropout = Dropout(0.3, make_keys(1, 0), torch.arange(LENGTH))
    x = torch.randn(LENGTH, CHANNELS, dtype=torch.float64, requires_grad=True)
    saved_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(saved_tensors.append, lambda tensor: tensor):
        y = dropout(x, "blocks.0.mlp")
    y.backward(torch.ones_like(y))
    assert not saved_tensors and torch.equal(x.grad * x.detach(), y.detach())


def test_neighbouring_tokens_and_channels_are_independent():
    keep = (drop_values(list(range(40))) != 0).double() - 0.7
    for pair in (keep[:, 1:] * keep[:, :-1], keep[..., 1:] * keep[..., :-1]):
        assert abs(float(pair.mean())) < 6 * 0.21 / pair.numel() ** 0.5
