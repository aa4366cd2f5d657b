"""Norms, activations and feed-forward layers of extensions: their numbers are those of plain
autograd, their descriptions are exact, and the run says where they have no kernel.

Tests `megaframe.architecture.extension_parts`.
"""

import pytest
import torch
from autograd_comparison import TERMS, TRAIN, compare_with_autograd
from patience import PATIENCE
from pydantic import ValidationError
from repo_copy import ROOT
from slow_cases import slow
from tolerances import assert_near

from megaframe.architecture.activation import describe_activation
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.stages import plan_stages
from megaframe.checkpoint.convert.huggingface.families import FAMILIES
from megaframe.config import ModelConfig, RunConfig
from megaframe.config.model import ModelConfig as Model
from megaframe.config.parts import ROLES
from megaframe.config.registry import Registry, use_registry
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.extensions import load_extensions, load_with_extensions
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.model.activation import activate
from megaframe.ops.kernel_dispatch import make_kernels
from megaframe.pipeline_parallel.stage_pass import StagePass
from megaframe.planner.parameter_counts import count_rank_parameters
from megaframe.training.layer_check import find_lies, measure_layers
from megaframe.training.train_step import TrainStep

pytestmark = pytest.mark.numeric

EXAMPLE = str(ROOT / "examples/norm.py")
LOW_RANK = {"feed_forward": {"kind": "low_rank", "rank": 6}}
PARTS = {"norm": {"kind": "dynamic_tanh", "slope": 0.7}, "activation": "reglu"}
MOE = {"experts": 4, "ffn": 10, "shared": 1}
MODELS = {
    "low rank": {**PARTS, "bias": True, "blocks": [LOW_RANK, {"norms": "both"}]},
    "experts": {
        **PARTS,
        "moe": MOE,
        "blocks": [{"feed_forward": {"kind": "moe"}}, {**LOW_RANK, "parallel": "one_norm"}],
    },
    "after": {**PARTS, "activation": "gelu", "mtp_depth": 1, "blocks": [{"norms": "after"}]},
    "one activation": {"blocks": [{"feed_forward": {"activation": "reglu", "ffn": 30}}, {}]},
}
MEAN_OF_ABSOLUTES = '''
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from megaframe.architecture.layer import SavedActivations
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.extensions import NormPart

class AbsoluteNorm(NormPart):
    kind: Literal["absolute"] = "absolute"
    """Divides by the mean of absolute values."""
    again: bool = False
    """Whether selective recomputation computes it again."""

    def describe(self, model):
        return Description(model.hidden, self.again)

@dataclass(frozen=True)
class Description(NormDescription):
    recomputes: bool

    def declare_parameters(self, name):
        yield ParamSpec(f"{name}.gain", (self.width,), Constant(1.0), role="gain")

    @property
    def saved_statistics(self):
        return SavedActivations(values=self.width + 1)

    def compute(self, x, gain):
        return x / (x.abs().mean(-1, keepdim=True) + 1e-5) * gain

def register(registry):
    registry.register(AbsoluteNorm)
'''


@pytest.fixture(autouse=True)
def registry():
    with use_registry(Registry()) as registry:
        load_extensions(None, [f"run.extensions=[{EXAMPLE}]"])
        yield registry


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_autograd(name, recompute, build, make_microbatch):
    built = build(MODELS[name], train={**TRAIN, "recompute": recompute})
    compare_with_autograd(built, False, make_microbatch)


def measure_with(example, model, train, tensor):
    """Return the config, and what this rank measures of its blocks, with an example's parts."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{example}]"])
        config = RunConfig(
            model={"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, **model, "mtp_depth": 0},
            train={"seq": 8, "microbatch": 2, "global_batch": 2, **train},
            parallel={"tensor": tensor},
            kernels={"matmul": "torch"},
        )
        return measure_layers(config), config


@pytest.mark.parametrize(
    ("tensor", "precision", "recompute"),
    [(2, "bf16", "selective"), slow(1, "fp64", "none"), slow(2, "bf16", "none")],
)
@pytest.mark.parametrize("name", MODELS)
def test_descriptions_are_exact(name, recompute, precision, tensor, pool):
    train = {"precision": precision, "recompute": recompute}
    results = pool.run(tensor, measure_with, EXAMPLE, MODELS[name], train, tensor)
    measured, (config, *_) = zip(*results, strict=True)
    lies = find_lies(config, measured)
    assert not lies, "\n" + "\n".join(map(str, lies))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("block", [{}, {"parallel": "one_norm"}, {"parallel": "two_norms"}])
def test_a_norm_is_recomputed_only_where_it_says_so(block, again, build, make_microbatch, tmp_path):
    """Its output is kept otherwise. The gradients are the same."""
    path = tmp_path / "own.py"
    path.write_text(MEAN_OF_ABSOLUTES, encoding="utf-8")
    load_extensions(None, [f"run.extensions=[{path}]"])
    gate = {"mixer": {"output_gate": "head"}}
    model = {"norm": {"kind": "absolute", "again": again}, "blocks": [{**block, **gate}]}
    measured, config = measure_with(path, model, {"recompute": "selective"}, 1)
    lies = find_lies(config, [measured])
    assert not lies, "\n" + "\n".join(map(str, lies))
    gradients = [
        compute_gradients(build(model, train={"recompute": recompute}), make_microbatch)
        for recompute in ("none", "selective")
    ]
    for kept, recomputed in zip(*gradients, strict=True):
        assert_near(kept, recomputed, TERMS)
    kept = describe_block(config.model, 0).count_saved(config.parallel, "selective").values
    recomputed = describe_block(config.model.model_copy(update={"norm": "rmsnorm"}), 0).count_saved(
        config.parallel, "selective"
    )
    assert (kept == recomputed.values) == again


def compute_gradients(built, make_microbatch):
    built.sharded_parameters.start_step()
    built.stage.forward(
        StagePass(0), make_microbatch(built.config), torch.ones((), dtype=torch.float64)
    )
    built.stage.backward(StagePass(0))
    return [parameter.grad.clone() for parameter in built.stage.parameters()]


def count_own_and_planned(model, tensor):
    """Return the elements that this rank has, and those that are planned for it."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{EXAMPLE}]"])
        keys = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 38, "ffn": 30, **model}
        config = RunConfig(model=keys, train={"seq": 8}, parallel={"tensor": tensor})
        mesh = Mesh(Layout(tensor=tensor), device="cpu", timeout=PATIENCE)
        stage = TrainStep(config, mesh, StepTimer().time).stages[0]
        sizes = [p.box.size for p in stage.parameters() if p.spec.role != "balance"]
        mesh.finish()
        planned = count_rank_parameters(
            config.model, config.train, Layout(tensor=tensor), plan_stages(config)
        )
        return sum(sizes), planned.total


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_counts_their_parameters(name, pool):
    for actual, planned in pool.run(2, count_own_and_planned, MODELS[name], 2):
        assert actual == planned


