"""Phases of a run: where each begins and ends, its config, and what contradicts the rest."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.config import load
from megaframe.config.batch_ramp import count_samples
from megaframe.config.phases import count_tokens_left, list_phase_configs
from megaframe.errors import UserError
from megaframe.optim.lr_schedule import compute_learning_rate
from megaframe.training.auto_layout import refuse_undecided, resolve_phases
from megaframe.training.phases import decide_phases, describe_phase, find_phase
from megaframe.training.run_position import RunPosition

PHASES = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(1, 40), st.integers(1, 8)), min_size=1, max_size=4
)


def make(phases, *keys):
    """Return a config with phases of (tokens, overrides)."""
    items = [{"tokens": tokens, "overrides": overrides} for tokens, overrides in phases]
    return load(None, [f"data.phases={json.dumps(items)}", "data.split=[1, 0, 0]", *keys])


@given(PHASES, st.one_of(st.none(), st.integers(1, 60)))
def test_each_phase_has_the_fewest_steps_that_reach_its_tokens(phases, ramp):
    """It begins where the one before ended, and the last ends the run."""
    keys = [f"train.batch_ramp={{start: 1, increment: 1, samples: {ramp}}}"] * (ramp is not None)
    config = make(
        [
            (tokens, [f"train.seq={seq}", f"train.global_batch={batch}"])
            for tokens, seq, batch in phases
        ],
        *keys,
    )
    step = samples = 0
    decided = decide_phases(config)
    for phase, (tokens, seq, _) in zip(decided, phases, strict=True):
        train, place = phase.train, phase.data.phase
        assert (place.step, place.samples) == (step, samples)
        steps = train.last_step - step
        now = count_samples(train, steps, samples)
        assert now * seq >= tokens > (now and count_samples(train, steps - 1, samples) * seq)
        left = sum(other for other, _, _ in phases[place.number :])
        assert count_tokens_left(train, phase.data, step, samples) == now * seq + left
        assert train.steps == decided[-1].train.last_step
        step, samples = step + steps, samples + now
    assert decided[-1].train.stop_after is None and decided[-1].train.steps == step


def test_a_checkpoint_says_which_phase_follows():
    """Also one of a run with another batch, whose phases end at other steps."""
    config = make([(640, []), (640, []), (640, [])], "train.seq=16", "train.global_batch=4")
    first, second, third = decide_phases(config)
    assert [phase.train.last_step for phase in (first, second, third)] == [10, 20, 30]
    for saved, step, number in ((first, 4, 1), (first, 10, 2), (second, 19, 2), (second, 20, 3)):
        place = find_phase(config.data, RunPosition(step, 4 * step, saved))
        assert place.number == number
        assert place.step == (step if step in (10, 20) else saved.data.phase.step)
    end = find_phase(config.data, RunPosition(30, 120, third))
    assert end == third.data.phase  # nothing is left: the run says that it is finished
    longer = make([(640, [])] * 4, "train.seq=16")
    assert find_phase(longer.data, RunPosition(30, 120, third)).number == 4
    assert find_phase(config.data, RunPosition(7, 28, load(None))).number == 1


def test_a_resumed_phase_ends_at_its_tokens_with_another_batch(monkeypatch):
    config = make([(640, []), (640, [])], "train.seq=16", "train.global_batch=4")
    saved = decide_phases(config)[1]
    twice = config.replace(train={"global_batch": 8})
    position = RunPosition(14, 56, saved)
    monkeypatch.setattr("megaframe.training.phases.find_position", lambda *sections: position)
    (phase,) = decide_phases(twice)
    place = phase.data.phase
    assert (place.step, place.samples, place.end) == (10, 40, 14 + 24 // 8)
    assert phase.checkpoint.resume is None
    assert phase.train.steps == 14 + 24 // 8


def test_a_learning_rate_of_its_own_runs_over_the_phase():
    """Others follow the schedule of the whole run; what a phase does not say of warm-up and decay
    is not that of the whole run."""
    config = make(
        [(640, []), (640, ["optim.schedule=linear", "optim.min_lr=0"]), (640, [])],
        "train.seq=16",
        "train.global_batch=4",
        "optim.lr=1",
        "optim.warmup=5",
        "optim.schedule=cosine",
    )
    first, second, third = (phase.optim for phase in decide_phases(config))
    assert first == third == config.optim
    assert second.span == (10, 20) and second.warmup == 0
    rates = [compute_learning_rate(second, update, 30) for update in range(10, 21)]
    assert rates == pytest.approx([1 - n / 10 for n in range(11)])
    assert compute_learning_rate(second, 3, 30) == 1  # after updates that were skipped
    own = make([(640, ["optim.lr=1", "optim.warmup=3", "optim.decay=8"])], "optim.decay=2")
    assert decide_phases(own)[0].optim.warmup == 3 and decide_phases(own)[0].optim.decay == 8


def test_a_line_says_which_phase_it_is():
    config = make([(640, []), (320, [])], "train.seq=16", "train.global_batch=4")
    lines = [describe_phase(phase.train, phase.data) for phase in decide_phases(config)]
    assert lines == [["phase 1 of 2: steps 1 to 10 of 15"], ["phase 2 of 2: steps 11 to 15 of 15"]]
    assert describe_phase(config.train, load(None).data) == []


def test_without_phases_there_is_the_config_itself():
    config = load(None)
    assert decide_phases(config) == list_phase_configs(config) == [config]
    (phase,) = decide_phases(make([(640, [])]))
    assert decide_phases(phase) == list_phase_configs(phase) == [phase]


def test_a_trainer_refuses_phases_that_are_not_decided():
    with pytest.raises(UserError, match=r"data\.phases: not decided"):
        refuse_undecided(make([(640, [])], "parallel.bucket_size=1", "model.vocab=61"))


BASE = (
    "train.seq=16",
    "train.global_batch=4",
    "model.vocab=61",
    "model.layers=2",
    "run.device=cpu",
)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.sequ=8", "phase 2 of 2: .*train.sequ: unknown key; did you mean train.seq"),
        ("train.seq=no", "phase 2 of 2: .*train.seq=no: takes a whole number"),
        ("train.seq", "phase 2 of 2: .*is not of the form section.key=value"),
        ("run.seed=1", "run.seed belongs to the whole run; leave it out"),
        ("data.phases=[{tokens: 3}]", "data.phases belongs to the whole run"),
        ("checkpoint.resume=best", "checkpoint.resume belongs to the whole run"),
        ("model.ffn=8", r"phase 2 of 2 has other parameters .* shape \(.*\) instead of \("),
        ("model.layers=3", r"blocks\.2.* instead of None; leave model.layers as they are"),
        ("model.heads=5", "phase 2 of 2: 1 mistake in the config"),
        ("parallel.tensor=3", "phase 2 of 2: .*parallel.tensor=3 .* start 3 ranks"),
    ],
)
def test_a_phase_that_cannot_be_is_refused_before_anything_runs(override, words):
    config = make([(640, []), (640, [override])], *BASE)
    with pytest.raises(UserError, match=f"(?s){words}"):
        resolve_phases(config, 1, data=False)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"checkpoint": {"every": 0}}, "checkpoint.every=0 saves no checkpoint"),
        ({"data": {"epochs": 2.0}}, "data.epochs=2 and data.phases both say"),
        ({"train": {"steps": 7}}, "train.steps=7 and data.phases disagree: they take 20 steps"),
    ],
)
def test_phases_that_contradict_other_keys_are_refused(changed, words):
    config = make([(640, []), (640, [])], *BASE)
    with pytest.raises(UserError, match=words):
        resolve_phases(config.replace(**changed), 1, data=False)


def test_tokens_of_a_phase_are_a_whole_number():
    with pytest.raises(UserError, match=r"data\.phases\.0\.tokens=1e9: takes a whole number"):
        load(None, ["data.phases=[{tokens: 1e9}]"])
    assert make([(10**13, [])]).data.phases[0].tokens == 10**13
