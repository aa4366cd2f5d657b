"""What is frozen in the plan: as many bytes and products as a step of a rank counts.

Tests `megaframe.architecture.frozen` and `megaframe.planner.bucket_units`.
"""

import re

import numpy as np
import pytest
import torch
from repo_copy import ROOT
from slow_cases import slow
from torch.utils.flop_counter import FlopCounterMode

from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import compute_trained_share, plan_stages
from megaframe.config import RunConfig, load
from megaframe.config.schema import KernelsConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.model.model_chunk import list_model_specs
from megaframe.optim.parameter_groups import find_frozen_names
from megaframe.planner.constants import get_cluster_constants, get_family_constants
from megaframe.planner.layer_times import estimate_block_times
from megaframe.planner.layout_sizes import LayoutSizes, make_layout_sizes
from megaframe.planner.machine import Machine
from megaframe.planner.memory_estimates import estimate_peak_memory
from megaframe.planner.parameter_counts import count_rank_parameters
from megaframe.planner.peak_memory import compute_pipeline_memory
from megaframe.planner.prediction import predict
from megaframe.planner.searched_schedules import ScheduleColumn
from megaframe.schedule.named import NAMED_SCHEDULES
from megaframe.training.meta_step import run_meta_step
from megaframe.training.meta_step.compare import compare_with_plan
from megaframe.training.train_step import TrainStep

FROZEN = ["embedding.*", "blocks.0.*", "blocks.1.mlp.*"]


def make_config(frozen=FROZEN, model=None, **parallel):
    model = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 512, **(model or {})}
    train = {"seq": 32, "global_batch": 8, "microbatch": 1, "precision": "bf16"}
    return RunConfig(model=model, train=train, parallel=parallel, optim={"frozen": frozen})


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({"zero": 1}, {}),
        slow({"zero": 0}, {}),
        slow({"zero": 2, "pipeline": 2}, {}),
        ({"zero": 3}, {"tie_embeddings": True}),
        slow({"zero": 1, "tensor": 2}, {"activation": "swiglu", "kv_heads": 2}),
    ],
)
def test_a_rank_has_and_moves_what_is_planned(parallel, model):
    config = make_config(model=model, **parallel)
    layout = Layout.from_parallel(config.parallel, 4)
    rows = compare_with_plan(config, layout, 0, run_meta_step(config, layout, 0))
    compared = {row.name: row for row in rows}
    for name in ("weights, values, gradients", "optimizer", "moved over data"):
        # Buckets are padded, and blocks that are still present are not gathered again.
        least = 0.7 if name == "moved over data" and config.parallel.zero == 3 else 0.98
        row = compared[name]
        assert least * row.planned <= row.counted <= 1.02 * row.planned, row


def count_flops(config):
    """Return the FLOPs of the products of a step, by torch's own counting."""
    mesh = Mesh(Layout(), device="cpu")
    train_step = TrainStep(config, mesh)
    train_step.optimizer.initialize(1)
    tokens = torch.zeros(1, config.train.seq, dtype=torch.int64)
    microbatch = Microbatch(tokens, tokens, torch.arange(1))
    with FlopCounterMode(display=False) as counter:
        train_step.train([microbatch], 0, 1.0)
    mesh.finish()
    return counter.get_total_flops()


def test_no_weight_gradients_are_multiplied_or_planned():
    train = {"precision": "fp64"}
    some, none = (
        config.model_copy(update={"train": config.train.model_copy(update=train)})
        for config in (make_config(), make_config([]))
    )
    specs = list_model_specs(some.model, some.train)
    frozen = find_frozen_names(some.optim.frozen, specs)
    elements = sum(spec.size for spec in specs if spec.name in frozen and spec.role == "matrix")
    assert count_flops(none) - count_flops(some) == 2 * some.train.seq * elements
    cluster = load_cluster("h100-ib")
    sizes = make_layout_sizes(some.parallel, some.train, Layout())
    seconds = [
        [
            estimate_block_times(
                Machine(config, cluster, get_family_constants("h100"), sizes), layer
            ).compute.weight
            for layer in range(3)
        ]
        for config in (some, none)
    ]
    shares = [compute_trained_share(some.model, some.optim.frozen, layer) for layer in range(3)]
    assert shares[0] == 0 and 0 < shares[1] < 1 and shares[2] == 1
    for with_frozen, every, share in zip(*seconds, shares, strict=True):
        assert float(with_frozen) == pytest.approx(share * float(every))


