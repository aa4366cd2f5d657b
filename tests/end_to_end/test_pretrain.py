"""Whole runs through the entry: learning, resuming, layouts, evaluation.

Tests `megaframe.training.entry`, `megaframe.training.run_checkpoint`,
`megaframe.training.start_notes`, `megaframe.training.step_metrics`, `megaframe.training.validation`
and `megaframe.config.compare`.
"""

import math
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from bitwise import assert_same_losses
from entry_runs import pretrain_gpt, read_lines, read_losses, rewrite_config, train
from patience import PATIENCE
from rank_process import RankProcess
from slow_cases import slow
from tolerances import near, promised

from megaframe.checkpoint import locate_checkpoint
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter

LEARN = {"train__steps": 60, "train__global_batch": 32, "train__microbatch": 16, "optim__lr": 0.03}


SOMETIMES = {"time_max", "time_min", "stages", "stragglers", "bandwidth", "resumed_after"}
"""Keys that a line has only with several ranks, or after a resume."""


def test_a_run_learns_and_leaves_its_records(pool, overrides, tmp_path):
    pool.run(1, train, overrides(**{**LEARN, "train__eval_every": 30, "checkpoint__every": 25}))
    metrics = read_lines(tmp_path / "run")
    assert metrics[0]["loss"] == pytest.approx(math.log(61), rel=0.05)
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    for key in (
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tflops_per_second",
        "mfu", "hfu", "memory_bytes", "seconds", "time",
    ):  # fmt: skip
        assert metrics[-1][key] is not None
    assert metrics[-1]["tokens"] == 32 * 16
    assert metrics[59]["eval_perplexity"] == pytest.approx(math.exp(metrics[59]["eval_loss"]))
    assert "eval_loss" not in metrics[30]
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved == ["step-00000050", "step-00000060"]
    assert (tmp_path / "run/config.yaml").exists()


