"""Runs that tokenise text while they train have the answer of one rank under every layout, and go
on after a stop with exactly the next sample."""

import pytest
from bitwise import assert_same_losses
from entry_runs import read_lines, read_losses
from fault_runs import main
from stream_runs import write_corpus
from tolerances import promised


@pytest.fixture
def streamed(overrides, tmp_path):
    """streamed(**keys) -> overrides of a run on text, with long samples and several blocks."""
    write_corpus(tmp_path / "texts", files=3, texts=500)

    def make(**keys):
        given = {
            "data__sources": f"[{tmp_path / 'texts'}]",
            "data__tokenizer": "bytes",
            "data__split": "[0.9, 0.1, 0]",
            "data__streaming__shuffle_bytes": 65536,
            "data__streaming__workers": 1,
            "data__reset_attention": True,
            "model__vocab": 257,
            "train__steps": 8,
            "train__eval_every": 4,
            "train__eval_samples": 8,
            **keys,
        }
        return overrides(**given)

    return make


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (2, {"parallel__zero": 3}),
        pytest.param(4, {"parallel__tensor": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"parallel__context": 2, "parallel__zero": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"parallel__pipeline": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_layout_has_the_answer_of_one_rank(pool, streamed, tmp_path, ranks, keys):
    assert main(streamed(run__dir=tmp_path / "one")) == 0
    assert pool.run(ranks, main, streamed(train__microbatch=1, **keys)) == [0] * ranks
    losses = read_losses(tmp_path / "one")
    assert len(losses) == 8 and losses == promised(read_losses(tmp_path / "run"))
    one, other = (
        [line["eval_loss"] for line in read_lines(tmp_path / name) if "eval_loss" in line]
        for name in ("one", "run")
    )
    assert len(one) == 2 and one == promised(other)


def test_a_stopped_run_goes_on_with_the_next_sample(streamed, tmp_path):
    assert main(streamed(run__dir=tmp_path / "whole")) == 0
    assert main(streamed(train__stop_after=3)) == 0
    assert main(streamed(checkpoint__resume="latest")) == 0
    whole, stopped = read_losses(tmp_path / "whole"), read_losses(tmp_path / "run")
    assert_same_losses(whole, stopped, because="a checkpoint has the place in the stream")