@pytest.mark.parametrize(
    "patterns",
    [[], ["*"], ["blocks.2.*"], ["*.gain", "head*"], ["predictors.0.*"], ["blocks.0.mlp.*", "*s"]],
)
def test_names_in_the_plan_are_those_of_the_model(patterns):
    model = {
        "mtp_depth": 2, "position": "learned", "bias": True, "head_bias": True, "heads": 4,
        "embedding_norm": True, "kv_heads": 2, "layers": 3, "hidden": 64, "vocab": 100,
        "moe": {"experts": 4, "ffn": 16, "shared": 1, "first": 1, "router_bias": True},
    }  # fmt: skip
    config = make_config([], model)
    every = count_rank_parameters(config.model, config.train, Layout(), plan_stages(config))
    of_rank = config.model, config.train, Layout(), plan_stages(config), tuple(patterns)
    named = list_model_specs(config.model, config.train)
    specs = [spec for spec in named if spec.role != "balance"]
    everything = patterns == ["*"]  # refused in a run, which would have nothing to train
    frozen = find_frozen_names([] if everything else patterns, named)
    kept = 0 if everything else sum(spec.size for spec in specs if spec.name not in frozen)
    assert count_rank_parameters(*of_rank).total == kept
    assert every.total == sum(spec.size for spec in specs)


ADAPTERS = {"kv_heads": 2, "activation": "swiglu", "adapters": {"rank": 16}}
NF4 = {**ADAPTERS, "adapters": {"rank": 16, "quantize_base": {"absmax_block": 2}}}
INT8 = {**ADAPTERS, "adapters": {"rank": 16, "quantize_base": {"type": "int8"}}}


@pytest.mark.parametrize(
    ("zero", "model"),
    [(0, {}), (1, {}), (3, {"activation": "swiglu"}), (1, NF4), (3, INT8), (3, ADAPTERS)],
)
def test_the_estimate_of_a_search_is_near_the_plan(zero, model):
    """Without a pipeline; in one, every rank is assumed to have the model's share of them."""
    config = make_config(model={**model, "layers": 16, "vocab": 2048}, zero=zero)
    frozen = [f"blocks.{layer}.*" for layer in range(12)] if "adapters" not in model else []
    config = config.model_copy(
        update={"optim": config.optim.model_copy(update={"frozen": tuple(frozen)})}
    )
    layout, chip = Layout(data=4), load_cluster("h100-ib").chip
    sizes = make_layout_sizes(config.parallel, config.train, layout)
    arrays = {name: np.atleast_1d(value) for name, value in vars(sizes).items()}
    schedule = ScheduleColumn((NAMED_SCHEDULES["1f1b"],), np.zeros(1, dtype=int))
    (estimate,) = estimate_peak_memory(config, chip, LayoutSizes(**arrays), schedule)
    (plan,) = compute_pipeline_memory(config, layout, build_step_schedule(config, 2), chip).values()
    planned = plan.total - plan.overhead
    assert estimate - plan.overhead == pytest.approx(planned, rel=0.1)


DORA = {**ADAPTERS, "adapters": {"rank": 16, "dora": True}}
EXPERTS = {"moe": {"experts": 4, "ffn": 64, "balance": "none"}, "adapters": {"rank": 16}}


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({"zero": 1, "tensor": 2}, DORA),
        slow({"zero": 1, "tensor": 2}, ADAPTERS),
        slow({"zero": 0}, ADAPTERS),
        slow({"zero": 2, "pipeline": 2}, ADAPTERS),
        ({"zero": 3}, ADAPTERS),
        slow({"zero": 1, "expert": 2}, EXPERTS),
        ({"zero": 3}, NF4),
        ({"zero": 2, "pipeline": 2}, NF4),
        slow({"zero": 3, "tensor": 2}, INT8),
        slow({"zero": 1, "tensor": 2}, NF4),
    ],
)
def test_the_base_of_adapters_is_planned_without_gradients_and_state(parallel, model):
    config = make_config([], model, **parallel)
    layout = Layout.from_parallel(config.parallel, 4)
    rows = compare_with_plan(config, layout, 0, run_meta_step(config, layout, 0))
    compared = {row.name: row for row in rows}
    for name in ("weights, values, gradients", "optimizer", "activations, messages"):
        row = compared[name]
        assert 0.97 * row.planned <= row.counted <= 1.03 * row.planned, row
    if "quantize_base" in model["adapters"]:
        row = compared["temporaries"]
        assert row.counted <= 1.03 * row.planned
        # Blocks whose values are still there are not gathered again.
        row, least = compared["moved over data"], 0.59 if config.parallel.zero == 3 else 0.97
        assert least * row.planned <= row.counted <= 1.03 * row.planned, row
    whole = make_config([], {**model, "adapters": None}, **parallel)
    others = compare_with_plan(whole, layout, 0, run_meta_step(whole, layout, 0))
    (optimizer,) = (row.counted for row in others if row.name == "optimizer")
    assert compared["optimizer"].counted < optimizer / 3


