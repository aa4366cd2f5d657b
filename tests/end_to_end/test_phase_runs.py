"""Runs in phases: the same answer under every layout, which phases may change, and after stops."""

import json
import re
import statistics

import pytest
import torch
from bitwise import assert_bitwise_equal, assert_same_losses
from checkpoint_helpers import load_all
from entry_runs import read_lines, read_losses
from fault_runs import log, main, send_signal
from token_files import write_token_file
from tolerances import PROMISE, promised

SAME_STATE = "a checkpoint has every bit of the state"


@pytest.fixture
def phased(overrides, tmp_path):
    """phased(phases, **keys) -> overrides of a run with phases of (samples of 16 tokens, keys)."""

    def make(phases, **keys):
        items = [{"tokens": 16 * samples, "overrides": words} for samples, words in phases]
        keys = {"data__phases": json.dumps(items), "checkpoint__every": 100, **keys}
        words = overrides(**keys)
        return [word for word in words if "phases" not in keys or word != "train.steps=12"]

    def leave_out_steps(phases, **keys):
        return [word for word in make(phases, **keys) if not word.startswith("train.steps=")]

    return leave_out_steps


def make_phases(tmp_path, *, layouts=((), (), ())):
    """Return three phases: with longer samples and another rotary base, and then with another
    blend, frozen parameters and a learning rate of its own."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 61, (40, 50), generator=generator).tolist()
    other = write_token_file(tmp_path / "other", [words])
    first = json.loads(f'["{other}"]')[0]
    longer = ["train.seq=32", "train.global_batch=4", "train.microbatch=2", "model.rotary_base=5e5"]
    anneal = [
        "optim.schedule=linear",
        "optim.lr=0.005",
        f"data.sources=[{{path: {first}}}]",
        "optim.frozen=['embedding*']",
    ]
    return [
        (4 * 8, [*layouts[0]]),
        (3 * 8, [*longer, *layouts[1]]),
        (3 * 8, [*anneal, *layouts[2]]),
    ]


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(
            2,
            (["parallel.tensor=2"], ["parallel.context=2"], ["parallel.pipeline=2"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ([], ["parallel.tensor=2"], ["parallel.zero=3"]), marks=pytest.mark.slow),
        (4, (["parallel.zero=1"], ["parallel.context=4"], ["parallel.tensor=2"])),
    ],
)
def test_phases_have_the_same_answer_under_layouts_of_their_own(
    pool, phased, tmp_path, ranks, layouts
):
    assert main(phased(make_phases(tmp_path), run__dir=tmp_path / "one")) == 0
    narrow = {"train__microbatch": 1}
    words = phased(make_phases(tmp_path, layouts=layouts), **narrow)
    words = [word.replace("train.microbatch=2", "train.microbatch=1") for word in words]
    assert pool.run(ranks, main, words) == [0] * ranks
    losses = read_losses(tmp_path / "one")
    assert len(losses) == 10 and losses == promised(read_losses(tmp_path / "run"))
    for step in (7, 10):
        one, other = (
            load_all(tmp_path / name / f"checkpoints/step-{step:08d}") for name in ("one", "run")
        )
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.allclose(tensor, other[name], rtol=PROMISE, atol=PROMISE), name


def test_phases_that_change_nothing_are_the_run_without_phases(phased, overrides, tmp_path):
    assert main(phased([(4 * 8, []), (8, []), (5 * 8, [])])) == 0
    whole = {"run__dir": tmp_path / "whole", "train__steps": 10, "checkpoint__every": 5}
    assert main(overrides(**whole)) == 0
    assert_same_losses(
        read_losses(tmp_path / "run"),
        read_losses(tmp_path / "whole"),
        because=SAME_STATE,
        but=("data.phase", "data.phases"),
    )
    path = "checkpoints/step-00000010"
    run, plain = load_all(tmp_path / "run" / path), load_all(tmp_path / "whole" / path)
    assert_bitwise_equal(
        [run[name] for name in plain], [*plain.values()], because="the order of sums is the same"
    )


def test_a_run_stopped_anywhere_continues_in_the_phase_that_it_was_in(phased, tmp_path):
    """Stopped within a phase and after the last step of one, where the signal comes before the next
    one begins."""
    phases = make_phases(tmp_path)
    assert main(phased(phases, run__dir=tmp_path / "whole")) == 0
    words = phased(phases, checkpoint__resume="latest")
    assert main(words, send_signal, None, 0) == 143
    assert main(words, send_signal, None, 3) == 143
    assert len(read_lines(tmp_path / "run")) == 4  # the first phase is over
    assert main(words, send_signal, None, 5) == 143
    assert main(words) == 0
    assert_same_losses(
        read_losses(tmp_path / "run"), read_losses(tmp_path / "whole"), because=SAME_STATE
    )
    text = log(tmp_path / "run")
    assert text.count("phase 1 of 3: steps 1 to 4 of 10") == 2
    assert "model.rotary_base: 10000.0 there" in text
    assert "check that data and config" not in text
    assert main(words) == 0
    assert (
        "the run is finished: step 10 of train.steps=10; to train longer, add another to "
        in log(tmp_path / "run")
    )


def test_a_learning_rate_follows_its_phase(phased, tmp_path):
    phases = [(4 * 8, []), (4 * 8, ["optim.schedule=linear", "optim.warmup=1"]), (2 * 8, [])]
    assert main(phased(phases, optim__schedule="constant", optim__lr=1e-3)) == 0
    rates = [line["lr"] for line in read_lines(tmp_path / "run")]
    decay = [5e-4, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3]
    assert rates == pytest.approx([1e-3] * 4 + decay + [1e-3] * 2)


def test_a_phase_is_no_spike(phased, tmp_path):
    """Losses of the phase before are not compared with: of text that the model has not seen, they
    are higher than what counts as a spike."""
    noise = torch.randint(0, 61, (8, 200), generator=torch.Generator().manual_seed(0)).tolist()
    path = write_token_file(tmp_path / "noise", [noise])
    phases = [(200 * 8, []), (6 * 8, [f"data.sources=[{{path: {path}}}]"])]
    keys = {"optim__schedule": "constant", "faults__spike_factor": 1.5, "metrics__every": 100}
    assert main(phased(phases, checkpoint__resume="latest", **keys)) == 0
    losses = read_losses(tmp_path / "run")
    assert len(losses) == 206 and losses[200] > 1.5 * statistics.median(losses[136:200])
    assert "over faults.spike_factor" not in log(tmp_path / "run")


def test_a_checkpoint_of_an_earlier_phase_is_not_continued_in_a_later_one(phased, tmp_path, capfd):
    """If the one in between cannot be read, the run says from where to train again."""
    phases = [(4 * 8, []), (4 * 8, ["optim.lr=1e-4"])]
    words = phased(phases, checkpoint__every=2, checkpoint__resume="latest", checkpoint__keep=9)
    assert main(words, send_signal, None, 5) == 143
    for path in (tmp_path / "run/checkpoints").glob("step-*/*.safetensors"):
        if path.parent.name != "step-00000002":
            content = bytearray(path.read_bytes())
            content[-1] ^= 1  # what only a checksum shows
            path.write_bytes(content)
    assert main(words) == 2
    message = capfd.readouterr().err
    assert "is of phase 1 of 2, and this is phase 2 of 2; to train again from there" in message
    again = [*words, f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000002"]
    assert main(again) == 0
    assert [line["step"] for line in read_lines(tmp_path / "run")] == [*range(1, 9)]


def test_stop_after_ends_a_phase_that_can_be_continued(phased, tmp_path):
    """Within a phase, and where one ends, after which the next one does not begin."""
    phases = [(4 * 8, []), (4 * 8, ["optim.lr=1e-4"])]
    words = phased(phases, checkpoint__resume="latest")
    for step, said in ((2, "stopped"), (4, "ended"), (6, "stopped")):
        assert main([*words, f"train.stop_after={step}"]) == 0
        assert [line["step"] for line in read_lines(tmp_path / "run")] == [*range(1, step + 1)]
        assert re.search(rf"{said} +.*after step {step} of 8", log(tmp_path / "run"))
    assert main(words) == 0
    assert main(phased(phases, run__dir=tmp_path / "whole")) == 0
    assert_same_losses(
        read_losses(tmp_path / "run"), read_losses(tmp_path / "whole"), because=SAME_STATE
    )


def test_stop_after_ends_a_run_that_can_be_continued(overrides, tmp_path):
    keys = {"checkpoint__every": 100, "checkpoint__resume": "latest"}
    assert main(overrides(**keys, train__stop_after=5)) == 0
    assert main(overrides(**keys, train__stop_after=5)) == 0
    text = log(tmp_path / "run")
    assert "after step 5 of 12, by train.stop_after" in text and "continue with" in text
    assert "the run is at step 5, and train.stop_after=5 stops it there" in text
    assert main(overrides(**keys)) == 0
    assert main(overrides(run__dir=tmp_path / "whole")) == 0
    assert_same_losses(
        read_losses(tmp_path / "run"), read_losses(tmp_path / "whole"), because=SAME_STATE
    )
