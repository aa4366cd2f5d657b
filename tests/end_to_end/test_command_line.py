"""The entry's command line: options, overrides, and the messages for mistakes.

Tests `megaframe.data.vocabulary_size`.
"""

from pathlib import Path

import pytest
from entry_runs import pretrain_gpt, rewrite_config, train

from megaframe.config.keys import get_config_keys


class TestMistakes:
    """A mistake gives one message on standard error, exit status 2, and no half-written files."""

    @pytest.fixture
    def mistake(self, overrides, call_main):
        def make(*words, **changes):
            status, _, text = call_main(pretrain_gpt.main, *overrides(**changes))
            assert status == 2
            assert text.startswith("error: ") and "Traceback" not in text
            for word in words:
                assert str(word) in text, text
            return text

        return make

    def test_unknown_key(self, mistake, tmp_path):
        mistake("model.hiden", "model.hidden", model__hiden=3)
        assert not (tmp_path / "run").exists()

    def test_wrong_type_and_all_at_once(self, mistake):
        mistake("train.steps", "model.heads", "optim.lr", train__steps="many", model__heads=0,
                optim__lr=-1)  # fmt: skip

    def test_batch_that_does_not_divide(self, mistake):
        mistake("train.global_batch", "7", "4 or 8", train__global_batch=7)

    def test_axis_without_a_room(self, mistake):
        mistake("parallel.tensor", "2", parallel__tensor=2)

    def test_missing_data(self, mistake, tmp_path):
        mistake("nowhere", data__sources=f"[{{path: {tmp_path}/nowhere}}]")
        assert not (tmp_path / "run").exists()

    def test_truncated_data(self, mistake, corpus, tmp_path):
        for suffix in (".bin", ".idx"):
            content = Path(corpus + suffix).read_bytes()
            (tmp_path / f"cut{suffix}").write_bytes(content[: len(content) - 10])
        mistake("cut", data__sources=f"[{{path: {tmp_path}/cut}}]")

    def test_foreign_data(self, mistake, tmp_path):
        (tmp_path / "foreign.bin").write_bytes(b"x" * 1000)
        (tmp_path / "foreign.idx").write_bytes(b"<html>" * 100)
        mistake("foreign.idx", data__sources=f"[{{path: {tmp_path}/foreign}}]")

    def test_ids_beyond_the_vocabulary(self, mistake):
        mistake("model.vocab", "50", model__vocab=50)

    def test_no_vocabulary(self, mistake):
        mistake("model.vocab", model__vocab="null")

    def test_sample_longer_than_the_data(self, mistake):
        mistake("train.seq", "100000", train__seq=100000, train__steps=1)

    def test_missing_checkpoint(self, mistake, tmp_path):
        mistake("absent", checkpoint__resume=tmp_path / "absent")
        mistake("absent", checkpoint__weights=tmp_path / "absent")
        # `latest` is for resuming only: missing weights never become a silent fresh start.
        mistake("checkpoint.weights=latest", "no checkpoint there", checkpoint__weights="latest")
        assert not (tmp_path / "run").exists()

    def test_another_model(self, mistake, pool, corpus, overrides):
        pool.run(1, train, overrides(checkpoint__every=12))
        mistake("model.layers", "2", "3", model__layers=3, checkpoint__resume="latest")
        text = mistake("model.norm_eps: 1e-05 there, 0.001 here", "checkpoint.weights=",
                       model__norm_eps=1e-3, checkpoint__resume="latest")  # fmt: skip
        assert "model.hidden" not in text
        mistake("model.window: null there, [8, null] here",
                model__window="[8, null]", checkpoint__resume="latest")  # fmt: skip
        mistake("train.seq: 16 there, 8 here", train__seq=8, checkpoint__resume="latest")
        mistake("run.seed: 1234 there, 5 here", run__seed=5, checkpoint__resume="latest")
        held_out = f"[{{path: {corpus}, split: [1, 0, 0]}}]"
        mistake(f"data.sources, split of {corpus}: [0.8, 0.2, 0.0] there, [1.0, 0.0, 0.0] here",
                data__sources=held_out, checkpoint__resume="latest")  # fmt: skip
        inside = {"model__rotary_scaling": "{kind: yarn, factor: 2.0}"}
        text = mistake("model.rotary_scaling.factor: 1.0 there, 2.0 here",
                       **inside, checkpoint__resume="latest")  # fmt: skip
        assert "{" not in text

    def test_a_checkpoint_of_a_newer_version(self, mistake, pool, overrides, tmp_path):
        pool.run(1, train, overrides(checkpoint__every=12))
        path = tmp_path / "run/checkpoints/step-00000012"
        rewrite_config(path, lambda config: config["model"].update(newer=True))
        mistake(path, "model.newer", "version", checkpoint__resume="latest")
        mistake("model.newer", run__dir=tmp_path / "new", checkpoint__weights=path)

    def test_a_fresh_start_over_another_run(self, mistake, pool, overrides, tmp_path):
        pool.run(1, train, overrides())
        before = (tmp_path / "run/metrics.jsonl").read_bytes()
        mistake("run.dir", "checkpoint.resume=latest")
        assert (tmp_path / "run/metrics.jsonl").read_bytes() == before

    def test_a_run_folder_that_cannot_be_written(self, mistake, tmp_path):
        (tmp_path / "file").write_text("")
        message = mistake("Not a directory", "run.dir", run__dir=tmp_path / "file" / "run")
        assert "make room" not in message