@pytest.mark.parametrize("documents", [slow(False), True])
def test_ranks_do_not_change_the_run(documents, pool, overrides, tmp_path):
    """Data order, losses and evaluation stay the same, with masks and a growing batch."""
    runs = {}
    for ranks, microbatch in ((1, 8), (2, 2), (4, 1)):
        folder = tmp_path / f"run{ranks}"
        extra = {}
        if documents:
            extra = {
                "data__mask_eod": True,
                "data__reset_attention": True,
                "data__reset_positions": True,
            }
        keys = overrides(
            run__dir=folder,
            train__steps=8,
            train__microbatch=microbatch,
            train__batch_ramp="{start: 8, increment: 8, samples: 40}",
            train__global_batch=16,
            train__eval_every=4,
            train__eval_samples=13,
            **extra,
        )
        pool.run(ranks, train, keys)
        runs[ranks] = read_lines(folder)
    for line, *others in zip(runs[1], runs[2], runs[4], strict=True):
        for other in others:
            assert other.keys() - SOMETIMES == line.keys() - SOMETIMES
            for key in {"loss", "grad_norm", "eval_loss", "tokens"} & line.keys():
                assert other[key] == promised(line[key])
    assert [line["tokens"] // 16 for line in runs[1]] == [8] * 5 + [16] * 3


@pytest.mark.parametrize("axes", [("data",), slow(("pipeline", "context", "tensor"))])
def test_each_source_is_evaluated_and_no_layout_changes_what_it_comes_to(
    axes, pool, corpus, overrides, tmp_path
):
    with IndexedDatasetWriter(str(tmp_path / "other"), np.dtype(np.uint16)) as writer:
        for start in range(30):
            writer.append(np.arange(start, start + 31).astype(np.uint16))

    def evaluate_run(ranks, name, *sources, **changes):
        folder = tmp_path / name
        text = {"model__vocab": 257, "data__tokenizer": "bytes"}
        changes = {"train__eval_samples": 42, **text, **changes}
        keys = overrides(run__dir=folder, train__eval_every=6, **changes)
        listed_sources = ", ".join(f"{{path: {path}, split: {split}}}" for path, split in sources)
        pool.run(ranks, train, [*keys, f"data.sources=[{listed_sources}]"])
        return read_lines(folder)[-1]

    trained, held_out = (corpus, [0.8, 0.2, 0]), (tmp_path / "other", [0, 1, 0])
    single = evaluate_run(1, "one", trained, held_out)
    assert single["eval_losses"].keys() == {"tokens", "other"}
    assert single["eval_loss"] == near(sum(single["eval_losses"].values()) / 2, 4)
    of_bytes = {name: loss / math.log(2) for name, loss in single["eval_losses"].items()}
    assert single["eval_bits_per_byte_of"] == near(of_bytes, 4)  # each token is a byte
    unsplit = evaluate_run(1, "alone", trained, train__eval_samples=21)
    assert "eval_losses" not in unsplit
    assert unsplit["eval_loss"] == promised(single["eval_losses"]["tokens"])
    for axis in axes:
        changes = {f"parallel__{axis}": 2, "train__microbatch": 1}
        other = evaluate_run(2, axis, trained, held_out, **changes)
        for name in ("eval_losses", "eval_bits_per_byte_of"):
            assert other[name] == promised(single[name])
        assert other["eval_loss"] == promised(single["eval_loss"])


def test_a_killed_run_continues_on_the_same_curve(pool, overrides, tmp_path):
    steps = {"train__steps": 24, "checkpoint__every": 3, "model__dropout": 0.1}
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", **steps))
    keys = [*overrides(**steps), "checkpoint.resume=latest"]
    for at_least in (4, 11):
        process = RankProcess(pretrain_gpt.main, words=keys)
        wait_for_lines(tmp_path / "run/metrics.jsonl", at_least, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    pool.run(1, train, keys)
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(losses, whole, because="a checkpoint has every bit of the state")


def wait_for_lines(path, count, process):
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_text().count("\n") >= count:
            return
        time.sleep(0.002)
    # On a fast machine the run may have ended; then nothing is killed, and the curves agree anyway.


@pytest.mark.slow
def test_resume_under_other_ranks_and_a_longer_run(pool, overrides, tmp_path):
    """The order of the data does not depend on the length of the run."""
    constant = {"optim__schedule": "constant", "checkpoint__every": 6}
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", train__steps=12, **constant))
    pool.run(2, train, overrides(train__steps=6, **constant))
    log = tmp_path / "run/run.log"
    assert "resumed" not in log.read_text()
    options = overrides(
        train__steps=12, checkpoint__resume="latest", train__microbatch=1, **constant
    )
    pool.run(4, train, options)
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "whole"))
    first, second = (f"{tmp_path}/run/checkpoints/step-000000{step}" for step in ("06", "12"))
    changed = "train.steps: 6 there, 12 here; train.microbatch: 4 there, 1 here"
    assert f"resumed from step 6 of {first}\nchanged since then: {changed}\n" in log.read_text()
    size = log.stat().st_size
    pool.run(4, train, options)
    text = log.read_text()[size:]
    assert f"resumed from step 12 of {second}\n" in text and "changed" not in text
    finished = "the run is finished: step 12 of train.steps=12; to train longer, raise train.steps"
    assert finished in text
    assert len(read_lines(tmp_path / "run")) == 12


