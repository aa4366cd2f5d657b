"""A step that is recorded and replayed gives the same bits as one that runs anew: with other
tokens, dropout masks, documents, numbers of tokens that have a label, loss scales and learning
rates; with evaluations in between; after a skipped step, a step without any label, steps of another
shape, a return to an earlier state and a new start; on every layout that may record.

A recording stands in for the graph of a GPU (`fake_graph.py`). It cannot show that CUDA and NCCL
record: with a GPU for each rank, the same cases run as CUDA graphs.
"""

import os
from dataclasses import replace

import fake_graph
import pytest
import torch
from bitwise import assert_bitwise_equal
from parity_runs import MODELS, deterministic, make_global_batch, on, share, with_documents
from patience import PATIENCE
from slow_cases import mark_slow

from megaframe.config import RunConfig
from megaframe.data.microbatch import IGNORE
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.distributed.nccl_settings import keep_launch_order
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.cuda_graph import _EAGER, StepGraph, record_cuda
from megaframe.training.train_step import TrainStep
from megaframe.validate.cuda_graph import find_graph_obstacles

KEPT = _EAGER + 2
"""The step before which weights and state are copied, to return to them later."""
SICK, SHORT, UNLABELLED = _EAGER + 3, _EAGER + 4, _EAGER + 5
STEPS = _EAGER + 6


class Passed:
    """A mark that the device has passed."""

    def query(self):
        return True