def test_dry_run_prints_and_touches_nothing(overrides, call_main, tmp_path):
    status, text, _ = call_main(pretrain_gpt.main, "--dry-run", *overrides())
    assert not status
    count = 61 * 16 * 2 + 2 * (12 * 16 * 16 + 2 * 16) + 16
    for words in ("hidden: 16", f"{count:,} in", "1 rank", "total"):
        assert words in text, text
    assert not (tmp_path / "run").exists()


def test_explain_and_help(call_main):
    assert "Tokens per sample" in call_main(pretrain_gpt.main, "--explain", "train.seq")[1]
    texts = {}
    for words in (("--help",), ("-h",), ("--help", "all")):
        status, texts[words], _ = call_main(pretrain_gpt.main, *words)
        assert status == 0
    usual, _, everything = texts.values()
    assert texts["-h",] == usual
    assert len(usual.splitlines()) <= 40 and max(map(len, usual.splitlines())) <= 100
    for words in ("train.seq", "--dry-run", "--gpus N", "--explain KEY", "configs/demo.yaml"):
        assert words in usual and words in everything
    assert "faults.compare_every" not in usual
    assert all(
        f" {name} " in everything for name, key in get_config_keys().items() if not key.section
    )
    assert "Takes one of fp32, bf16, fp16, fp64." in " ".join(everything.split())


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--tensor-model-parallel-size", "8"], ["tensor_model_parallel_size is parallel.tensor"]),
        (
            ["--lr=3e-4", "--bogus"],
            ["--lr: did you mean optim.lr?", "--bogus: pretrain_gpt.py --help all "],
        ),
        (["--dry_run"], ["--dry_run: did you mean --dry-run?"]),
        (["--help", "optim.lr"], ["invalid choice: 'optim.lr'"]),
        (["optim.lr", "3e-4"], ["'optim.lr' is not of the form section.key=value"]),
        (["tensor_model_parallel_size=8"], ["tensor_model_parallel_size is parallel.tensor"]),
    ],
)
def test_command_lines_of_other_programs(words, messages, overrides, call_main, tmp_path):
    status, _, text = call_main(pretrain_gpt.main, *words, *overrides())
    assert status == 2 and "Traceback" not in text
    assert all(line in text for line in messages), text
    assert not (tmp_path / "run").exists()


def test_overrides_may_be_spaced_and_stand_before_and_after_options(call_main):
    words = ["optim.lr", "=", "3e-3", "--config", "demo", "train.steps=7", "--dry-run"]
    _, text, _ = call_main(pretrain_gpt.main, *words, "run.seed=9", "run.device=cpu")
    assert "  lr: 0.003\n" in text and "  steps: 7\n" in text and "  seed: 9\n" in text
