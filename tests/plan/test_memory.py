"""The memory plan against what is really kept, counted in storages."""

import pytest
import torch

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
    stage = built.stage
    frame = stage._frame(make_microbatch(built.config), None)
    leaf = torch.randn(3 * 32, 64).to(stage.precision.compute).requires_grad_()
    known = [bucket.values for bucket in built.optimizer.buckets] + [leaf]
    if frame.rotary is not None:
        known += [frame.rotary.cos, frame.rotary.sin]
    known = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.numel():
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage.blocks[0](leaf, frame)
    kept.pop(output.untyped_storage().data_ptr(), None)
    found = sum(size for size, _ in kept.values())
    if frame.rotary is not None:
        found -= sum(
            size for size, tensor in kept.values() if tensor.shape == frame.rotary.sin.shape
        )
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
