import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import make_counting_documents, write_token_file

from megaframe.config.model import ModelConfig
from megaframe.config.schema import BatchRampConfig, DataConfig, RunConfig, TrainConfig
from megaframe.config.schema import DataSourceConfig as SourceConfig
from megaframe.data.loader import Loader, compute_batch_size
from megaframe.data.microbatch import IGNORE
from megaframe.errors import UserError

SEQ = 8
SPLIT = (0.8, 0.2, 0.0)


@pytest.fixture
def paths(tmp_path):
    return write_sources(tmp_path)


def write_sources(folder):
    """Write three sources without a common token id: a sample's first token identifies it."""
    return [
        write_token_file(
            Path(folder) / f"source{i}", make_counting_documents([length] * 20, 10_000 * i)
        )
        for i, length in enumerate((13, 40, 7))
    ]


def make_config(paths, weights=(1.0, 2.0, 0.5), *, train=None, **data):
    sources = tuple(SourceConfig(path=p, weight=w) for p, w in zip(paths, weights, strict=False))
    return RunConfig(
        model=ModelConfig(vocab=65536),
        train=TrainConfig(**{"seq": SEQ, "global_batch": 8, "microbatch": 1, **(train or {})}),
        data=DataConfig(**{"sources": sources, "split": SPLIT, "prefetch": 0, **data}),
    )


def list_samples(steps):
    """Return (number, first token) of each sample of these steps, sorted by number."""
    samples = [
        (int(number), int(tokens[0]))
        for step in steps
        for microbatch in step.microbatches
        for number, tokens in zip(microbatch.samples_B, microbatch.tokens_BS, strict=True)
    ]
    return sorted(samples)


def take(loader, count):
    return [loader.next() for _ in range(count)]