@deterministic()
def run(device, graphs, model, train, parallel, optim, kernels, packed=False):
    """Run one rank. Return the results of its steps, what a watch sees of the recorded ones, and
    the axes of all transfers in them."""
    if device == "cuda":
        keep_launch_order()
        train = {**train, "cuda_graph": graphs}
    elif kernels:
        os.environ["TRITON_INTERPRET"] = "1"
    config = RunConfig(
        model={"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2, **model},
        train={"seq": 8, "global_batch": 4, "precision": "fp64", "steps": 20, **train},
        optim={"lr": 0.01, "clip": 0.5, "warmup": 4, **optim},
        parallel=parallel,
        kernels=kernels,
    )
    layout = Layout.from_parallel(config.parallel, read_world_size())
    assert not [*find_graph_obstacles(config, layout.sizes)]
    mesh = Mesh(layout, device=device, timeout=PATIENCE)

    def mark():
        assert mesh.progress._captured_waits is None, "an event in a graph"
        return Passed()

    mesh.progress.record_event = mark
    numbers_found, messages, order = [], [], []
    train_step = begin_train_step(config, mesh, graphs, messages, order)
    train_step.optimizer.initialize(config.run.seed)

    def train_one(step, batch):
        mesh.progress.begin_activity(f"step {step}")
        mesh.progress.begin_part("data", None)
        group = mesh.group("data")
        own_share = share(batch, config.train.microbatch, group.index, group.size, False)
        valid = max(1, int((batch.labels_BS != IGNORE).sum()))
        result = train_step.train(own_share, step, train_step.optimizer.loss_scale / valid)
        assert result.update.is_finite() == (step != SICK)
        numbers = [result.loss, result.mtp_loss, result.update.grad_norm]
        numbers += [number for tally in result.statistics for number in tally.counts.values()]
        numbers_found.append([*numbers, *(sign.largest for sign in result.maxima)])
        bytes_sent = torch.tensor([*mesh.take_traffic().values()])
        if config.parallel.zero < 3:  # a graph also fetches what an evaluation has left here
            numbers_found[-1].append(bytes_sent)
        return own_share

    def train_to(stop, start):
        for step in range(start, stop):
            batch = on(mesh.device, make_batch(config, step, packed))
            poisoned = poison(train_step.sharded_parameters) if step == SICK else []
            if step == SHORT:
                batch = replace(batch, **{key: x[:, :-3] for key, x in list_tensors(batch)})
            own_share = train_one(step, batch)
            for bucket, saved in poisoned:
                bucket.weights.copy_(saved)
                bucket.publish_weights()
            if step % 2:
                numbers_found.append([train_step.evaluate(own_share)])

    train_to(KEPT, 0)
    weights_before = [x.clone() for *_, x in train_step.optimizer.list_tensors()]
    state = train_step.optimizer.read_state()
    train_to(STEPS, KEPT)
    for attempt in range(2):
        if attempt:
            train_step = begin_train_step(config, mesh, graphs, messages, order)
        for (*_, x), value in zip(train_step.optimizer.list_tensors(), weights_before, strict=True):
            x.copy_(value)
        train_step.optimizer.load_state(state)
        train_to(KEPT + _EAGER + 3 if attempt else KEPT + 1, KEPT)
    numbers_found.append([x for *_, x in train_step.optimizer.list_tensors()])
    numbers_found = [[x.to("cpu", copy=True) for x in numbers] for numbers in numbers_found]
    mesh.finish()
    return numbers_found, messages, order


def begin_train_step(config, mesh, graphs, messages, order):
    """Return a new train step of this rank. told: gets what a watch sees at every run of a recorded
    step. order: gets the axes of the transfers that a recording has."""
    train_step = TrainStep(config, mesh, StepTimer().time)
    if graphs:

        def record(compute):
            on_a_gpu = mesh.device.type == "cuda"
            passed, play = record_cuda(compute) if on_a_gpu else fake_graph.record(compute, order)

            def again():
                play()
                messages.append(mesh.progress.read_status(mesh.rank).activity)

            return passed, again

        train_step.graph = StepGraph(mesh, pytest.fail, record)
    return train_step


def make_batch(config, step, packed):
    """Return the global batch of a step. The number of tokens that have a label differs between
    steps. With documents, labels have weights."""
    batch = make_global_batch(config.model, config.train, step)
    if step == UNLABELLED:
        batch = replace(batch, labels_BS=torch.full_like(batch.labels_BS, IGNORE))
    if not packed:
        return batch
    weights = torch.rand(batch.labels_BS.shape, generator=torch.Generator().manual_seed(step))
    return replace(with_documents(batch, step), weights_BS=weights)


def list_tensors(batch):
    return [(key, x) for key, x in vars(batch).items() if key.endswith("_BS") and x is not None]


def poison(sharded_parameters):
    """Make weights NaN, except those that balance experts. Return the buckets with their old
    weights."""
    poisoned_buckets = []
    for bucket in sharded_parameters.buckets:
        if bucket.parameters[0].spec.role != "balance":
            poisoned_buckets.append((bucket, bucket.weights.clone()))
            bucket.weights.fill_(torch.nan)
            bucket.publish_weights()
    return poisoned_buckets


GPT, LLAMA = MODELS["gpt2"], {**MODELS["llama"], "dropout": 0.2}
MOE = {"experts": 4, "ffn": 8, "top_k": 2, "balance_loss": 0.1, "z_loss": 0.01, "jitter": 0.1}
EXPERTS = {"norm": "rmsnorm", "activation": "swiglu", "moe": MOE, "layers": 1, "dropout": 0.1}
TRITON = {"experts": "triton"}
SMALL = {"precision": "fp32", "seq": 4}
CASES = {
    "one rank": (GPT, {"microbatch": 2}, {}, {}, {}, False),
    "fp16": (
        GPT,
        {"precision": "fp16", "seq": 4, "microbatch": 2},
        {},
        {"loss_scale": 1e5 / 3},
        {},
        False,
    ),
    "documents": ({**LLAMA, "mtp_depth": 1}, {"microbatch": 2}, {}, {}, {}, True),
    "zero 0": (GPT, {}, {"data": 2}, {}, {}, False),
    "zero 1": (LLAMA, {}, {"data": 2, "zero": 1}, {"name": "muon"}, {}, True),
    "zero 2": (LLAMA, {"recompute": "full"}, {"data": 2, "zero": 2}, {}, {}, False),
    "replicas": (GPT, {}, {"data": 4, "data_replicate": 2, "zero": 2}, {}, {}, False),
    "zero 3": (GPT, {}, {"data": 2, "zero": 3}, {}, {}, False),
    "bf16 sums": (GPT, {}, {"data": 2, "zero": 1, "reduce_precision": "bf16"}, {}, {}, False),
    "tensor": (
        {**LLAMA, "layers": 1},
        {"recompute": "selective", "microbatch": 4},
        {"tensor": 4, "zero": 1},
        {},
        {},
        False,
    ),
    "two tensor ranks": ({**LLAMA, "layers": 1}, {"microbatch": 4}, {"tensor": 2}, {}, {}, False),
    "both": (
        {**GPT, "layers": 1},
        {"microbatch": 2},
        {"data": 2, "tensor": 2, "zero": 3, "tensor_chunks": 2},
        {},
        {},
        False,
    ),
    "experts": (
        {**EXPERTS, "moe": {**MOE, "balance": "global"}},
        {**SMALL, "microbatch": 2},
        {"data": 2, "zero": 2},
        {},
        TRITON,
        False,
    ),
}
ON_A_CPU = ["fp16", "documents", "zero 1", "zero 2", "zero 3", "tensor", "both", "experts"]
"""Every mechanism once; all are also recorded where there is a GPU."""
FEW = {"precision": "bf16", "seq": 16, "microbatch": 2}
ON_A_GPU = {
    **CASES,
    "experts alone": (EXPERTS, {**SMALL, "microbatch": 2}, {}, {}, TRITON, False),
    "kernels": ({**LLAMA, "hidden": 64, "vocab": 256}, FEW, {}, {}, {}, True),
}
"""The last one uses the kernels that are fastest on this GPU."""


def assert_recorded_as_plain(pool, device, case):
    plain = pool.run(count_ranks(case), run, device, False, *case)
    recorded = pool.run(count_ranks(case), run, device, True, *case)
    for (numbers, messages, order), (expected, *_) in zip(recorded, plain, strict=True):
        assert len(numbers) == len(expected)
        for number, (recorded_step, plain_step) in enumerate(zip(numbers, expected, strict=True)):
            why = "a graph has the same kernels with the same buffers"
            assert_bitwise_equal(recorded_step, plain_step, because=why, label=f"{number}")
        # All but the first steps of a start and the one of another shape; one step after the return
        # to the earlier state; two after the new start.
        assert len(messages) == STEPS - _EAGER - 1 + 1 + 2
        assert all(doing.endswith("the graph of all passes") for doing in messages)
        assert order == recorded[0][2], "ranks start transfers in different orders"


def count_ranks(case):
    return case[2].get("data", 1) * case[2].get("tensor", 1)


# The quick one has the collectives of data ranks.
@pytest.mark.parametrize("name", mark_slow(ON_A_CPU, except_for=["zero 3"]))
def test_a_recorded_step_is_the_same_to_the_bit(name, pool):
    if CASES[name][4] and torch.cuda.is_available():
        pytest.skip("where there is a GPU, kernels are not interpreted")
    assert_recorded_as_plain(pool, "cpu", CASES[name])


@pytest.mark.parametrize("name", list(ON_A_GPU))
def test_a_step_on_a_gpu_is_the_same_to_the_bit_as_a_graph(name, pool):
    ranks, gpus = count_ranks(ON_A_GPU[name]), torch.cuda.device_count()
    if gpus < ranks:
        pytest.skip(f"needs a GPU for each of {ranks} ranks, and here are {gpus}")
    assert_recorded_as_plain(pool, "cuda", ON_A_GPU[name])


def test_masks_are_those_of_the_step():
    config = RunConfig(
        model={"layers": 1, "hidden": 16, "heads": 4, "vocab": 37, "dropout": 0.5},
        train={"seq": 8, "global_batch": 4, "precision": "fp64"},
        optim={"lr": 1e-300, "min_lr": 0.0},  # no weight changes
    )
    mesh = Mesh(Layout(), device="cpu")
    train_step = begin_train_step(config, mesh, True, [], [])
    train_step.optimizer.initialize(1)
    batch = make_batch(config, 0, False)
    losses = [float(train_step.train([batch], step, 1.0).loss) for step in (0, 1, 2, 0, 1, 2, 7)]
    mesh.finish()
    assert losses[:3] == losses[3:6] and len(set(losses)) == 4