def test_an_activation_of_a_block_leaves_the_others(build):
    model = build(MODELS["one activation"]).config.model
    first, second = (describe_block(model, layer).feed_forward for layer in range(2))
    assert first.activation.part is not None and second.activation.part is None
    assert first.up.outputs == (2, 30) and second.up.outputs == (64,)
    x = torch.tensor([[-1.0, 2.0, 3.0, 5.0]])
    assert activate(first.activation, x).tolist() == [[0.0, 10.0]]


def test_the_log_says_that_they_have_no_kernels():
    config = RunConfig(model=MODELS["low rank"], kernels={"update": "torch"})
    lines = [*make_kernels(config, torch.device("cpu")).report()]
    assert "  norm dynamic_tanh: plain code, because kernels exist only for our own norms" in lines
    assert any(line.startswith("  activation reglu: plain code, because") for line in lines)
    whole = RunConfig(model={"blocks": [{"mixer": {"qk_norm": "whole"}}]}, kernels=config.kernels)
    (*_, last) = make_kernels(whole, torch.device("cpu")).report()
    assert last.startswith("  norms of whole queries and keys: plain code, because")
    assert make_kernels(config, torch.device("cpu")).record()["norm dynamic_tanh"]["uses"]


def test_compiled_code_is_the_same(build, make_microbatch):
    """A compiler gets the norm and the activation of an extension as it gets ours."""
    compiled = []

    def compile_anything(function):
        compiled.append(function)
        return torch.compile(function, backend="eager", fullgraph=True, dynamic=False)

    kernels = make_kernels(RunConfig(), torch.device("cpu"), compile_anything)
    model = ModelConfig(hidden=8, heads=2, **MODELS["low rank"])
    description = describe_activation(model.activation)
    x = torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(activate(description, x, kernels), activate(description, x))
    norm = describe_block(model, 0).norm
    weights = (torch.ones(1).double(), torch.ones(8).double(), torch.zeros(8).double())
    assert torch.equal(kernels.maybe_compile(norm.compute)(x, *weights), norm.compute(x, *weights))
    assert describe_block(model, 1).norm is norm and len(compiled) == 2


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"norm": "dynamic_tanh"}, "dynamic_tanh"),
        ({"activation": "reglu"}, "reglu"),
        ({"blocks": [LOW_RANK]}, "low_rank"),
    ],
)
def test_no_hugging_face_model_has_them(model, name):
    with pytest.raises(UserError, match=rf"no Hugging Face model has {name}, which come"):
        FAMILIES["llama"].write_config(ModelConfig(vocab=10, **model), 8)


def test_their_keys_are_typed_and_our_names_are_taken():
    option = f"run.extensions=[{EXAMPLE}]"
    with pytest.raises(UserError, match=r"model\.norm.*rmsnorm.*dynamic_tanh"):
        load_with_extensions(None, [option, "model.norm=dynamic_tan"])
    with pytest.raises(UserError, match=r"model\.norm\.slope=steep: takes a number"):
        load_with_extensions(None, [option, "model.norm={kind: dynamic_tanh, slope: steep}"])
    with pytest.raises(ValidationError):
        Model(blocks=[{"feed_forward": {"kind": "low_rank", "rank": 0}}])
    config = load_with_extensions(None, [option, "model.norm={kind: dynamic_tanh, slope: 2}"])
    assert type(config).model_validate(config.model_dump(mode="json")) == config
    for role, field in (("norm", "norm"), ("activation", "activation")):
        default = Model.model_fields[field].default
        assert default in ROLES[role].ours
