"""Optimizer state and master weights in host memory change no bit: under every rule and ZeRO stage,
through skipped steps, and when a run is resumed with or without offload.
"""

import time
from unittest.mock import patch

import pytest
import torch
from bitwise import assert_bitwise_equal, assert_same_bits, assert_same_files, assert_same_losses
from entry_runs import read_losses, train
from fake_streams import offload_on_cpu
from parity_runs import FEW, MODELS, assert_same, build_train_step, run
from slow_cases import mark_slow, slow

from megaframe.checkpoint.background import BackgroundCopier
from megaframe.optim.optimizer_state import Moments
from megaframe.resilience.replica_check import ReplicaCheck

OPTIMIZERS = {
    "adamw": {"ema": 0.7},
    "int8": {"state": "int8"},
    "lion": {"name": "lion", "state": "bf16", "frozen": ("blocks.1.*",)},
    "sgd": {"name": "sgd", "momentum": 0.0},
    "nesterov": {"name": "sgd", "nesterov": True, "ema": 0.7},
    "muon": {"name": "muon", "ema": 0.7},
}
MODEL = {**MODELS["llama"], "hidden": 32}
CASES = [
    # Every optimizer with every second stage.
    (optim, zero)
    for number, optim in enumerate(OPTIMIZERS)
    for zero in (number % 2, number % 2 + 2)
]
QUICK = [("int8", 1), ("nesterov", 0), ("muon", 3)]


def run_away(model, train, parallel, optim, kernels=None):
    with offload_on_cpu():
        optim = {**optim, "offload": True}
        return run(model, train, parallel, optim=optim, kernels=kernels)


def run_here(model, train, parallel, optim, kernels=None):
    return run(model, train, parallel, optim=optim, kernels=kernels)


def assert_offload_changes_no_bit(pool, ranks, *sections):
    actual = pool.run(ranks, run_away, *sections)
    expected = pool.run(ranks, run_here, *sections)
    assert_same_bits(actual, expected, because="an update in chunks has whole vectors in each")
    return actual


@pytest.mark.parametrize(("optim", "zero"), mark_slow(CASES, except_for=QUICK))
def test_offload_of_state_changes_no_bit(optim, zero, pool):
    train = {**FEW, "precision": "bf16"}
    assert_offload_changes_no_bit(pool, 2, MODEL, train, {"zero": zero}, OPTIMIZERS[optim])


MOE = {"activation": "swiglu", "moe": {"experts": 4, "ffn": 8, "balance": "bias"}}


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        slow(MODELS["gpt2"], {"pipeline": 2, "zero": 1}),
        slow(MODELS["llama"], {"tensor": 2, "zero": 2}),
        slow(MODELS["llama"], {"data_replicate": 2, "zero": 3}),
        (MOE, {"expert": 2, "zero": 3}),
    ],
)
def test_offload_of_state_changes_no_bit_under_other_layouts(model, parallel, pool):
    train = {**FEW, "microbatch": 1, "precision": "fp16"}
    assert_offload_changes_no_bit(pool, 4, model, train, parallel, {})


@pytest.mark.parametrize("zero", [slow(0), 3])
def test_offload_of_state_changes_no_bit_with_the_fused_kernel(zero, pool):
    model = {**MODEL, "layers": 1, "hidden": 16}
    train = {"precision": "bf16", "microbatch": 4}
    assert_offload_changes_no_bit(pool, 2, model, train, {"zero": zero}, {}, {"update": "triton"})


@pytest.mark.parametrize("zero", [slow(1), 3])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_the_answer_is_that_of_one_process(optim, zero, pool):
    """In fp64 nothing is rounded, so weights stay on the device and only the state is away."""
    expected = pool.run(1, run_here, MODEL, {"microbatch": 4}, {}, OPTIMIZERS[optim])[0]
    parallel = {"zero": zero}
    assert_same(
        pool.run(2, run_away, MODEL, {"microbatch": 2}, parallel, OPTIMIZERS[optim]), expected
    )


def train_with_overflow(zero, offload):
    """Train in fp16 with a loss scale that overflows at first -> scales, and all tensors of this
    rank after each step."""
    with offload_on_cpu():
        mesh, train_step, microbatches = build_train_step(
            {"zero": zero}, "fp16", 4, loss_scale=2.0**26, ema=0.5, offload=offload
        )
        scales, states = [], []
        for step in range(14):
            scales.append(float(train_step.optimizer.loss_scale))
            train_step.train(microbatches, step, scales[-1] / 40)
            states.append([piece.clone() for *_, piece in train_step.optimizer.list_tensors()])
    mesh.finish()
    return scales, states


