"""Each rule against its definition in a few plain lines, in fp64; skipped steps; learning rates of
groups; frozen parameters.
"""

import math

import pytest
import torch
from optimizer_steps import copy_weights, take_step
from tolerances import assert_near, compute_allowance

from megaframe.errors import UserError
from megaframe.optim.elementwise import (
    ElementwiseRule,
    GradientDescent,
    GroupRates,
    Lion,
    LionOptions,
    Momentum,
    MomentumOptions,
)
from megaframe.optim.muon import orthogonalize
from megaframe.optim.optimizer_state import MomentStorage
from megaframe.optim.state_dtype import make_state_codecs
from megaframe.optim.update_rule import UpdateStep

pytestmark = pytest.mark.numeric

KEEPING = MomentStorage(*make_state_codecs("master"))


def make_step(number, lr=0.1, divisor=1.0, skip=0.0):
    divisor = torch.tensor(divisor, dtype=torch.float64)
    return UpdateStep(number, lr, divisor, torch.tensor(skip))


def make_random(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_that_of_torch_with_its_decay_apart(momentum, nesterov):
    weights = make_random(70_000, 0)
    torch_weights = weights.clone().requires_grad_()
    rates = GroupRates(0.5, 0.2)
    speed = Momentum(MomentumOptions(momentum, nesterov, rates), KEEPING)
    sgd = ElementwiseRule(weights, [speed, GradientDescent(rates)], KEEPING)
    torchs = torch.optim.SGD([torch_weights], lr=0.05, momentum=momentum, nesterov=nesterov)
    for number in range(1, 5):
        grads = make_random(70_000, number)
        torch_weights.grad = grads / 3.0
        with torch.no_grad():
            torch_weights.mul_(1 - 0.05 * 0.2)
        torchs.step()
        sgd.update(weights, grads.clone(), make_step(number, divisor=3.0))
        assert_near(weights, torch_weights, 8 * number)


def test_lion_is_its_definition():
    weights, mean = make_random(70_000, 0), torch.zeros(70_000, dtype=torch.float64)
    updated = weights.clone()
    lion = Lion(LionOptions(0.9, 0.99, GroupRates(1.0, 0.2)), KEEPING)
    lion = ElementwiseRule(updated, [lion], KEEPING)
    for number in range(1, 5):
        grads = make_random(70_000, number)
        direction = (0.9 * mean + 0.1 * grads).sign()
        weights = weights - 0.1 * (direction + 0.2 * weights)
        mean = 0.99 * mean + 0.01 * grads
        lion.update(updated, grads.clone(), make_step(number))
        assert_near(updated, weights, 8 * number)


ITERATIONS = 5
AMPLIFIED = 3.4445**ITERATIONS
"""Factor of the smallest singular values, and of rounding errors in their directions."""


def update_by_definition(gradient, momentum):
    """Return Muon's update of a matrix [outputs, inputs]: Nesterov momentum 0.95, five
    Newton-Schulz iterations, and AdamW's size."""
    momentum.mul_(0.95).add_(gradient)
    x = gradient + 0.95 * momentum
    x = x / x.norm()
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return 0.2 * math.sqrt(max(x.shape)) * x


def list_matrices(name, tensor):
    """Return the matrices [outputs, inputs] of one weight, as views where possible."""
    if name.endswith("qkv.weight"):
        return [
            tensor[:, :-2].flatten(0, 2),
            tensor[:, -2].flatten(0, 1),
            tensor[:, -1].flatten(0, 1),
        ]
    if name.endswith("up.weight"):
        return list(tensor)
    return [tensor.flatten(1)] if tensor.dim() > 1 else []


def put_together(name, like, parts):
    if name.endswith("qkv.weight"):
        groups, _, width, hidden = like.shape
        shaped = [part.view(groups, -1, width, hidden) for part in parts]
        return torch.cat(shaped, 1)
    return torch.stack(parts) if name.endswith("up.weight") else parts[0].view(like.shape)


def test_muon_is_its_definition_for_matrices_and_adamw_for_the_rest(build, make_microbatch):
    model = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
    shared = {"lr": 0.02, "schedule": "constant", "clip": 0.0, "weight_decay": 0.3}
    muon, adamw = build(model, optim={**shared, "name": "muon"}), build(model, optim=shared)
    for name, weights in copy_weights(adamw).items():
        assert torch.equal(weights, copy_weights(muon)[name])
    expected = {name: w.clone() for name, w in copy_weights(muon).items()}
    momenta = {
        name: [torch.zeros_like(m) for m in list_matrices(name, w)] for name, w in expected.items()
    }
    for step in range(3):
        before = {name: w.clone() for name, w in copy_weights(muon).items()}
        for name, weights in copy_weights(adamw).items():
            weights.copy_(before[name])
        take_step(adamw, make_microbatch(muon.config, step), step)
        grads = {  # AdamW does not change its gradients
            parameter.spec.name: (parameter.spec.role, grad.clone())
            for bucket in adamw.sharded_parameters.buckets
            for parameter, _, grad in bucket.iterate_pieces(bucket.grad_sums, bucket.master_span)
        }
        take_step(muon, make_microbatch(muon.config, step), step)
        for name, weights in copy_weights(muon).items():
            role, gradient = grads[name]
            if role != "matrix":
                assert_near(weights, copy_weights(adamw)[name], 16, label=name)
                continue
            pairs = zip(list_matrices(name, gradient), momenta[name], strict=True)
            direction = put_together(name, gradient, [update_by_definition(g, m) for g, m in pairs])
            expected[name].mul_(1 - 0.02 * 0.3).sub_(0.02 * direction)
            # The iterations amplify errors of a direction, which is then multiplied by 0.02.
            size = weights.abs().max() + 0.02 * AMPLIFIED * direction.abs().max()
            assert_near(weights, expected[name], ITERATIONS * sum(weights.shape), size=size)


@pytest.mark.parametrize("shape", [(40, 60), (16, 90), (90, 16)])
def test_singular_values_become_near_1_whatever_the_size_of_the_gradient(shape):
    matrix = make_random(shape[0] * shape[1], 3).view(shape) * 1e-30
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert values.min() > 0.6 and values.max() < 1.3
    terms = 3 * ITERATIONS * sum(shape)
    assert_near(orthogonalize(matrix.t()), orthogonalize(matrix).t(), terms, size=AMPLIFIED)
    assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("state", ["master", "bf16", "int8"])
@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd"])
def test_a_skipped_step_changes_nothing(name, state, build, make_microbatch):
    optim = {"name": name, "state": state, "ema": 0.9}
    built = build(train={"precision": "fp32"}, optim=optim)
    take_step(built, make_microbatch(built.config), 0)

    def everything():
        return [
            tensor.clone()
            for shard in built.optimizer.shards
            for tensor in (shard.bucket.weights, *shard.rule.state.values())
        ]

    before = everything()
    step = UpdateStep(2, 0.1, torch.tensor(1.0), torch.tensor(1.0))
    for shard in built.optimizer.shards:
        shard.bucket.grad_sums.fill_(torch.nan)
        shard.start_update(step)
        shard.continue_update()
        shard.finish_update()
    for old, new in zip(before, everything(), strict=True):
        assert torch.equal(old, new)


def test_groups_learn_at_their_own_rates(build, make_microbatch):
    """Without decay, a step of Lion moves every weight by its rate, whatever its gradient."""
    optim = {
        "name": "lion",
        "lr": 0.01,
        "schedule": "constant",
        "weight_decay": 0.5,
        "groups": {
            "matrix": {"lr": 2.0, "weight_decay": 0.0},
            "vector": {"lr": 0.25},
            "head": {"lr": 3.0, "weight_decay": 10.0},
        },
    }
    built = build({"bias": True}, optim=optim)
    before = {name: w.clone() for name, w in copy_weights(built).items()}
    take_step(built, make_microbatch(built.config), 0)
    after = copy_weights(built)

    def moved(name, decay=0.0):
        steps = (after[name] - before[name] * (1.0 - decay)).abs()
        rounding = compute_allowance(4, float(before[name].abs().max()), torch.float64)
        return steps[steps > rounding], rounding

    for name, decay, rate in (
        ("blocks.0.mlp.up.weight", 0.0, 0.02),
        ("blocks.1.mlp_norm.gain", 0.0, 0.0025),
        ("head.weight", 0.3, 0.03),
    ):
        steps, rounding = moved(name, decay)
        assert len(steps) and ((steps - rate).abs() <= rounding).all()


def test_frozen_parameters_stay_and_cost_nothing(build, make_microbatch):
    frozen = ("blocks.0.*", "embedding.tokens.weight", "*.bias")
    built = build({"bias": True}, optim={"frozen": frozen, "clip": 0.0})
    before = {name: w.clone() for name, w in copy_weights(built).items()}
    take_step(built, make_microbatch(built.config), 0)
    for name, weights in copy_weights(built).items():
        stays = name.startswith("blocks.0.") or name.endswith(".bias") or "tokens" in name
        assert torch.equal(weights, before[name]) == stays, name
    for shard in built.optimizer.shards:
        names = [parameter.spec.name for parameter in shard.bucket.parameters]
        if shard.rule is None:
            assert not len(shard.bucket.grad_sums), names
    keys = {key for key, _, _, _ in built.optimizer.list_tensors()}
    assert "optimizer.mean/blocks.1.mlp.up.weight" in keys
    assert "optimizer.mean/blocks.0.mlp.up.weight" not in keys
    assert "blocks.0.mlp.up.weight" in keys


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("blocks.0.mlp.wp.weight",), "the nearest are blocks.0.mlp.up.weight, "),
        (("*", "head.weight"), "leaves none of the"),
        (
            ("head.weigh",),
            "optim.frozen=head.weigh matches none of the .* the nearest are head.weight",
        ),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(patterns, message, build):
    with pytest.raises(UserError, match=message):
        build(optim={"frozen": patterns})


def test_the_average_is_its_definition(build, make_microbatch):
    built = build(optim={"ema": 0.8, "name": "muon"})
    expected = {name: w.clone() for name, w in copy_weights(built).items()}
    for step in range(4):
        take_step(built, make_microbatch(built.config, step), step)
        for name, weights in copy_weights(built).items():
            expected[name] = 0.8 * expected[name] + 0.2 * weights
    averages = {
        key.removeprefix("optimizer.ema/"): tensor
        for key, _, _, tensor in built.optimizer.list_tensors()
        if key.startswith("optimizer.ema/")
    }
    assert averages.keys() == expected.keys()
    for name, average in averages.items():
        assert_near(average, expected[name], 4 * 4, label=name)
