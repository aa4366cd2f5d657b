"""The memory plan against what is really kept, counted in storages."""

import pytest
from kept import kept_by_block

from megaframe.plan.memory import block_bytes, memory
from megaframe.plan.stages import stage_plans
from megaframe.spec import parameter_count

MODELS = [
    {"position": "learned"},
    {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
    {"activation": "relu2", "qk_norm": True, "norm": "rmsnorm"},
    {"activation": "gelu", "position": "none", "kv_heads": 1, "bias": True},
    {"kv_heads": 2, "position": "learned"},
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("model", MODELS)
def test_a_block_keeps_what_the_plan_says(model, recompute, precision, build, make_microbatch):
    train = {"precision": precision, "seq": 32, "recompute": recompute}
    built = build({"layers": 1, "hidden": 64, **model}, train=train)
    microbatch = make_microbatch(built.config)
    found = kept_by_block(built.stage, microbatch, built.optimizer.buckets)
    assert found == block_bytes(built.config)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_state_is_counted_to_the_byte(precision, build):
    built = build({"hidden": 64, "vocab": 64, "bias": True}, train={"precision": precision})
    buckets = built.optimizer.buckets
    count = parameter_count(p.spec for bucket in buckets for p in bucket.parameters)
    plan = memory(built.config, count, stage_plans(built.config), ())
    assert plan.weights == sum(bucket.weights.nbytes for bucket in buckets)
    assert plan.gradients == sum(bucket.grads.nbytes for bucket in buckets)
    state = [tensor for bucket in buckets for tensor in bucket.optimizer.state.values()]
    assert plan.optimizer == sum(tensor.nbytes for tensor in state)
    copies = sum(b.values.nbytes for b in buckets if b.values is not b.weights)
    assert plan.values == copies
