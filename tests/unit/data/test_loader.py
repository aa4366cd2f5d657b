"""The order of samples: the same for any ranks, and every sample once in an epoch.

Tests `megaframe.data.loader` and `megaframe.data.prefetch`.
"""

import shutil
from pathlib import Path

import pytest
import torch
from loader_runs import SEQ, is_same, list_samples, make_config, take
from token_files import write_token_file

from megaframe.config.model import ModelConfig
from megaframe.config.schema import BatchRampConfig
from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE
from megaframe.errors import UserError


@pytest.mark.parametrize(("ranks", "microbatch"), [(1, 4), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_the_global_batch_is_the_same_for_any_ranks_and_microbatch(paths, ranks, microbatch):
    single_rank = Loader(make_config(paths), 0, 1)
    config = make_config(paths, train={"microbatch": microbatch})
    loaders = [Loader(config, rank, ranks) for rank in range(ranks)]
    for step in range(12):
        steps = [loader.next() for loader in loaders]
        expected = single_rank.next()
        assert list_samples(steps) == list_samples([expected])
        assert all(step.state == expected.state and step.samples == 8 for step in steps)
        for rank, one in enumerate(steps):
            for i, batch in enumerate(one.microbatches):
                first = step * 8 + (i * ranks + rank) * microbatch
                assert batch.samples_B.tolist() == list(range(first, first + microbatch))


@pytest.mark.parametrize(("ranks", "microbatch"), [(2, 4), (4, 1), (8, 1)])
def test_the_share_of_an_island_does_not_depend_on_its_ranks(paths, ranks, microbatch):
    """Islands have the halves of the batch that all have together."""
    single_rank = Loader(make_config(paths), 0, 1)
    config = make_config(paths, train={"microbatch": microbatch}).replace(parallel={"islands": 2})
    loaders = [Loader(config, rank, ranks) for rank in range(ranks)]
    for _ in range(4):
        steps = [loader.next() for loader in loaders]
        expected = list_samples([single_rank.next()])
        half = ranks // 2
        shares = [list_samples(steps[:half]), list_samples(steps[half:])]
        assert shares == [expected[:4], expected[4:]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_islands_of_a_server_have_the_parts_of_one_batch(paths, ranks):
    """One that joins after three steps reads on where the others are."""
    single_rank = Loader(make_config(paths), 0, 1)
    config = make_config(paths, train={"microbatch": 2, "global_batch": 4})
    islands = [
        [
            Loader(config.replace(sync={"server": "s", "islands": 2, "island": island}), r, ranks)
            for r in range(ranks)
        ]
        for island in range(2)
    ]
    for step in range(5):
        expected = single_rank.next()
        if step == 3:
            for loader in islands[1]:
                loader.skip(3)
        for island, loaders in enumerate(islands):
            if island == 0 or step >= 3:
                steps = [loader.next() for loader in loaders]
                own = list_samples([expected])[4 * island :][:4]
                assert list_samples(steps) == own
                assert all((one.samples, one.first) == (4, 8 * step) for one in steps)
                assert all(one.state == expected.state for one in steps)


def test_labels_are_the_next_tokens_and_every_epoch_holds_every_sample_once(paths):
    config = make_config(paths[:1], train={"global_batch": 5})
    loader = Loader(config, 0, 1)
    windows = (16 * 13 - 1) // SEQ
    assert windows == 25
    orders = []
    for _ in range(3):
        firsts = []
        for step in take(loader, 5):
            for batch in step.microbatches:
                assert torch.equal(batch.labels_BS, batch.tokens_BS + 1)
                assert batch.positions_BS is None and batch.documents_BS is None
                firsts += batch.tokens_BS[:, 0].tolist()
        assert sorted(firsts) == [window * SEQ for window in range(windows)]
        orders.append(tuple(firsts))
    assert len(set(orders)) == 3


def test_sources_come_by_weight_and_each_in_an_order_of_its_own(paths):
    """A source's samples come in the same order whatever it is blended with."""
    blended = list_samples(take(Loader(make_config(paths), 0, 1), 70))
    for i, (path, weight) in enumerate(zip(paths, (1.0, 2.0, 0.5), strict=True)):
        tokens_of_source = [token for _, token in blended if token // 10_000 == i]
        assert abs(len(tokens_of_source) - 560 * weight / 3.5) <= 1
        single_source = list_samples(take(Loader(make_config([path]), 0, 1), 70))
        assert tokens_of_source == [token for _, token in single_source][: len(tokens_of_source)]


def test_the_order_does_not_depend_on_the_folder(paths, tmp_path):
    other_folder = tmp_path / "elsewhere"
    other_folder.mkdir()
    for path in paths:
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{path}{suffix}", other_folder)
    moved_paths = [str(other_folder / Path(path).name) for path in paths]
    actual, expected = (
        [batch.tokens_BS for batch in Loader(make_config(where), 0, 1).next().microbatches]
        for where in (moved_paths, paths)
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_the_order_depends_on_the_seed_and_not_on_the_length_of_the_run(paths):
    def first(config):
        return list_samples(take(Loader(config, 0, 1), 6))

    base = make_config(paths)
    longer = make_config(paths, train={"steps": 10**9})
    other = base.model_copy(update={"run": base.run.model_copy(update={"seed": 5})})
    assert first(base) == first(longer)
    assert first(base) != first(other)


def test_reading_ahead_changes_nothing(paths):
    flags = {"reset_positions": True, "reset_attention": True, "mask_eod": True}
    plain = Loader(make_config(paths, **flags), 0, 1)
    ahead = Loader(make_config(paths, prefetch=4, **flags), 0, 1)
    for _ in range(20):
        assert is_same(plain.next(), ahead.next())
        assert plain.state == ahead.state
    ahead.close()
    assert is_same(plain.next(), ahead.next())
    ahead.load(plain.state)
    assert is_same(plain.next(), ahead.next())
    ahead.close()


def test_steps_follow_the_ramp(paths):
    ramp = BatchRampConfig(start=2, increment=2, samples=12)
    loader = Loader(make_config(paths, train={"batch_ramp": ramp}), 0, 1)
    consumed = 0
    for step in take(loader, 8):
        assert step.samples == loader.compute_global_batch(consumed) == len(step.microbatches)
        consumed += step.samples
        assert step.state["samples"] == consumed
    assert step.samples == 8


def compute_documents(tokens, length):
    """Return positions, document numbers and labels of a sample from documents of equal length."""
    positions, numbers, labels = [], [], []
    for place, token in enumerate(tokens):
        begins = token % 10_000 % length == 0
        positions.append(0 if begins or not place else positions[-1] + 1)
        numbers.append(token % 10_000 // length)
        labels.append(IGNORE if token % 10_000 % length == length - 1 else token + 1)
    return positions, numbers, labels


def test_documents_restart_positions_bound_attention_and_mask_labels(paths):
    flags = {"reset_positions": True, "reset_attention": True, "mask_eod": True}
    loader = Loader(make_config(paths, train={"microbatch": 4}, **flags), 0, 1)
    masked = 0
    for step in take(loader, 10):
        for batch in step.microbatches:
            for row, tokens in enumerate(batch.tokens_BS.tolist()):
                length = (13, 40, 7)[tokens[0] // 10_000]
                positions, numbers, labels = compute_documents(tokens, length)
                assert batch.positions_BS[row].tolist() == positions
                assert batch.labels_BS[row].tolist() == labels
                documents = batch.documents_BS[row]
                expected = torch.tensor(numbers)
                assert torch.equal(documents[:, None] == documents, expected[:, None] == expected)
                masked += labels.count(IGNORE)
    assert masked > 20


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_bad_token_is_raised_by_the_step_that_has_it_and_again(tmp_path, prefetch):
    path = write_token_file(tmp_path / "f", [[list(range(400))]])
    config = make_config([path], split=(1.0, 0.0, 0.0), prefetch=prefetch)
    plain = Loader(config, 0, 1)
    first = dict(list_samples(take(plain, 4)))[3 * 8 + 5]
    plain.close()
    tokens = [1] * 400
    tokens[first + 3] = 70
    write_token_file(tmp_path / "f", [[tokens]])
    loader = Loader(config.model_copy(update={"model": ModelConfig(vocab=70)}), 0, 1)
    steps = take(loader, 3)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"f\.bin: token {first + 3} is 70"):
            loader.next()
        assert loader.state == steps[-1].state
    loader.close()


def test_a_source_named_twice_is_refused(paths):
    with pytest.raises(UserError, match="2 times"):
        Loader(make_config([paths[0], paths[0]], (1.0, 1.0)), 0, 1)