def is_same(left, right):
    """Return whether two steps are equal in every part."""
    if (left.samples, left.state) != (right.samples, right.state):
        return False
    return len(left.microbatches) == len(right.microbatches) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for first, other in zip(left.microbatches, right.microbatches, strict=True)
        for a, b in zip(vars(first).values(), vars(other).values(), strict=True)
    )


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
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in paths:
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{path}{suffix}", moved)
    moved_paths = [str(moved / Path(path).name) for path in paths]
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


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_resume_at_every_step_equals_an_uninterrupted_run(paths, prefetch):
    ramp = BatchRampConfig(start=2, increment=2, samples=20)
    config = make_config(paths, train={"batch_ramp": ramp}, prefetch=prefetch)
    loader = Loader(config, 0, 2)
    steps = take(loader, 12)
    loader.close()
    for stop in range(12):
        resumed = Loader(config, 0, 2)
        resumed.load(json.loads(json.dumps(steps[stop].state)))
        assert resumed.state == steps[stop].state
        assert all(is_same(resumed.next(), step) for step in steps[stop + 1 :])
        resumed.close()


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


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_changed_blends_never_repeat_a_sample_within_an_epoch(data):
    with TemporaryDirectory() as folder:
        paths, state, samples_so_far = write_sources(folder), None, []
        for _ in range(data.draw(st.integers(2, 5))):
            chosen = data.draw(st.lists(st.sampled_from(paths), min_size=1, unique=True))
            weights = data.draw(
                st.lists(st.floats(0.1, 10), min_size=len(chosen), max_size=len(chosen))
            )
            loader = Loader(make_config(chosen, weights, train={"global_batch": 4}), 0, 1)
            if state is not None:
                loader.load(json.loads(json.dumps(state)))
            steps = take(loader, data.draw(st.integers(1, 3)))
            state = steps[-1].state
            samples_so_far += list_samples(steps)
    assert [number for number, _ in samples_so_far] == list(range(state["samples"]))
    tokens = [token for _, token in samples_so_far]
    for i, (path, windows) in enumerate(zip(paths, (25, 79, 13), strict=True)):
        tokens_of_source = [token for token in tokens if token // 10_000 == i]
        assert state["consumed"].get(path, 0) == len(tokens_of_source)
        for start in range(0, len(tokens_of_source), windows):
            assert len(set(tokens_of_source[start : start + windows])) == len(
                tokens_of_source[start : start + windows]
            )


def move_sources(paths, folder):
    """Copy each source with its parent folder into `folder`; return the new paths."""
    new_paths = []
    for path in map(Path, paths):
        new_folder = folder / path.parent.name
        new_folder.mkdir(parents=True, exist_ok=True)
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{path}{suffix}", new_folder)
        new_paths.append(str(new_folder / path.name))
    return new_paths


def test_sources_that_have_moved_continue_where_they_were(paths, tmp_path):
    """Also with one source removed, another order, and a new weight for one source."""
    steps = take(Loader(make_config(paths), 0, 1), 4)
    new_paths = move_sources(paths, tmp_path / "elsewhere")
    resumed = Loader(make_config(new_paths), 0, 1)
    (note,) = resumed.load(json.loads(json.dumps(steps[1].state)))
    assert all(f"{old} is now {new}" in note for old, new in zip(paths, new_paths, strict=True))
    assert list_samples(take(resumed, 2)) == list_samples(steps[2:])
    turned = Loader(make_config([new_paths[2], paths[0]], (1.0, 5.0)), 0, 1)
    first_note, two = turned.load(steps[1].state)
    assert f"{paths[2]} is now {new_paths[2]}" in first_note and f"removed {paths[1]}" in two
    consumed = steps[1].state["consumed"]
    assert turned.consumed == (consumed[paths[2]], consumed[paths[0]])


def test_sources_of_one_name_are_told_apart_by_size_and_by_folder(tmp_path):
    lengths = {"a": [30, 90], "b": [200, 30], "c": [30, 90]}
    paths = []
    for name, of in lengths.items():
        (tmp_path / name).mkdir()
        paths.append(write_token_file(tmp_path / name / "tokens", make_counting_documents(of)))
    state = take(Loader(make_config(paths, (1.0, 2.0, 5.0)), 0, 1), 4)[-1].state
    new_paths = move_sources(paths, tmp_path / "elsewhere")
    for chosen in ([0, 1, 2], [1, 2], [2, 0]):
        resumed = Loader(make_config([new_paths[i] for i in chosen]), 0, 1)
        resumed.load(state)
        assert resumed.consumed == tuple(state["consumed"][paths[i]] for i in chosen)


def test_another_file_of_the_same_name_is_a_new_source(paths, tmp_path):
    state = take(Loader(make_config(paths[:1]), 0, 1), 2)[-1].state
    (tmp_path / "other").mkdir()
    other = write_token_file(
        tmp_path / "other" / Path(paths[0]).name, make_counting_documents([500])
    )
    loader = Loader(make_config([other]), 0, 1)
    (note,) = loader.load(state)
    assert f"added {other}; removed {paths[0]}" in note and loader.consumed == (0,)


def test_a_changed_blend_is_one_note_and_the_same_blend_none(paths):
    state = take(Loader(make_config(paths[:2]), 0, 1), 3)[-1].state
    assert Loader(make_config(paths[:2]), 0, 1).load(state) == []
    (note,) = Loader(make_config(paths[1:], (3.0, 1.0)), 0, 1).load(state)
    added, removed = f"added {paths[2]}", f"removed {paths[0]}"
    for part in ("after sample 24", added, removed, f"other weight {paths[1]}"):
        assert part in note


def test_another_cut_of_a_source_is_said(paths):
    state = take(Loader(make_config(paths[:1]), 0, 1), 1)[-1].state
    (note,) = Loader(make_config(paths[:1], train={"seq": 4}), 0, 1).load(state)
    assert f"{paths[0]}: 51, before 25" in note


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("consumed"),
        lambda state: state.pop("samples"),
        lambda state: state.update(samples=-1),
        lambda state: state.update(samples=1.5),
        lambda state: state.update(consumed=[1]),
        lambda state: state["consumed"].update({p: -3 for p in state["consumed"]}),
        lambda state: state["base"].clear(),
        lambda state: state["base"].update({p: 10**6 for p in state["base"]}),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(paths, damage):
    loader = Loader(make_config(paths), 0, 1)
    state = json.loads(json.dumps(loader.next().state))
    before = loader.state
    damage(state)
    with pytest.raises(UserError, match="data state"):
        loader.load(state)
    assert loader.state == before


def test_the_batch_ramp_rises_in_equal_parts():
    train = TrainConfig(
        global_batch=32, batch_ramp=BatchRampConfig(start=8, increment=8, samples=300)
    )
    assert [
        compute_batch_size(train, consumed) for consumed in (0, 99, 100, 199, 200, 299, 300, 10**15)
    ] == [*(8, 8, 16, 16, 24, 24, 32, 32)]
    flat = TrainConfig(
        global_batch=8, batch_ramp=BatchRampConfig(start=8, increment=8, samples=300)
    )
    assert compute_batch_size(flat, 5) == 8
    assert compute_batch_size(TrainConfig(global_batch=6), 0) == 6


def test_steps_follow_the_ramp(paths):
    ramp = BatchRampConfig(start=2, increment=2, samples=12)
    loader = Loader(make_config(paths, train={"batch_ramp": ramp}), 0, 1)
    consumed = 0
    for step in take(loader, 8):
        assert step.samples == loader.global_batch(consumed) == len(step.microbatches)
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


def list_evaluation_samples(config, ranks, samples):
    """Return the samples of all ranks that have labels, and the batch shapes of each rank."""
    samples_seen, shapes = [], []
    for rank in range(ranks):
        batches = [batch for _, batch in Loader(config, rank, ranks).evaluation(samples)]
        shapes.append([tuple(batch.tokens_BS.shape) for batch in batches])
        for batch in batches:
            for number, tokens, labels in zip(
                batch.samples_B, batch.tokens_BS, batch.labels_BS, strict=True
            ):
                if (labels != IGNORE).any():
                    assert torch.equal(labels, tokens + 1)
                    samples_seen.append((int(number), int(tokens[0])))
    return sorted(samples_seen), shapes


@pytest.mark.parametrize("samples", [1, 7, 10, 16, 1000])
def test_evaluation_is_the_same_for_any_ranks_and_microbatch(paths, samples):
    expected, _ = list_evaluation_samples(make_config(paths), 1, samples)
    sizes = np.array([6, 19, 3])
    assert len(expected) == min(samples, len(expected)) <= sizes.sum()
    assert len(set(expected)) == len(expected)
    if samples == 1000:
        assert len(expected) == sizes.sum()
    for ranks, microbatch in [(1, 3), (2, 1), (2, 4), (4, 2)]:
        config = make_config(paths, train={"microbatch": microbatch})
        actual, shapes = list_evaluation_samples(config, ranks, samples)
        assert actual == expected
        assert all(shape == shapes[0] for shape in shapes)
        rows = sum(rows for rows, _ in shapes[0]) * ranks
        assert len(expected) <= rows < len(expected) + ranks * len(paths)


def test_evaluation_is_disjoint_from_training_and_repeats_itself(paths):
    config = make_config(paths, train={"eval_every": 1})
    loader = Loader(config, 0, 1)
    trained = {token for _, token in list_samples(take(loader, 100))}
    first, second = (
        [batch.tokens_BS.tolist() for _, batch in loader.evaluation(20)] for _ in range(2)
    )
    assert first == second
    assert not trained & {row[0] for batch in first for row in batch}
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 5})})
    repeated = Loader(other, 0, 1).evaluation(20)
    assert first == [batch.tokens_BS.tolist() for _, batch in repeated]


