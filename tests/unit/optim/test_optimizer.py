"""Updates: AdamW equals torch's; clipping, decay groups, the loss scale and bad gradients."""

import pytest
import torch
from optimizer_steps import copy_weights, take_step
from tolerances import assert_near, estimate_growth, near

from megaframe.config import RunConfig
from megaframe.optim.loss_scale import LossScale
from megaframe.pipeline_parallel.stage_pass import StagePass

pytestmark = pytest.mark.numeric


def test_five_steps_equal_torch_adamw_with_its_own_clipping(build, make_microbatch):
    built = build(
        {"bias": True, "position": "learned"},
        optim={"lr": 0.02, "schedule": "constant", "clip": 0.7, "weight_decay": 0.3},
    )
    own_weights = copy_weights(built)
    torch_weights = {name: w.clone().requires_grad_() for name, w in own_weights.items()}
    decayed = [w for name, w in torch_weights.items() if name.endswith("weight")]
    undecayed = [w for name, w in torch_weights.items() if not name.endswith("weight")]
    assert len(undecayed) > 10
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": undecayed, "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(5):
        _, update = take_step(built, make_microbatch(built.config, step), step)
        for bucket in built.sharded_parameters.buckets:
            # Clipping has divided the gradients in place; undo it, because torch clips them itself.
            factor = max(float(update.grad_norm) / 0.7, 1.0)
            for parameter, _, grad in bucket.iterate_pieces(bucket.grad_sums, bucket.master_span):
                torch_weights[parameter.spec.name].grad = grad * factor
        norm = torch.nn.utils.clip_grad_norm_(list(torch_weights.values()), 0.7)
        assert float(norm) == near(
            float(update.grad_norm), sum(w.numel() for w in own_weights.values())
        )
        if norm > 0.7:  # torch adds 1e-6 to the norm by which it divides
            for weight in torch_weights.values():
                weight.grad *= (norm + 1e-6) / norm
        optimizer.step()
        for name, weight in torch_weights.items():
            assert_near(own_weights[name], weight, 24 * (step + 1), label=name)
    assert built.optimizer.read_state().updates == 5


def test_a_bad_gradient_touches_nothing_and_is_named(build, make_microbatch):
    built = build()
    before = {name: w.clone() for name, w in copy_weights(built).items()}
    built.sharded_parameters.start_step()
    built.stage.forward(
        StagePass(0), make_microbatch(built.config), torch.ones((), dtype=torch.float64)
    )
    built.stage.backward(StagePass(0, last=True))
    built.stage.blocks[1].mlp.down.weight.grad[0, 0] = torch.nan
    update = built.optimizer.update()
    assert not update.is_finite()
    assert built.optimizer.find_nonfinite_parameters(update) == ("blocks.1.mlp.down.weight",)
    assert built.optimizer.read_state().updates == 0
    assert all(torch.equal(before[name], w) for name, w in copy_weights(built).items())


def test_a_norm_that_overflows_has_no_name(build, make_microbatch):
    built = build()
    built.sharded_parameters.start_step()
    built.stage.forward(
        StagePass(0), make_microbatch(built.config), torch.ones((), dtype=torch.float64)
    )
    built.stage.backward(StagePass(0, last=True))
    for block in built.stage.blocks:  # each square fits fp64, their sum does not
        block.mlp.down.weight.grad[0, 0] = 1.2e154
    update = built.optimizer.update()
    assert not update.is_finite() and built.optimizer.find_nonfinite_parameters(update) == ()


def test_low_precision_trains_masters_and_the_loss_scale_cancels(build, make_microbatch):
    norms, results = {}, {}
    for precision in ("fp32", "bf16", "fp16"):
        built = build(train={"precision": precision}, optim={"loss_scale": 1024.0, "lr": 0.01})
        _, update = take_step(built, make_microbatch(built.config), 0, 1 / 30)
        norms[precision] = float(update.grad_norm)
        results[precision] = copy_weights(built)["blocks.0.mlp.up.weight"]
        assert results[precision].dtype == torch.float32
        value = built.stage.blocks[0].mlp.up.weight.value
        assert torch.equal(value, results[precision].to(value.dtype))
    # Eight products follow each other, and errors of elements average in their norm.
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert norms[precision] == pytest.approx(norms["fp32"], rel=estimate_growth(8, dtype))


def test_fp16_overflow_halves_the_scale_and_keeps_weights(build, make_microbatch):
    built = build(train={"precision": "fp16"}, optim={"loss_scale": 2.0**40})
    before = {name: w.clone() for name, w in copy_weights(built).items()}
    _, update = take_step(built, make_microbatch(built.config), 0)
    assert not update.is_finite() and built.optimizer.loss_scale == 2.0**39
    assert all(torch.equal(before[name], w) for name, w in copy_weights(built).items())


def test_loss_scale_grows_after_a_window_and_only_in_fp16():
    config = RunConfig(
        train={"precision": "fp16"}, optim={"loss_scale": 8.0, "loss_scale_window": 3}
    )
    scale = LossScale(config.train, config.optim, torch.device("cpu"))
    values = []
    for finite in (True, True, False, True, True, True, True):
        scale.update(torch.tensor(finite))
        values.append(float(scale.value))
        scale.load(*scale.read_state())
    assert values == [8, 8, 4, 4, 4, 8, 8] and scale.read_state() == (8.0, 4)
    scale.load(2.0**24, 5)
    scale.update(torch.tensor(True))
    assert scale.read_state() == (2.0**24, 6), "not beyond the largest"
    changed = RunConfig(train={"precision": "bf16"})
    fixed = LossScale(changed.train, changed.optim, torch.device("cpu"))
    fixed.update(torch.tensor(False))
    assert fixed.value == 1.0


def test_state_of_the_optimizer_is_whole(build, make_microbatch):
    built = build()
    names = {name for name, _, _, _ in built.optimizer.list_tensors()}
    plain = {name for name in names if "/" not in name}
    assert names == plain | {f"optimizer.{kind}/{n}" for kind in ("mean", "square") for n in plain}
    take_step(built, make_microbatch(built.config), 0)
    other = build()
    for (_, _, _, source), (_, _, _, target) in zip(
        built.optimizer.list_tensors(), other.optimizer.list_tensors(), strict=True
    ):
        target.copy_(source)
    other.optimizer.load_state(built.optimizer.read_state())
    for built_model in (built, other):
        take_step(built_model, make_microbatch(built.config, 1), 1)
    for name, weight in copy_weights(built).items():
        assert torch.equal(weight, copy_weights(other)[name])