@pytest.mark.parametrize("elsewhere", [slow(False), True])
def test_a_run_folder_is_as_good_as_its_checkpoints(elsewhere, pool, overrides, tmp_path):
    """Also if it was moved, and if its checkpoints are in another folder."""
    home = tmp_path / "saved" if elsewhere else tmp_path / "moved/checkpoints"
    where = {"checkpoint__folder": home} if elsewhere else {}
    pool.run(1, train, overrides(checkpoint__every=3, train__steps=3, **where))
    (tmp_path / "run").rename(tmp_path / "moved")
    places = [tmp_path / "moved", home, home / "step-00000003"]
    for number, path in enumerate(places):
        assert locate_checkpoint(str(path), "--checkpoint") == home / "step-00000003"
        name = tmp_path / str(number)
        pool.run(
            1, train, overrides(run__dir=f"{name}-new", checkpoint__weights=path, train__steps=1)
        )
        pool.run(
            1, train, overrides(run__dir=f"{name}-on", checkpoint__resume=path, train__steps=4)
        )
        text = Path(f"{name}-on/run.log").read_text()
        assert f"resumed from step 3 of {home}/step-00000003" in text
        assert read_lines(Path(f"{name}-on"))[0]["step"] == 4


LAYOUTS = (
    (2, {"pipeline": 2, "chunks": 2, "schedule": "zb-v"}),
    (4, {"tensor": 2, "data": 2}),
    (2, {"zero": 3, "data_replicate": 2}),
)
MORE_LAYOUTS = (
    (4, {"pipeline": 2, "data": 2, "chunks": 3, "schedule": "interleaved", "zero": 1}),
    (4, {"zero": 3}),
    (4, {"pipeline": 4, "schedule": "zb-h1", "layers_per_stage": "[1, 2, 1, 2]"}),
    (4, {"tensor": 2, "pipeline": 2, "schedule": "1f1b"}),
)


@pytest.mark.parametrize("layouts", [LAYOUTS, slow(MORE_LAYOUTS)])
def test_resume_under_other_layouts(layouts, pool, overrides, tmp_path):
    """Each part of the run has another layout and schedule; tied weights are saved once."""
    shared_keys = {
        "model__layers": 6,
        "model__tie_embeddings": True,
        "model__dropout": 0.1,
        "train__global_batch": 4,
        "optim__schedule": "constant",
        "checkpoint__every": 2,
        "train__microbatch": 1,
        "train__eval_every": 2,
        "train__eval_samples": 6,
    }
    pool.run(
        1,
        train,
        overrides(run__dir=tmp_path / "whole", train__steps=2 * len(layouts), **shared_keys),
    )
    for part, (ranks, parallel) in enumerate(layouts, 1):
        keys = {f"parallel__{key}": value for key, value in parallel.items()}
        resumed = {"train__steps": 2 * part, "checkpoint__resume": "latest"}
        pool.run(ranks, train, overrides(**shared_keys, **resumed, **keys))
    for line, other in zip(
        read_lines(tmp_path / "run"), read_lines(tmp_path / "whole"), strict=True
    ):
        assert other.keys() - SOMETIMES == line.keys() - SOMETIMES
        for key in {"loss", "grad_norm", "eval_loss", "tokens"} & line.keys():
            assert line[key] == promised(other[key])


def test_gradients_that_are_not_finite_are_named_on_every_stage(pool, overrides, tmp_path):
    keys = {
        "train__precision": "fp16",
        "optim__loss_scale": 2.0**40,
        "parallel__pipeline": 2,
        "train__steps": 2,
    }
    pool.run(2, train, overrides(**keys))
    log = (tmp_path / "run/run.log").read_text()
    assert re.search(r"step 1: gradients of blocks\.\d.* \(first in the backward pass of", log)
    assert read_lines(tmp_path / "run")[0]["skipped"] == 1.0


