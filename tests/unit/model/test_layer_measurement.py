"""What is measured of a layer that runs on tensors without content: for ours what their formulas
say, and for layers from outside a refusal of what would not compute the same twice."""

from dataclasses import dataclass
from itertools import count

import pytest
import torch

from megaframe.architecture.layer import MixerDescription, SavedActivations
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.model_blocks import describe_block
from megaframe.config import ModelConfig, ParallelConfig, TrainConfig
from megaframe.errors import UserError
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.model.layer_measurement import measure_layer
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.linear import Linear

LAYOUTS = {
    "one rank": {},
    "tensor": {"tensor": 2},
    "more ranks than groups": {"tensor": 4},
    "exchange": {"context": 2, "context_kind": "all_to_all"},
    "tensor and nested": {
        **{"tensor": 2, "context": 4},
        **{"context_kind": "nested", "context_heads": 2},
    },
}
MODELS = {
    "rotated": {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
    "plain": {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
    "gated": {
        "position": "rotary",
        "qk_norm": True,
        "blocks": [{"mixer": {"output_gate": "head"}}],
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("recompute", "precision"), [("none", "bf16"), ("selective", "fp64")])
def test_what_our_layers_keep_compute_and_send_is_what_their_formulas_say(
    name, layout, recompute, precision
):
    model = ModelConfig(**{"layers": 1, "hidden": 32, "heads": 8, "vocab": 40, **MODELS[name]})
    parallel = ParallelConfig(**LAYOUTS[layout])
    train = TrainConfig(seq=16, microbatch=2, recompute=recompute, precision=precision)
    tokens, ranks = train.seq * train.microbatch, parallel.tensor * parallel.context
    width, block = DTYPE_BYTES[train.precision], describe_block(model, 0)
    for layer in (block.mixer, block.feed_forward):
        measured = measure_layer(layer, model.hidden, parallel, train)
        saved = layer.count_saved(parallel, recompute).count_bytes(width, train.seq)
        assert measured.saved_bytes * ranks == saved * tokens
        left = layer.count_saved_for_weights(parallel, recompute).count_bytes(width, train.seq)
        assert measured.weight_pass_bytes * ranks == left * tokens
        moved, rows = layer.tensor_traffic, tokens * width * (parallel.tensor - 1)
        for passed, elements in (
            (measured.forward_bytes, moved.forward),
            (measured.backward_bytes, moved.backward),
            (measured.split_bytes, moved.backward + moved.weight),
        ):
            assert passed.get("tensor", 0) * ranks == rows * elements
        products = layer.list_batched_products(train.seq)
        if parallel.context == 1 and parallel.tensor < 4:
            flops = sum(each.flops for each in products) * train.microbatch
            flops += 2 * tokens * layer.matrix_elements
            assert measured.forward_flops * ranks == flops


def test_the_ranks_of_a_ring_send_together_what_the_formula_says():
    model, parallel = ModelConfig(layers=1, hidden=32, heads=8, kv_heads=2), {"context": 4}
    parallel, train = ParallelConfig(**parallel), TrainConfig(seq=16, precision="bf16")
    mixer = describe_block(model, 0).mixer
    ranks = [measure_layer(mixer, 32, parallel, train, rank=rank) for rank in range(4)]
    traffic = mixer.count_traffic(parallel, train.seq)["context"]
    for sent, elements in (
        ([measured.forward_bytes["context"] for measured in ranks], traffic.count_forward_bytes(2)),
        (
            [measured.backward_bytes["context"] for measured in ranks],
            traffic.count_backward_bytes(2),
        ),
    ):
        assert sum(sent) == elements * train.seq * train.microbatch


@dataclass(frozen=True, kw_only=True)
class Outside(MixerDescription):
    """A layer that does `fault` beside its product."""

    fault: str

    name = "outside"

    @property
    def parts(self):
        return {"product": LinearSpec((8,), (8,), 0.1)}

    def count_saved(self, parallel, recompute):
        return SavedActivations()

    def make_layer(self, name, run):
        return OutsideLayer(name, self, run)


class OutsideLayer(Module):
    def __init__(self, name, description, run):
        if description.fault == "build":
            raise ValueError("no such size")
        self.product = Linear(f"{name}.product", description.parts["product"], run.tensor)
        self.fault, self.calls, self.sums = description.fault, count(), torch.zeros(8)

    def __call__(self, x, norm, context, state):
        out = self.product(x, state.deferred, norm)
        if self.fault == "parameter":
            self.product.weight.value.mul_(0.5)
        elif self.fault == "buffer":
            self.sums += x.detach().sum(0)
        elif self.fault == "dropout":
            out = torch.dropout(out, 0.1, True)
        elif self.fault == "turns":
            out = out.sin() if next(self.calls) % 2 else out.cos()
        elif self.fault == "value":
            out = out * float(x.detach().sum())
        elif self.fault == "shape":
            out = out[:, :4]
        return out


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("build", r"cannot be measured: .*test_layer_measurement.py:\d+: ValueError: no such size"),
        ("value", r"cannot be measured: .*test_layer_measurement.py:\d+: .*must not read values"),
        ("shape", r"cannot be measured: .*returns \(6, 4\), and its input is \(6, 8\)"),
        ("parameter", r"changes a tensor in its forward pass .*aten.mul_.*a parameter"),
        ("buffer", r"changes a tensor in its forward pass .*aten.add_.*new tensors only"),
        ("dropout", r"draws random numbers in its forward pass .*model.dropout"),
        ("turns", r"not repeatable: its second forward pass calls aten.cos.*called aten.sin"),
    ],
)
def test_a_layer_that_would_not_compute_the_same_twice_is_refused(fault, message):
    train = TrainConfig(seq=6, microbatch=1)
    with pytest.raises(UserError, match=message) as refused:
        measure_layer(Outside(fault=fault), 8, ParallelConfig(), train)
    assert str(refused.value).startswith(f"Outside ({__file__}) ")


def test_a_layer_without_a_fault_is_measured():
    train = TrainConfig(seq=6, microbatch=1, precision="fp32")
    measured = measure_layer(Outside(fault=""), 8, ParallelConfig(), train)
    (product,) = measured.products
    assert (product.rows, product.outputs, product.terms, product.has_weight) == (6, 8, 8, True)
    assert measured.forward_flops == 2 * 6 * 8 * 8 and measured.saved_bytes == 0
    assert measured.backward_flops == 2 * measured.forward_flops
    assert measured.weight_pass_bytes == 2 * 6 * 8 * 4