def test_a_text_of_one_document_is_trained_on_and_evaluated_by_its_tokens(tmp_path):
    """The same samples for any ranks, from where a resumed run left off too."""
    path = write_token_file(tmp_path / "book", make_counting_documents([500]))
    config = make_config([path], train={"eval_every": 1})
    steps = take(Loader(config, 0, 1), 14)
    trained = {token for _, token in list_samples(steps)}
    assert trained == {*range(0, 399 // SEQ * SEQ, SEQ)}
    evaluated, _ = list_evaluation_samples(config, 1, 1000)
    assert {token for _, token in evaluated} == {*range(400, 400 + 99 // SEQ * SEQ, SEQ)}
    assert list_evaluation_samples(config, 2, 1000)[0] == evaluated
    ranks = [Loader(config, rank, 2) for rank in range(2)]
    for loader in ranks:
        loader.load(json.loads(json.dumps(steps[5].state)))
    for step in steps[6:]:
        assert list_samples([loader.next() for loader in ranks]) == list_samples([step])


def with_splits(paths, *splits, **sections):
    """Return a config with a split for each source; None leaves it to `data.split`."""
    sources = [{"path": path, "split": split} for path, split in zip(paths, splits, strict=True)]
    return make_config(paths, sources=sources, **sections)


def test_a_source_can_be_for_training_or_validation_alone(paths):
    only_trained, only_evaluated = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
    config = with_splits(paths, only_trained, only_evaluated, None, train={"eval_every": 1})
    loader = Loader(config, 0, 1)
    trained = {token for _, token in list_samples(take(loader, 40))}
    # 13 x 20 and 7 x 16 tokens are 32 and 13 windows of 8, all of which were read.
    assert {token // 10_000 for token in trained} == {0, 2}
    assert len(trained) == 32 + 13
    assert loader.consumed == (160, 160)
    evaluated = [(name, batch) for name, batch in loader.evaluation(1000)]
    first = {(name, int(token)) for name, batch in evaluated for token in batch.tokens_BS[:, 0]}
    assert {(name, token // 10_000) for name, token in first} == {("source1", 1), ("source2", 2)}
    assert len(first) == 99 + 3
    assert not trained & {token for _, token in first}
    # The batches of a source are adjacent, in the order of the config.
    assert [name for name, _ in evaluated] == sorted(name for name, _ in evaluated)


def test_a_source_of_validation_changes_nothing_of_training(paths, tmp_path):
    (tmp_path / "apart").mkdir()
    held_out = write_token_file(
        tmp_path / "apart" / "source0", make_counting_documents([30] * 20, 50)
    )
    training_only = with_splits(paths, (1.0, 0.0, 0.0), None, None)
    with_held_out = with_splits([held_out, *paths], (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), None, None)
    before = take(Loader(training_only, 0, 1), 30)
    after = take(Loader(with_held_out, 0, 1), 30)
    assert list_samples(before) == list_samples(after)
    resumed = Loader(with_held_out, 0, 1)
    assert resumed.load(before[9].state) == []
    assert all(map(is_same, take(resumed, 20), before[10:]))
    names = [name for name, _ in Loader(with_held_out, 0, 1).evaluation(1000)]
    assert {*names} == {"source0", "source1", "source2"}
    twice = with_splits([held_out, *paths], *[None] * 4)
    names = {name for name, _ in Loader(twice, 0, 1).evaluation(1000)}
    assert names == {held_out, paths[0], "source1", "source2"}


def test_a_missing_validation_split_is_refused_at_once_when_it_is_needed(paths):
    none = (1.0, 0.0, 0.0)
    Loader(make_config(paths, split=none), 0, 1)
    with pytest.raises(UserError, match="validation split"):
        Loader(make_config(paths, train={"eval_every": 10}, split=none), 0, 1)


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