def test_runs_are_bitwise_equal(pool, overrides, tmp_path):
    keys = {"train__precision": "bf16", "run__deterministic": True, "model__dropout": 0.2}
    keys["train__steps"] = 6
    for name in "ab":
        pool.run(2, train, overrides(run__dir=tmp_path / name, **keys))
    first, second = read_losses(tmp_path / "a"), read_losses(tmp_path / "b")
    assert_same_losses(
        first, second, because="it is one config twice, and no sum has an order by chance"
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(precision, pool, overrides, tmp_path):
    keys = {**LEARN, "train__microbatch": 32, "train__precision": precision}
    keys["optim__loss_scale"] = 2.0**30
    pool.run(1, train, overrides(**keys))
    metrics = read_lines(tmp_path / "run")
    assert metrics[-1]["loss"] < 0.7 * math.log(61)
    skipped = [line["skipped"] for line in metrics]
    assert bool(sum(skipped)) == (precision == "fp16")
    if precision == "fp16":
        assert skipped[0] and not skipped[-1] and metrics[-1]["loss_scale"] < 2.0**30


def test_checkpoint_every_0_saves_none(pool, overrides, tmp_path):
    pool.run(1, train, overrides())
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_warm_up_longer_than_the_run_is_a_warning(overrides, pool, tmp_path):
    """It is no error, because a first try is often a few steps of a config with a long warm-up."""
    pool.run(1, train, overrides(train__steps=2, optim__warmup=8))
    rates = [line["lr"] for line in read_lines(tmp_path / "run")]
    assert rates == pytest.approx([0.01 / 9, 0.02 / 9])
    warning = "optim.warmup=8 is longer than train.steps=2: the learning rate is still rising"
    assert warning in (tmp_path / "run/run.log").read_text()


def test_a_run_first_says_its_size_device_data_layout_and_kernels(pool, overrides, tmp_path):
    """In this order and before anything else; what few users need is only in the log."""
    folder = tmp_path / "run"
    pool.run(2, train, overrides(parallel__pipeline=2, parallel__chunks=1, train__steps=1))
    log = (folder / "run.log").read_text().splitlines()
    first = ("parameters", "device", "data", "batch", "layout", "kernels:")
    assert tuple(line.split()[0] for line in log[: len(first)]) == first
    assert log[0].startswith("parameters  8,")
    assert re.fullmatch(r"device      CPU \(.+\) with \d+ threads? a rank, in fp64", log[1])
    tokens, samples = re.fullmatch(
        r"data        ([\d,]+) tokens: ([\d,]+) samples of 16 in 1 source", log[2]
    ).groups()
    assert int(tokens.replace(",", "")) == 16 * int(samples.replace(",", "")) > 1000
    assert log[4] == "layout      2 ranks = pipeline 2"


def test_a_checkpoint_from_before_a_key_was_there(pool, overrides, tmp_path):
    """A key that was added later gets its default, with which the run trains as before."""
    constant = {"optim__schedule": "constant", "checkpoint__every": 6}
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", **constant))
    pool.run(1, train, overrides(**constant, train__steps=6))
    path = tmp_path / "run/checkpoints/step-00000006"

    def make_older(config):
        del config["model"]["mtp_depth"], config["model"]["rotary_scaling"]["mscale"]
        del config["run"]["seed"], config["data"]["mask_eod"], config["faults"]

    rewrite_config(path, make_older)
    pool.run(1, train, overrides(**constant, checkpoint__resume="latest"))
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(losses, whole, because="a checkpoint has every bit of the state")
    warm = {"run__dir": tmp_path / "warm", "checkpoint__weights": path, "train__steps": 1}
    pool.run(1, train, overrides(**warm))


@pytest.mark.slow
def test_a_run_goes_on_when_its_data_has_moved(pool, overrides, corpus, tmp_path):
    pool.run(1, train, overrides(run__dir=tmp_path / "whole"))
    keys = {"checkpoint__every": 6, "checkpoint__resume": "latest"}
    pool.run(2, train, overrides(**keys, train__steps=6, optim__decay=12))
    (tmp_path / "there").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / "there")
    new_prefix = tmp_path / "there" / Path(corpus).name
    pool.run(2, train, overrides(**keys, data__sources=f"[{{path: {new_prefix}}}]"))
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "whole"))
    assert f"{corpus} is now {new_prefix}" in (tmp_path / "run/run.log").read_text()
