"""Torch modules from outside: what they compute is what plain autograd computes, what they keep is
measured, and what no layer may do is one message with the module, the place and what to do.

Tests `megaframe.model.torch_module.layer` and `megaframe.model.torch_module.source`.
"""

import random
import re
from typing import Literal

import pytest
import torch
from repo_copy import ROOT
from tolerances import assert_near
from torch import nn
from torch_module_parts import PlainFeedForward, RunningMean, TokenWise, TorchLayerNorm

from megaframe.architecture.spec import Box
from megaframe.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megaframe.config.registry import Registry, get_registry, use_registry
from megaframe.data.microbatch import Microbatch
from megaframe.errors import UserError
from megaframe.extensions import load_extensions
from megaframe.model.layer_inputs import LayerSetup, make_microbatch_inputs
from megaframe.model.layer_measurement import measure_layer
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.model.torch_module import TorchMixerPart
from megaframe.model.torch_module.parts import TorchNormDescription
from megaframe.parameters.initialization import fill_initial_values
from megaframe.training.layer_check import is_measured, list_described_parts
from megaframe.validate.run import find_mistakes

MODEL = ModelConfig(hidden=8, heads=2)
TERMS = 64
"""Most terms of a sum: of a gradient over tokens and channels."""


def bind(layer, seed=1):
    """Give the parameters of a layer memory and initial values, and return them by name."""
    for parameter in layer.parameters():
        box = Box((0,) * len(parameter.spec.shape), parameter.spec.shape)
        parameter.bind(box, None if seed is None else lambda: None)
        parameter.value = torch.empty(box.shape, dtype=torch.float64)
        parameter.grad = torch.empty(box.shape, dtype=torch.float64)
        fill_initial_values(parameter.value, parameter.spec, box, seed)
    return {parameter.spec.name: parameter for parameter in layer.parameters()}


def make_inputs(batch, length):
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    microbatch = Microbatch(tokens, tokens, torch.arange(batch))
    return make_microbatch_inputs(MODEL, LayerSetup(), microbatch, torch.float64, mixers=[])


