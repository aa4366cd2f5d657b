"""What a sweep tries, and how it tells what came of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.errors import UserError
from megaframe.run_queue.run_process import read_values_after
from megaframe.run_queue.sweep import summarize
from megaframe.run_queue.trials import Range, make_trials, parse_space


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim.lr", "is not KEY="),
        ("optim.lr=[]", "is not KEY="),
        ("optim.lr=log:0:1", "above 0 for log"),
        ("optim.lr=uniform:2:1", "LOW < HIGH"),
        ("optim.lr=uniform:0:inf", "are numbers"),
        ("optim.lr=uniform:a:b", "are numbers"),
        ("run.dir=[a, b]", "every trial has its own folder"),
    ],
)
def test_what_is_no_space_is_refused(text, expected):
    with pytest.raises(UserError, match=expected):
        parse_space([text])


def test_a_sweep_over_nothing_and_over_a_key_twice_is_refused():
    with pytest.raises(UserError, match="nothing to sweep over"):
        parse_space([])
    with pytest.raises(UserError, match=r"optim\.lr is given twice"):
        parse_space(["optim.lr=[1]", "optim.lr=[2]"])


SPACES = st.dictionaries(
    st.sampled_from(["a.a", "a.b", "c.c", "c.d"]),
    st.one_of(
        st.lists(st.sampled_from("pqrs"), min_size=1, unique=True),
        st.tuples(st.floats(1e-6, 1), st.floats(2, 1e6), st.booleans()).map(lambda r: Range(*r)),
    ),
    min_size=1,
)


@given(SPACES, st.integers(1, 4), st.integers(0, 5), st.integers(0, 3), st.data())
def test_a_larger_sweep_has_the_trials_of_a_smaller_one(space, times, additional, seed, data):
    ranges = {key: values for key, values in space.items() if isinstance(values, Range)}
    if not ranges:
        times, additional = 1, 0
    trials = make_trials(space, times, seed)
    combinations = 1
    for kept in space.values():
        combinations *= 1 if isinstance(kept, Range) else len(kept)
    assert len(trials) == times * combinations == len({trial.name for trial in trials})
    for trial in trials:
        assert all(ranges[key].low <= float(trial.keys[key]) <= ranges[key].high for key in ranges)
        assert all(trial.keys[key] in space[key] for key in space.keys() - ranges.keys())
    wider = {key: values if key in ranges else [*values, "new"] for key, values in space.items()}
    wider_trials = make_trials(wider, times + additional, seed)
    assert {one.name for one in trials} <= {one.name for one in wider_trials}
    if ranges:
        other = make_trials(space, times, seed + 1)
        assert not {one.name for one in trials} & {one.name for one in other}


def test_a_grid_is_not_repeated():
    with pytest.raises(UserError, match=r"--trials 2 would repeat .* run\.seed=\[0, 1\]"):
        make_trials({"optim.lr": ["1", "2"]}, 2, 0)
    with pytest.raises(UserError, match="--trials 0 is too few"):
        make_trials({"optim.lr": ["1", "2"]}, 0, 0)


def test_a_loss_is_told_as_the_mean_of_a_few_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "loss": float(n)}) + "\n" for n in range(1, 31)))
    metrics = MetricsFile(path)
    metrics.read()
    values = dict(read_values_after(metrics, "loss", 20))
    assert sorted(values) == list(range(21, 31))
    assert values[30] == pytest.approx(25.5)


def test_the_table_has_the_best_first_and_what_failed_last():
    results = [
        {"keys": {"a.b": key}, "step": step, "loss": loss, "folder": f"/x/{key}", "error": error}
        for key, step, loss, error in (
            ("one", 10, 3.0, None),
            ("two", 10, 2.0, None),
            ("three", 5, 1.0, None),
            ("four", 7, 0.5, "status 5: error: no"),
            ("five", None, None, None),
        )
    ]
    text, failed = summarize(results, {"a.b": []}, "loss")
    lines = [line.split() for line in text.splitlines()]
    assert [line[2] for line in lines[:4]] == ["a.b", "two", "one", "three"]
    assert [" ".join(line) for line in lines[4:]] == [
        "failed: a.b=four: status 5: error: no",
        "failed: a.b=five: no step was done",
        "best: a.b=two (/x/two)",
    ]
    assert failed == 2
