"""The batches of a run: each with the valid tokens of all ranks, which no step waits for."""

import pytest
import torch
from patience import PATIENCE
from token_files import make_counting_documents, write_token_file

from megaframe.config import RunConfig
from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE
from megaframe.distributed.collectives import receive, send
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.training.batches import Batches

SEQ, BATCH = 8, 8


def find_nothing(batch):
    return False


def make(path, *, masked=True, **data):
    """Return a mesh of data ranks, this rank's loader, and its batches."""
    config = RunConfig(
        model={"vocab": 65536},
        train={"seq": SEQ, "global_batch": BATCH, "microbatch": 1},
        data={"sources": [{"path": path}], "split": (1, 0, 0), "mask_eod": masked, **data},
    )
    mesh = Mesh(Layout(data=read_world_size()), device="cpu", timeout=PATIENCE)
    loader = Loader(config, mesh.rank, read_world_size())
    return mesh, loader, Batches(loader, mesh.data_control_group, masked=masked)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_token_file(
        tmp_path_factory.mktemp("tokens") / "source", make_counting_documents([5, 30, 3, 12] * 9, 0)
    )


def count_tokens(steps):
    """Return the valid tokens in what one rank got."""
    return [sum(int((m.labels_BS != IGNORE).sum()) for m in step.microbatches) for step in steps]


def look_and_take(path, masked):
    """Take six steps: looked at or not, some left out, and after a way back."""
    mesh, loader, batches = make(path, masked=masked)
    steps, sums = [], []

    def take(leaves_out=find_nothing):
        step, valid = batches.take_next(leaves_out)
        steps.append(step)
        sums.append(valid)

    take()
    batches.look_ahead()
    took, state = take(), loader.state
    batches.look_ahead()
    assert loader.state == state, "looking ahead changes nothing that is saved"
    take(lambda batch: batch.first == 2 * BATCH)
    batches.look_ahead()
    loader.load(state)
    take()
    batches.look_ahead()
    batches.look_ahead()
    take()
    assert took is None
    calls = mesh.data_control_group.traffic.take()[1]
    mesh.finish()
    return [step.first for step in steps], count_tokens(steps), sums, calls


@pytest.mark.parametrize("masked", [True, False])
def test_every_step_has_the_sum_of_its_own_tokens(masked, path, pool):
    results = pool.run(2, look_and_take, path, masked)
    firsts, *_ = results[0]
    assert firsts == [0, BATCH, 3 * BATCH, 2 * BATCH, 3 * BATCH]
    total = [sum(ranks) for ranks in zip(*(counts for _, counts, _, _ in results), strict=True)]
    for _, _, sums, calls in results:
        assert sums == total
        assert bool(calls) == masked
    assert (min(total) < SEQ * BATCH) == masked


def take_while_the_other_does_not(path):
    """Rank 0 takes a step that both have looked at; rank 1 does so only when rank 0 has it."""
    mesh, _, batches = make(path)
    batches.look_ahead()
    signal_tensor = torch.zeros(1)
    if mesh.rank:
        receive(signal_tensor, mesh.world, source=0).wait()
    _, valid = batches.take_next(find_nothing)
    if not mesh.rank:
        send(signal_tensor, mesh.world, to=1).wait()
    mesh.finish()
    return valid


def test_no_rank_waits_for_another_to_begin_a_step(path, pool):
    first, other = pool.run(2, take_while_the_other_does_not, path)
    assert first == other > 1


def fail_when_due(path):
    mesh, loader, batches = make(path, prefetch=0)
    read = loader._dataset.read

    def fails(*arguments):
        raise OSError("the third step cannot be read")

    batches.take_next(find_nothing)
    batches.look_ahead()
    loader._dataset.read = fails
    batches.take_next(find_nothing)
    batches.look_ahead()
    with pytest.raises(OSError, match="the third step"):
        batches.take_next(find_nothing)
    loader._dataset.read = read
    mesh.finish()


def test_what_cannot_be_read_is_raised_when_it_is_due(path, pool):
    pool.run(1, fail_when_due, path)
