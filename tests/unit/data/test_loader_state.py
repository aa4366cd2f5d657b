"""The state of a loader: runs resume where they were, also after their sources changed or moved."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_runs import SEQ, is_same, list_samples, make_config, take, write_sources
from token_files import make_counting_documents, write_token_file

from megaframe.config.schema import BatchRampConfig
from megaframe.data.loader import Loader
from megaframe.data.shuffle import derive_source_key, sample_indices
from megaframe.errors import UserError


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


@settings(max_examples=25)
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


def write_sources_of_one_name(folder, count=4):
    """Write sources with the same file name and size, in folders of their own; a sample's first
    token identifies it."""
    paths = []
    for number in range(count):
        (Path(folder) / str(number)).mkdir()
        path = Path(folder) / str(number) / "tokens"
        paths.append(write_token_file(path, make_counting_documents([13] * 20, 10_000 * number)))
    return paths


@settings(max_examples=25)
@given(st.data())
def test_sources_of_one_name_keep_their_orders_whatever_the_list(data):
    """Each source's samples, over all resumes, are those that it gives alone."""
    with TemporaryDirectory() as folder:
        paths, state, samples_so_far = write_sources_of_one_name(folder), None, []
        lists = st.lists(st.sampled_from(paths), min_size=1, unique=True)
        for _ in range(data.draw(st.integers(2, 5))):
            chosen = data.draw(lists)
            loader = Loader(make_config(chosen, (1.0, 2.0, 0.5, 3.0)), 0, 1)
            if state is not None:
                loader.load(json.loads(json.dumps(state)))
            steps = take(loader, data.draw(st.integers(1, 4)))
            state = steps[-1].state
            samples_so_far += list_samples(steps)
        for number, path in enumerate(paths):
            of_source = [token for _, token in samples_so_far if token // 10_000 == number]
            alone = list_samples(take(Loader(make_config([path]), 0, 1), 20))
            assert of_source == [token for _, token in alone][: len(of_source)]
            assert state["consumed"].get(path, 0) == len(of_source)


def list_numbered_order(number, windows, seed=1234):
    """Return the first tokens of a source in the order that an earlier version gave to the source
    `number` of those with its file name."""
    key = derive_source_key(seed, f"tokens\0{number}")
    return (sample_indices(np.arange(windows), windows, key) * SEQ + 10_000 * number).tolist()


@settings(max_examples=15)
@given(st.permutations(range(4)), st.integers(1, 4), st.booleans())
def test_a_run_of_an_earlier_version_continues_with_the_same_samples(order, kept, moved):
    """There, sources with one file name were numbered in the order of the list."""
    with TemporaryDirectory() as folder:
        paths = write_sources_of_one_name(folder)
        state = {
            "samples": 12,
            **{key: dict.fromkeys(paths, n) for key, n in (("consumed", 3), ("base", 0))},
            "weights": dict.fromkeys(paths, 1.0),
            "sizes": dict.fromkeys(paths, 25),
        }
        if moved:
            paths = move_sources(paths, Path(folder) / "elsewhere")
        listed = order if moved else order[:kept]
        first = Loader(make_config([paths[i] for i in listed], (1.0,) * 4), 0, 1)
        first.load(state)
        steps = take(first, 1)
        then = Loader(make_config([paths[i] for i in reversed(order)], (1.0,) * 4), 0, 1)
        then.load(json.loads(json.dumps(steps[-1].state)))
        tokens = [token for _, token in list_samples(steps + take(then, 3))]
        for number in range(4):
            of_source = [token for token in tokens if token // 10_000 == number]
            expected = list_numbered_order(number, 25)[3:]
            assert of_source == expected[: len(of_source)]


def test_evaluations_of_sources_of_one_name_do_not_depend_on_the_list(tmp_path):
    paths = write_sources_of_one_name(tmp_path)
    firsts = {}
    for order in ([0, 1, 2, 3], [3, 1], [2, 0]):
        loader = Loader(make_config([paths[i] for i in order], (1.0,) * 4), 0, 1)
        for _, batch, _ in loader.iterate_validation(2 * len(order)):
            token = int(batch.tokens_BS[0, 0])
            firsts.setdefault(token // 10_000, []).append(token)
    assert all(len(set(tokens)) == 2 for tokens in firsts.values())


def test_the_sources_whose_folders_match_best_are_the_moved_ones(tmp_path):
    """A new source with the same file name and size takes nobody's place."""
    paths = write_sources_of_one_name(tmp_path, 3)
    state = take(Loader(make_config(paths[:1]), 0, 1), 1)[-1].state
    (moved,) = move_sources(paths[:1], tmp_path / "elsewhere")
    loader = Loader(make_config([paths[1], paths[2], moved]), 0, 1)
    loader.load(state)
    assert loader.consumed == (0, 0, 8)


def test_another_file_of_the_same_name_is_a_new_source(paths, tmp_path):
    state = take(Loader(make_config(paths[:1]), 0, 1), 2)[-1].state
    (tmp_path / "other").mkdir()
    other = write_token_file(
        tmp_path / "other" / Path(paths[0]).name, make_counting_documents([500])
    )
    loader = Loader(make_config([other]), 0, 1)
    (note,) = loader.load(state)
    assert f"added {other}; removed {paths[0]}" in note and loader.consumed == (0,)


def test_a_file_that_is_replaced_under_its_path_is_said(paths):
    state = take(Loader(make_config(paths[:1]), 0, 1), 1)[-1].state
    write_token_file(paths[0], make_counting_documents([13] * 20, 500))
    (note,) = Loader(make_config(paths[:1]), 0, 1).load(state)
    assert f"other tokens or weights of labels than before, under the same path: {paths[0]}" in note


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


def test_samples_of_another_length_continue_after_as_many_tokens(paths):
    """Also of a source that is not in the blend now, and comes back with the old length."""
    state = take(Loader(make_config(paths[:2]), 0, 1), 3)[-1].state
    first, second = (state["consumed"][path] for path in paths[:2])
    longer = Loader(make_config(paths[:1], train={"seq": 24}), 0, 1)
    notes = longer.load(state, seq=8)
    assert longer.consumed == (-(-first // 3),)
    assert sum("cut anew for another train.seq" in note for note in notes) == 1
    back = Loader(make_config(paths[:2]), 0, 1)
    back.load(longer.state, seq=24)
    assert back.consumed == (-(-first // 3) * 3, -(-second // 3) * 3)
    assert back.state["samples"] == state["samples"]


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
        lambda state: state.update(numbers=[1]),
        lambda state: state.update(numbers={"a": -1}),
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
