"""The cost of Muon in the plan: its matrices, operations, transfers, and the busiest owner."""

from collections import Counter
from itertools import repeat
from math import prod
from pathlib import Path

import pytest
import torch
from slow_cases import mark_slow
from torch.utils.flop_counter import FlopCounterMode

from megaframe.architecture.model_blocks import describe_block
from megaframe.config import RunConfig, load
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.model.model_chunk import list_model_specs
from megaframe.optim.matrix_gather import assign_owners
from megaframe.optim.muon import orthogonalize
from megaframe.planner.constants import get_family_constants
from megaframe.planner.data_parallel_times import (
    compute_muon_bytes,
    estimate_layer_muon_seconds,
    estimate_muon_seconds,
    estimate_newton_schulz_seconds,
)
from megaframe.planner.kernel_times import KernelRates
from megaframe.planner.layout_sizes import make_layout_sizes
from megaframe.planner.machine import Machine
from megaframe.planner.prediction import predict
from megaframe.training.meta_step import run_meta_step

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
CLUSTER = load_cluster("h100-ib")
ENDLESS = KernelRates(1.0, 0.0, 0.0, 1.0, 1.0, float("inf"), 0.0, 2)
"""Rates at which an operation takes a second, and nothing else takes any time."""


@pytest.mark.parametrize(
    "path", mark_slow(CONFIGS, except_for=CONFIGS[::3]), ids=lambda path: path.stem
)
def test_every_layer_has_the_matrices_that_it_declares(path):
    config = load(str(path), ["model.vocab=5003"])
    declared = {f"blocks.{layer}": Counter() for layer in range(config.model.layers)}
    for spec in list_model_specs(config.model, config.train):
        block = ".".join(spec.name.split(".")[:2])
        if spec.role == "matrix" and block in declared:
            for box in spec.matrices:
                outputs, inputs = box.shape[: -spec.inputs], box.shape[-spec.inputs :]
                declared[block][prod(outputs), prod(inputs)] += 1
    for layer, matrices in enumerate(declared.values()):
        assert describe_block(config.model, layer).matrices == matrices, layer


@pytest.mark.parametrize("sides", [(64, 64), (64, 256), (256, 64)])
def test_an_owner_computes_what_is_counted(sides):
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.empty(sides, device="meta"))
    assert estimate_newton_schulz_seconds(ENDLESS, *sides) == counter.get_total_flops()


def make_muon_config(layers=2, moe=None, **parallel):
    sections = {"moe": moe} if moe else {}
    return RunConfig(
        model={"layers": layers, "hidden": 256, "heads": 4, "vocab": 512, **sections},
        train={"seq": 64, "global_batch": 16},
        optim={"name": "muon"},
        parallel=parallel,
    )


def count_elements(layer, config):
    shapes = describe_block(config.model, layer).matrices
    return sum(number * outputs * inputs for (outputs, inputs), number in shapes.items())


CASES = {
    "tensor": (4, make_muon_config(tensor=2, zero=1)),
    "whole gradients": (4, make_muon_config(tensor=2, zero=0)),
    "divided": (4, make_muon_config(zero=3)),
    "experts": (8, make_muon_config(tensor=2, zero=1, expert=4, moe={"experts": 8, "ffn": 128})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pieces_travel_as_often_as_planned(name):
    """Pieces are sent to their owner and back. Some are not, because the owner has them already."""
    world, config = CASES[name]
    layout = Layout.from_parallel(config.parallel, world)
    traffic = [run_meta_step(config, layout, rank).traffic for rank in range(world)]
    axes = "data+tensor" if layout.tensor > 1 else "data"
    without = config.model_copy(update={"optim": config.optim.model_copy(update={"name": "lion"})})
    other = [run_meta_step(without, layout, rank).traffic for rank in range(world)]
    sent = sum(
        first.get(axes, 0) - two.get(axes, 0) for first, two in zip(traffic, other, strict=True)
    )
    machine = Machine(
        config,
        CLUSTER,
        get_family_constants("h100"),
        make_layout_sizes(config.parallel, config.train, layout),
    )
    elements = sum(map(count_elements, range(config.model.layers), repeat(config))) / layout.tensor
    planned = world * float(sum(compute_muon_bytes(machine, elements)))
    assert 0.6 * planned < sent <= planned


def test_who_works_most_is_bound_by_all_and_by_the_largest():
    """Compares with the real distribution, over as many buckets at a time as there are owners."""
    for data in (2, 4, 8, 16, 64):
        config = make_muon_config(layers=8, zero=1)
        layout = Layout(data=data)
        machine = Machine(
            config,
            CLUSTER,
            get_family_constants("h100"),
            make_layout_sizes(config.parallel, config.train, layout),
        )
        total_seconds, longest = estimate_layer_muon_seconds(machine, 0)
        nothing = estimate_muon_seconds(machine, 0.0, 0.0, 0.0)  # two transfers of no bytes
        seconds = estimate_muon_seconds(machine, 0.0, 8 * total_seconds, longest) - nothing
        matrices = list(describe_block(config.model, 0).matrices.elements())
        attention, late = matrices[:-2], matrices[-2:]
        parts, busiest = 8 * [attention, late], 0.0
        for start in range(0, len(parts), data):
            work = [
                estimate_newton_schulz_seconds(machine.rate, *m)
                for part in parts[start : start + data]
                for m in part
            ]
            loads = Counter()
            for owner, seconds_of_matrix in zip(assign_owners(work, data), work, strict=True):
                loads[owner] += seconds_of_matrix
            busiest += max(loads.values())
        assert seconds <= busiest * (1 + 1e-9) and busiest < 1.5 * seconds, data


def test_a_step_with_muon_is_longer_by_what_muon_takes():
    config = make_muon_config(layers=4, tensor=2, zero=1)
    layout = Layout.from_parallel(config.parallel, 16)
    adamw = config.model_copy(update={"optim": config.optim.model_copy(update={"name": "adamw"})})
    constants = get_family_constants("h100")
    with_muon, plain = (predict(c, layout, CLUSTER, constants) for c in (config, adamw))
    machine = Machine(
        config, CLUSTER, constants, make_layout_sizes(config.parallel, config.train, layout)
    )
    total_seconds, longest = estimate_layer_muon_seconds(machine, 0)
    elements = 4 * count_elements(0, config) / 2
    extra_seconds = float(estimate_muon_seconds(machine, elements, 4 * total_seconds, longest))
    assert extra_seconds > 0
    assert with_muon.breakdown["optimizer"] - plain.breakdown["optimizer"] == pytest.approx(
        extra_seconds
    )