@pytest.mark.parametrize("part", [RunningMean(), TokenWise(), PlainFeedForward(), TorchLayerNorm()])
def test_results_and_gradients_are_those_of_plain_autograd(part):
    arguments = (MODEL,) if isinstance(part, TorchLayerNorm) else (MODEL, 0.02)
    description = part.describe(*arguments)
    is_norm = isinstance(description, TorchNormDescription)
    layer = Norm("layer", description) if is_norm else description.make_layer("layer", LayerSetup())
    parameters = bind(layer)
    module = part.make_module(*arguments).double()
    with torch.no_grad():
        for name, own in module.named_parameters():
            own.copy_(parameters[f"layer.{name}"].value.view(own.shape))
    x, gradient = torch.randn(2, 12, 8, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    out = layer(leaves[0]) if is_norm else layer(leaves[0], None, make_inputs(3, 4), PassState())
    # What autograd keeps of parameters is where they are, as their memory is lent meanwhile.
    for parameter in parameters.values():
        parameter.value = parameter.value.clone()
    expected = module(leaves[1].view(3, 4, 8)).flatten(0, 1)
    assert_near(out, expected, TERMS)
    out.backward(gradient)
    expected.backward(gradient)
    assert_near(leaves[0].grad, leaves[1].grad, TERMS)
    assert {*parameters} == {f"layer.{name}" for name, _ in module.named_parameters()}
    for name, own in module.named_parameters():
        parameter = parameters[f"layer.{name}"]
        parameter.finish()
        assert_near(parameter.grad.view(own.shape), own.grad, TERMS)


def test_values_withdrawn_between_the_passes_are_read_where_they_are_then():
    description = PlainFeedForward().describe(MODEL, 0.02)
    layer = description.make_layer("layer", LayerSetup())
    parameters = bind(layer)
    x = torch.randn(12, 8, dtype=torch.float64)
    gradients = []
    for withdrawn in (False, True):
        leaf = x.clone().requires_grad_()
        out = layer(leaf, None, make_inputs(3, 4), PassState())
        if withdrawn:
            for parameter in parameters.values():
                own = parameter.value
                parameter.value = own.clone()
                own.fill_(torch.nan)
        out.sum().backward()
        gradients.append(leaf.grad)
    assert_near(gradients[1], gradients[0], TERMS)


def draw(part, name, seed):
    specs = part.describe(MODEL, 0.02).declare_parameters(name)
    return [spec.init.draw(seed) for spec in specs]


def test_initial_values_are_those_of_the_module_by_the_seed_and_the_name():
    torch.manual_seed(7)
    expected = torch.rand(3).tolist()
    torch.manual_seed(7)
    first, again, other_layer, other_seed = (
        draw(RunningMean(), name, seed) for name, seed in (("a", 1), ("a", 1), ("b", 1), ("a", 2))
    )
    assert torch.rand(3).tolist() == expected, "the state of torch's generator is left alone"
    lists = [[value.tolist() for value in values] for values in (first, again)]
    assert lists[0] == lists[1]
    for others in (other_layer, other_seed):
        assert not torch.equal(first[1], others[1])
    factor, weight, bias = first
    assert factor.tolist() == [0.5]
    assert weight.abs().max() <= 8**-0.5 and bias.abs().max() <= 8**-0.5, "as nn.Linear begins"


def test_a_parameter_is_declared_by_its_dims():
    specs = {
        spec.name: spec for spec in RunningMean().describe(MODEL, 0.02).declare_parameters("x")
    }
    declared = {name: (spec.shape, spec.role, spec.decay) for name, spec in specs.items()}
    assert declared == {
        "x.factor": ((1,), "gain", False),
        "x.first.weight": ((8, 8), "matrix", True),
        "x.first.bias": ((8,), "bias", False),
    }


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", ["short_convolution", "running_mean", "scores"])
def test_a_plan_has_the_memory_and_the_products_of_the_module(kind, tensor):
    """What is measured in short samples is right for long ones, for each type, within what does
    not grow with them."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{ROOT / 'examples/torch_module.py'}]"])
        registry = get_registry()
        registry.register(RunningMean)
        registry.register(Faulty)
        mixer = {"kind": "faulty", "fault": "scores"} if kind == "scores" else kind
        model = ModelConfig(hidden=8, heads=2, blocks=[{"mixer": mixer}])
        part = model.blocks[0].mixer
        description = part.describe(model, 0.02)
        parallel, seq = ParallelConfig(tensor=tensor), 200
        for precision, width in (("bf16", 2), ("fp32", 4), ("fp64", 8)):
            train = TrainConfig(seq=seq, microbatch=1, precision=precision)
            measured = measure_layer(description, 8, parallel, train)
            planned = description.count_saved(parallel, "none").count_bytes(width, seq)
            assert measured.saved_bytes * tensor == pytest.approx(float(planned) * seq, rel=5e-3)
        counted = sum(product.flops for product in description.list_batched_products(seq))
        flops = counted + 2.0 * seq * description.matrix_elements
        once = measure_layer(description, 8, parallel, TrainConfig(seq=seq, microbatch=1))
        assert flops >= once.forward_flops
        if kind != "short_convolution":  # whose filters are no product
            tied = 2.0 * seq * 64 * (kind == "running_mean")
            assert flops == once.forward_flops and counted >= tied


class Echo(nn.Module):
    """Multiplies rows by a matrix, and then does what a test wants."""

    def __init__(self, hidden, act=lambda module, x: x):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden, hidden))
        self.act = act

    def forward(self, x):
        return self.act(self, x @ self.weight)


def add_to(module, attribute, value):
    setattr(module, attribute, value)
    return module


def write_weight(module, x):
    module.weight.data.mul_(0.5)
    return x


def attend(module, x):
    return (x @ x.mT).softmax(-1) @ x


MADE = {
    "no parameters": lambda n: nn.GELU(),
    "lazy": lambda n: nn.LazyLinear(n),
    "device": lambda n: nn.Linear(n, n, device="cpu"),
    "dtype": lambda n: nn.Linear(n, n, dtype=torch.bfloat16),
    "frozen": lambda n: nn.Linear(n, n).requires_grad_(False),
    "persistent": lambda n: add_to(nn.Linear(n, n), "mean", nn.Buffer(torch.zeros(n))),
    "shared": lambda n: META_SHARED,
    "no module": lambda n: "linear",
    "fails": lambda n: nn.Linear(n, "wide"),
    "shape": lambda n: nn.Linear(n, n + 1),
    "tuple": lambda n: Echo(n, lambda module, x: (x, None)),
    "type": lambda n: Echo(n, lambda module, x: x.to(torch.float16)),
    "reads values": lambda n: Echo(n, lambda module, x: x * x.max().item()),
    "writes": lambda n: Echo(n, write_weight),
    "drops": lambda n: nn.Sequential(nn.Linear(n, n), nn.Dropout(0.5)),
    "batch norm": lambda n: nn.BatchNorm1d(n, track_running_stats=True),
    "never set": lambda n: Echo(n).register_parameter("gain", nn.Parameter(torch.empty(n))),
    "forgotten": lambda n: add_to(Echo(n), "gain", nn.Parameter(torch.empty(n))),
    "other draws": lambda n: add_to(
        Echo(n), "gain", nn.Parameter(torch.full((n,), random.random()))
    ),
    "not repeatable": lambda n: Echo(n, lambda module, x: x + random.random()),
    "scores": lambda n: Echo(n, attend),
}
with torch.device("meta"):
    META_SHARED = nn.Linear(8, 8)


class Faulty(TorchMixerPart):
    kind: Literal["faulty"] = "faulty"
    """Does what no layer may."""
    fault: str = "scores"
    """What."""

    def make_module(self, model, output_std):
        return MADE[self.fault](model.hidden)


WHEN_MADE = {
    "no parameters": "returns GELU, which has no parameters",
    "lazy": "returns LazyLinear, whose parameter weight is lazy",
    "device": "returns Linear, whose parameter weight is on the device cpu .* leave `device` out",
    "dtype": r"returns Linear, whose parameter weight is torch\.bfloat16.* leave `dtype` out",
    "frozen": "returns Linear, whose parameter weight has requires_grad=False",
    "persistent": "returns Linear, whose buffer mean is persistent.*persistent=False",
    "batch norm": "returns BatchNorm1d, whose buffer running_mean is persistent",
    "shared": "returns Linear, whose parameter weight is that of another module",
    "no module": "returns str, which is no Module",
    "never set": "returns NoneType, which is no Module",
    "fails": r"fails at .*test_torch_modules\.py:\d+: TypeError",
}


@pytest.mark.parametrize("fault", WHEN_MADE)
def test_what_no_layer_can_have_is_refused_when_it_is_described(fault):
    place = r"faulty: Faulty\.make_module \(.*test_torch_modules\.py:\d+\) "
    with pytest.raises(UserError, match=place + WHEN_MADE[fault]):
        [*Faulty(fault=fault).describe(MODEL, 0.02).declare_parameters("x")]


WHEN_RUN = {
    "shape": r"forward returns \(1, 32, 9\) of torch\.float32 for \(1, 32, 8\)",
    "tuple": "forward returns tuple",
    "type": r"forward returns .* of torch\.float16",
    "reads values": "cannot be measured.*must not read values",
    "writes": "changes a tensor in its forward pass.*let it write to new tensors only",
    "drops": "draws random numbers in its forward pass.*leave them to model.dropout",
}


@pytest.mark.parametrize("fault", WHEN_RUN)
def test_what_no_layer_may_do_is_refused_with_its_block(fault):
    with use_registry(Registry()) as registry:
        registry.register(Faulty)
        blocks = [{}, {"mixer": {"kind": "faulty", "fault": fault}}]
        config = RunConfig(model={"hidden": 8, "heads": 2, "layers": 2, "blocks": blocks})
        (mistake,) = (m for m in find_mistakes(config, 1, data=False) if "blocks" in m)
    assert mistake.startswith("model.blocks.1: mixer faulty (")
    assert re.search(WHEN_RUN[fault], mistake), mistake


WHEN_DRAWN = {
    "forgotten": "whose parameter gain begins with numbers that are not finite, or that nobody",
    "other draws": "whose parameter gain has other initial values each time",
    "not repeatable": "whose forward is not repeatable.*differ by",
}


@pytest.mark.parametrize("fault", WHEN_DRAWN)
def test_values_that_ranks_would_not_agree_on_are_refused_when_they_are_drawn(fault):
    with pytest.raises(UserError, match=WHEN_DRAWN[fault]):
        draw(Faulty(fault=fault), "x", 1)


def test_context_ranks_and_documents_are_refused_by_name_unless_the_module_says_otherwise():
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{ROOT / 'examples/torch_module.py'}]"])
        registry = get_registry()
        for part in (RunningMean, TokenWise):
            registry.register(part)

        def find(kind, ranks=1, **sections):
            model = {"hidden": 8, "heads": 2, "layers": 1, "vocab": 9, "blocks": [{"mixer": kind}]}
            return find_mistakes(RunConfig(model=model, **sections), ranks, data=False)

        documents = {"data": {"reset_attention": True, "mask_eod": True}}
        assert (
            find("token_wise", 2, parallel={"context": 2}) == find("token_wise", **documents) == []
        )
        assert find("short_convolution", **documents) == []
        (context,) = find("running_mean", 2, parallel={"context": 2})
        (reset,) = find("running_mean", **documents)
    assert "parallel.context=2 divides samples, which mixer running_mean (Mean)" in context
    assert "data.reset_attention=true keeps documents apart, which mixer running_mean" in reset


def test_the_check_of_layers_has_no_numbers_of_a_measured_module_to_compare():
    """Its layer and its block are told from others; only its parameters are compared."""
    with use_registry(Registry()):
        get_registry().register(RunningMean)
        blocks = [{"mixer": RunningMean().kind}, {}]
        model = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 11, "blocks": blocks}
        config = RunConfig(model=model)
        parts = list_described_parts(config.model, config.train)
        measured = [part.name for part in parts if is_measured(part.description)]
    assert measured == ["blocks.0.mixer", "blocks.0"]
