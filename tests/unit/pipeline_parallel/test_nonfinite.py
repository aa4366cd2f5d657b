"""Numbers that are not finite: no weight changes, and parameter, pass and rank are named."""

import pytest
import torch
from bitwise import assert_bitwise_equal
from parity_runs import build_train_step

from megaframe.pipeline_parallel.nonfinite import locate_nonfinite


def read_state(train_step):
    return [tensor.clone() for _, _, _, tensor in train_step.optimizer.list_tensors()]


def train_with_nan(parallel, rank):
    """Train one step in which the last block of one rank has a NaN weight -> whether the update is
    finite, the named parameters, the named pass, and whether all state is unchanged."""
    mesh, train_step, microbatches = build_train_step(parallel, "fp64")
    before = read_state(train_step)
    if mesh.rank == rank:
        last = train_step.stages[max(train_step.stages)]
        train_step.sharded_parameters.gather(last.blocks[-1])
        value = last.blocks[-1].mlp.down.weight.value
        original, value[0, 0] = value[0, 0].clone(), torch.nan
    result = train_step.train(microbatches, 0, 1.0)
    finite = result.update.is_finite()
    names = train_step.optimizer.find_nonfinite_parameters(result.update)
    where = locate_nonfinite(result.maxima, len(train_step.rank_of), mesh.world, mesh.device)
    if mesh.rank == rank and parallel.get("zero", 0) < 3:
        value[0, 0] = original
    assert_bitwise_equal(read_state(train_step), before, because="a skipped update changes nothing")
    mesh.finish()
    return finite, names, where


@pytest.mark.parametrize(
    ("ranks", "parallel", "rank", "where"),
    [
        (1, {}, 0, "microbatch 0, stage 0, on rank 0"),
        (2, {}, 1, "microbatch 0, stage 0, on rank 1"),
        (2, {"zero": 2}, 1, "microbatch 0, stage 0, on rank 1"),
        (2, {"pipeline": 2}, 0, "microbatch 0, stage 0, on rank 0"),
        (4, {"pipeline": 2, "zero": 1}, 3, "microbatch 0, stage 1, on rank 3"),
    ],
)
def test_the_first_pass_that_is_sick_is_named_on_every_rank(ranks, parallel, rank, where, pool):
    results = pool.run(ranks, train_with_nan, parallel, rank)
    assert len(set(map(str, results))) == 1
    finite, names, place = results[0]
    assert not finite
    assert place == f"first in the forward pass of {where}"
    assert names


def train_with_overflow(zero):
    """Train in fp16 with a loss scale that overflows at first -> scales, updates, the last norm,
    the tensors of this rank, and what `locate_nonfinite` says if no pass is known."""
    mesh, train_step, microbatches = build_train_step({"zero": zero}, "fp16", 4, loss_scale=2.0**26)
    scales = []
    for step in range(16):
        scale = train_step.optimizer.loss_scale
        scales.append(float(scale))
        result = train_step.train(microbatches, step, scale / 40)
    place = locate_nonfinite([], 1, mesh.world, mesh.device)
    updates = train_step.optimizer.read_state().updates
    pieces = [piece.clone() for *_, piece in train_step.optimizer.list_tensors()]
    norm = float(result.update.grad_norm)
    mesh.finish()
    return scales, updates, norm, pieces, place


def test_forced_overflows_skip_updates_alike_at_every_zero_stage(pool):
    """Stages 1 to 3 update the same parts of the same buckets. Stage 0 updates whole buckets, whose
    last bits may differ, and of which the parity tests show the rest."""
    whole, *sharded = [pool.run(2, train_with_overflow, zero) for zero in range(4)]
    scales, updates, *_, place = whole[0]
    assert scales[1] < scales[0] and scales[-1] == scales[-2]
    assert 0 < updates == 16 - len(set(scales)) + 1
    assert place == "every pass was finite, so a sum of gradients was too large"
    for rank, results in enumerate(zip(*sharded, strict=True)):
        first, *others = results
        assert first[:2] == whole[rank][:2] == (scales, updates)
        for other in others:
            assert other[:3] == first[:3]
            why = "one microbatch is summed over two ranks in one order"
            assert_bitwise_equal(other[3], first[3], because=why)