@pytest.mark.parametrize("zero", [slow(0), 1, slow(3)])
def test_overflows_skip_the_same_updates(zero, pool):
    away, on_device = (pool.run(2, train_with_overflow, zero, offload) for offload in (True, False))
    for (scales, states), (others, expected) in zip(away, on_device, strict=True):
        assert scales == others and scales[1] < scales[0]
        first, last = states[0], states[-1]
        assert_bitwise_equal(first, states[1], because="a skipped update changes nothing")
        assert any(bool((one != other).any()) for one, other in zip(first, last, strict=True))
        for actual, reference in zip(states, expected, strict=True):
            assert_bitwise_equal(actual, reference, because="chunks have whole vectors in each")


def compare_replicas(zero, replicate):
    """Return the comparisons of replicas after each of two steps, and after a flipped bit."""
    with offload_on_cpu():
        parallel = {"zero": zero, "data_replicate": replicate}
        mesh, train_step, microbatches = build_train_step(parallel, "bf16", 2, offload=True)
        replicas = ReplicaCheck(
            mesh, train_step.sharded_parameters.buckets, train_step.optimizer.synchronize_state
        )
        verdicts = []
        for step in range(2):
            train_step.train(microbatches, step, 1.0)
            if mesh.rank == 0:
                train_step.optimizer.synchronize_state()  # `compare` settles the other ranks
            verdicts.append(replicas.compare())
        assert all(bucket.offloaded for bucket in train_step.sharded_parameters.buckets)
        if mesh.rank == 1:
            bits = train_step.sharded_parameters.buckets[-1].weights.view(torch.int32)
            bits[5] ^= 1
        verdicts.append(replicas.compare())
    mesh.finish()
    return verdicts


@pytest.mark.parametrize(("zero", "replicate"), [slow(0, 1), (1, 2), slow(3, 4)])
def test_replicas_are_compared_where_weights_lie(zero, replicate, pool):
    for first, second, third in pool.run(4, compare_replicas, zero, replicate):
        assert first is None and second is None
        assert third is not None and 1 in third.ranks


def train_away(overrides):
    with offload_on_cpu(), patch.object(BackgroundCopier, "_copy", copy_late):
        train(overrides)


def copy_late(background, tiles, copy):
    """Copy late, so that an update that does not wait for the copy would be saved."""
    time.sleep(0.2)
    plain_copy(background, tiles, copy)


plain_copy = BackgroundCopier._copy


@pytest.mark.slow
@pytest.mark.parametrize(("first", "zero"), [(train, 3), (train_away, 1)])
def test_a_run_goes_on_where_state_lies_elsewhere(first, zero, pool, overrides, tmp_path):
    """One start keeps state on the device, the other on the host; saves run beside training."""
    second = train if first is train_away else train_away
    shared_keys = {
        "optim__schedule": "constant",
        "optim__ema": 0.9,
        "optim__offload": True,  # ignored on a CPU, except under `kept_away`
        "checkpoint__every": 2,
        "checkpoint__keep": 9,
        "train__precision": "bf16",
        "parallel__zero": zero,
    }
    pool.run(2, train, overrides(run__dir=tmp_path / "whole", **shared_keys))
    pool.run(2, first, overrides(train__steps=6, **shared_keys))
    pool.run(2, second, overrides(checkpoint__resume="latest", **shared_keys))
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(losses, whole, because="a checkpoint has every bit, wherever its state was")
    for number in range(2, 13, 2):
        files = [
            sorted((tmp_path / run / f"checkpoints/step-{number:08}").glob("*.safetensors"))
            for run in ("run", "whole")
        ]
        assert files[0] and len(files[0]) == len(files[1])
        assert_same_files(*files, because="they hold the same bits")


def measure_buffers(zero):
    """Train one offloaded step -> bytes of the buffers, of the largest chunk, of what is away, of
    the weights, and what the device holds."""
    largest = 0
    plain = Moments.iterate_chunks

    def watched(moments, weights, *arguments, **options):
        nonlocal largest
        for span, mine, state in plain(moments, weights, *arguments, **options):
            largest = max(largest, sum(tensor.nbytes for tensor in (mine, *state.values())))
            yield span, mine, state

    with offload_on_cpu():
        Moments.iterate_chunks = watched
        try:
            mesh, train_step, microbatches = build_train_step(
                {"zero": zero}, "bf16", offload=True, ema=0.9
            )
            train_step.train(microbatches, 0, 1.0)
        finally:
            Moments.iterate_chunks = plain
        offload = train_step.optimizer.offload
        weights = sum(bucket.weights.nbytes for bucket in train_step.sharded_parameters.buckets)
        mesh.finish()
        memory = train_step.optimizer.count_memory_bytes()
        return offload.staging_bytes, largest, offload.host_bytes, weights, memory


@pytest.mark.parametrize("zero", [0, 3])
def test_the_device_has_room_for_three_chunks_and_the_host_all(zero, pool):
    for size, largest, away, weights, memory in pool.run(2, measure_buffers, zero):
        assert size == 3 * largest > 0
        assert away == 4 * weights  # weights, two moments and an average, all in fp32
        assert memory["weights"] == memory["optimizer"] == 0
