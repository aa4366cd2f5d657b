"""What ZeRO stages move and when: results are bitwise equal where sums have the same order, also
when overlapped, and bytes follow the closed forms, separately for slow links.
"""

import pytest
from bitwise import assert_same_bits
from parity_runs import MODELS, make_global_batch, run, share
from patience import PATIENCE
from slow_cases import mark_slow, slow

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.train_step import TrainStep

LAYERS, ITEM = 4, 8


@pytest.mark.parametrize("name", mark_slow(MODELS, except_for=["llama"]))
@pytest.mark.parametrize("ranks", [slow(2), 4])
def test_stages_that_update_the_same_parts_are_bitwise_equal(ranks, name, pool):
    train = {"microbatch": 8 // ranks}
    first, *others = (
        pool.run(ranks, run, {**MODELS[name], "layers": LAYERS}, train, {"zero": zero})
        for zero in (1, 2, 3)
    )
    for other in others:
        assert_same_bits(other, first, because="one microbatch is summed over ranks in one order")


@pytest.mark.parametrize(
    ("zero", "replicas", "compress"),
    [
        # Every two of stage, replicas and compression occur together.
        *(slow(1, 2, "none"), (1, 1, "int8"), slow(1, 2, "powersgd")),
        *(slow(2, 1, "none"), slow(2, 2, "int8"), slow(2, 1, "powersgd")),
        *((3, 2, "none"), slow(3, 1, "int8"), slow(3, 2, "powersgd")),
    ],
)
def test_overlap_changes_no_bit_of_any_stage(zero, replicas, compress, pool):
    parallel = {"zero": zero, "data_replicate": replicas, "compress": compress}
    serial, overlapped = (
        pool.run(4, run, MODELS["gpt2"], {"microbatch": 1}, parallel, serial)
        for serial in (True, False)
    )
    assert_same_bits(serial, overlapped, because="overlap moves waits, not what is computed")


def measure_traffic(model, train, parallel, axes):
    """Train a step -> its bytes over each of the axes, (length, stage, spec) of each bucket, and
    the number of elements."""
    config = RunConfig(
        model={"layers": LAYERS, "hidden": 16, "heads": 4, "vocab": 37, **model},
        train={"seq": 10, "global_batch": 8, "precision": "fp64", "steps": 9, **train},
        parallel=parallel,
    )
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cpu", timeout=PATIENCE
    )
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(config.run.seed)
    group = mesh.group("data")
    own_share = share(
        make_global_batch(config.model, config.train, 0),
        config.train.microbatch,
        group.index,
        group.size,
        False,
    )
    train_step.train(own_share, 0, 0.01)
    mesh.take_traffic()
    train_step.train(own_share, 1, 0.01)
    traffic = mesh.take_traffic()
    buckets = [
        (bucket.length, bucket.sharding.stage, bucket.parameters[0].spec)
        for bucket in train_step.sharded_parameters.buckets
    ]
    elements = sum(parameter.spec.size for parameter in train_step.stages[0].parameters())
    # The step ends before its values are gathered: nobody leaves while others still send.
    mesh.finish()
    return [traffic[axis] for axis in axes], buckets, elements


def count_gathers(spec, tied, microbatches):
    """Return how often a step gathers a bucket's values at stage 3; for blocks, the mean of all.

    The two blocks that computed last keep their values from a forward to its backward pass, and
    from that to the next forward pass. A tied embedding is gathered for each of its uses.
    """
    if spec.role == "matrix":
        return (2 * LAYERS - 2 + (microbatches - 1) * (2 * LAYERS - 4)) / LAYERS
    return microbatches * (2 if tied and "token" in spec.name else 1)


@pytest.mark.parametrize(
    ("name", "ranks", "zero", "microbatches"),
    [
        # All combinations of stage, ranks and microbatches; each two of them with both models.
        *(("gpt2", 4, 0, 2), ("gpt2", 4, 1, 2), ("llama", 4, 2, 2), ("llama", 4, 3, 2)),
        *(slow("gpt2", 2, zero, 1) for zero in (0, 1)),
        *(slow("llama", 2, zero, 2) for zero in (0, 1)),
        *(slow("llama", 4, zero, 1) for zero in (0, 1)),
        *(slow("llama", 2, zero, 1) for zero in (2, 3)),
        *(slow("gpt2", 2, zero, 2) for zero in (2, 3)),
        *(slow("gpt2", 4, zero, 1) for zero in (2, 3)),
    ],
)
def test_bytes_over_data_ranks_are_the_closed_form(name, ranks, zero, microbatches, pool):
    model, train = MODELS[name], {"microbatch": 8 // ranks // microbatches}
    tied = model.get("tie_embeddings", False)
    expected = 0.0
    results = pool.run(ranks, measure_traffic, model, train, {"zero": zero}, ["data"])
    for length, stage, spec in results[0][1]:
        scattered = microbatches if stage >= 2 else 1
        gathered = count_gathers(spec, tied, microbatches) if stage == 3 else 1
        expected += (scattered + gathered) * length
    for (sent_bytes,), buckets, elements in results:
        padded = sum(length for length, *_ in buckets)
        assert elements <= padded <= elements + 20 * 8 * ranks * len(buckets)
        assert sent_bytes == expected * ITEM * (ranks - 1) / ranks


@pytest.mark.parametrize("zero", [0, slow(1), slow(2), 3])
def test_slow_links_carry_the_share_of_one_rank_of_a_node(zero, pool):
    """With two nodes of two ranks, a rank sends over slow links half of what a ring over the nodes
    would take, and less than half of what a ring over all ranks does."""
    parallel = {"zero": zero, "data_replicate": 2}
    train = {"microbatch": 2}
    results = pool.run(4, measure_traffic, MODELS["gpt2"], train, parallel, ["data_replicate"])
    flat = pool.run(4, measure_traffic, MODELS["gpt2"], train, {"zero": 0}, ["data"])[0][0][0]
    for (sent,), buckets, _ in results:
        padded = sum(length for length, *_ in buckets)
        ring_of_nodes = 2 * padded * ITEM * (2 - 1) / 2
        assert sent == ring_of_nodes / 2
        assert sent < flat / 2