def test_magnitudes_take_time_but_no_weight_gradients():
    """In the forward pass the weight is read for them too, however few tokens there are."""

    def estimate(dora, microbatch):
        adapters = {"rank": 16, "dora": dora}
        wide = {"hidden": 4096, "heads": 32}  # so that the host's launches do not take longer
        config = make_config([], {**ADAPTERS, **wide, "adapters": adapters})
        train = config.train.model_copy(update={"microbatch": microbatch})
        sizes = make_layout_sizes(config.parallel, train, Layout())
        machine = Machine(config, load_cluster("h100-ib"), get_family_constants("h100"), sizes)
        return estimate_block_times(machine, 0).compute

    added = []
    for microbatch in (256, 512):
        plain, rescaled = estimate(False, microbatch), estimate(True, microbatch)
        assert rescaled.backward > plain.backward and rescaled.weight == plain.weight
        added.append(float(rescaled.forward - plain.forward))
    few, many = added
    assert few < many < 2 * few


def test_values_of_codes_take_as_long_as_what_makes_them_moves():
    """A kernel reads codes and writes values; plain code, as on CPUs, has numbers in between."""

    def estimate(cluster, **kernels):
        # So much that the host's launches do not take longer.
        config = make_config(model={**NF4, "hidden": 4096, "heads": 32})
        config = config.model_copy(update={"kernels": KernelsConfig(**kernels)})
        train = config.train.model_copy(update={"microbatch": 256})
        sizes = make_layout_sizes(config.parallel, train, Layout())
        machine = Machine(config, load_cluster(cluster), get_family_constants("h100"), sizes)
        of_forward = estimate_block_times(machine, 0).compute.forward
        linears = describe_block(config.model, 0).linears
        coded = sum(linear.elements for linear in linears if linear.quantised is not None)
        return of_forward, coded / machine.rate.memory

    (by_kernel, each), (plain, _) = estimate("h100-ib"), estimate("h100-ib", codes="reference")
    assert plain - by_kernel == pytest.approx(2 * (4 / 2 + 4) * each, rel=1e-6)
    assert estimate("cpu")[0] == estimate("cpu", codes="reference")[0]


def test_the_guide_has_what_is_planned():
    guide = (ROOT / "docs/guides/finetuning.md").read_text()
    rows = re.findall(r"^\| (none|`\{.*\}`) \| (.*) \|$", guide, re.MULTILINE)
    assert len(rows) == 4
    for name, cells in rows:
        coding = "" if name == "none" else f", quantize_base: {name.strip('`')}"
        keys = ["train.global_batch=16", "train.microbatch=1", "train.seq=4096"]
        keys += ["train.recompute=full", f"model.adapters={{rank: 16{coding}}}"]
        config = load(str(ROOT / "configs/llama3-8b.yaml"), keys)
        small, large = (
            predict(config, Layout(), cluster, get_cluster_constants(cluster))
            for cluster in map(load_cluster, (str(ROOT / "docs/examples/rtx-4090.yaml"), "h100-ib"))
        )
        memory, of_large = small.memory_bytes, sum(large.memory_bytes.values())
        sizes = memory["weights"], memory["values"], sum(memory.values()), of_large
        figures = [f"{size / 2**30:.1f}" for size in sizes] + [f"{large.step_seconds:.1f}"]
        assert small.fits == (name != "none")
        assert re.findall(r"\d+\.\d+", cells) == figures, name
