"""Runs that measure the noise of their gradients: it changes no loss, is the same for all layouts
with as many data ranks, goes on after a resume, and is told in the summary and the report.

Tests `megaframe.metrics.gradient_noise`, `megaframe.config.batch_advice` and
`megaframe.validate.gradient_noise`.
"""

import pytest
from bitwise import assert_same_losses
from entry_runs import read_lines, read_losses, train
from slow_cases import slow
from tolerances import promised

from megaframe.dashboard.report import render_report
from megaframe.dashboard.run_folder import RunFolder

MEASURED = {
    "metrics__gradient_noise_every": 2,
    "train__steps": 8,
    "train__microbatch": 1,
    "train__batch_ramp": "{start: 4, increment: 4, samples: 8}",
    "optim__schedule": "constant",
    "data__mask_eod": True,
}
LAYOUTS = [
    (2, {"zero": 0}),
    (4, {"tensor": 2, "data": 2}),
    slow(4, {"context": 2, "data": 2, "reduce_precision": "bf16"}),
    slow(4, {"pipeline": 2, "data": 2, "schedule": "zb-h1"}),
]


def read_noise(folder):
    return {
        line["step"]: line["gradient_noise"]
        for line in read_lines(folder)
        if "gradient_noise" in line
    }


@pytest.fixture(scope="module")
def measured_run(pool, corpus, tmp_path_factory):
    """Return the folder of a run with two data ranks."""
    folder = tmp_path_factory.mktemp("noise") / "run"
    pool.run(2, train, list_keys(corpus, folder, **MEASURED))
    return folder


def list_keys(corpus, folder, **changes):
    keys = {
        "run.dir": folder, "run.device": "cpu", "model.layers": 2, "model.hidden": 16,
        "model.heads": 2, "model.vocab": 61, "train.seq": 16, "train.global_batch": 8,
        "train.precision": "fp64", "optim.lr": 0.01, "data.sources": f"[{{path: {corpus}}}]",
        "data.split": "[0.8, 0.2, 0.0]", "checkpoint.every": 0, "metrics.peak_tflops": 1.0,
        "kernels.matmul": "torch", **{k.replace("__", "."): v for k, v in changes.items()},
    }  # fmt: skip
    return [f"{key}={value}" for key, value in keys.items()]


def test_measuring_changes_no_bit(pool, corpus, measured_run, tmp_path):
    keys = {**MEASURED, "metrics__gradient_noise_every": 0}
    pool.run(2, train, list_keys(corpus, tmp_path / "run", **keys))
    assert_same_losses(
        read_losses(measured_run),
        read_losses(tmp_path / "run"),
        because="norms are taken of gradients that stay as they are",
    )
    assert not read_noise(tmp_path / "run")
    noise = read_noise(measured_run)
    assert sorted(noise) == [2, 4, 6, 8]
    assert all(values["variance"] > 0 for values in noise.values())


@pytest.mark.parametrize(("ranks", "parallel"), LAYOUTS)
def test_the_noise_is_that_of_other_layouts_with_as_many_data_ranks(
    ranks, parallel, pool, corpus, measured_run, tmp_path
):
    keys = {f"parallel__{key}": value for key, value in parallel.items()}
    pool.run(ranks, train, list_keys(corpus, tmp_path / "run", **MEASURED, **keys))
    actual, expected = read_noise(tmp_path / "run"), read_noise(measured_run)
    if parallel.get("reduce_precision") == "bf16":
        # What is summed is rounded, and moves the weights by as much: 2^-8 of each term.
        for step in expected:
            assert actual[step]["variance"] == pytest.approx(expected[step]["variance"], rel=0.05)
        return
    assert actual.keys() == expected.keys()
    for step, values in expected.items():
        assert actual[step] == promised(values), step


def test_averages_go_on_after_a_resume_and_are_told(pool, corpus, measured_run, tmp_path):
    folder = tmp_path / "run"
    for steps in (4, 8):
        extra = {"checkpoint__every": 4, "checkpoint__resume": "latest", "train__steps": steps}
        pool.run(2, train, list_keys(corpus, folder, **{**MEASURED, **extra}))
    assert read_noise(folder) == promised_by_step(read_noise(measured_run))
    last = read_noise(folder)[8]
    log = (folder / "run.log").read_text()
    assert "critical batch" in log
    report = render_report(RunFolder(folder))
    if "critical_batch" in last:
        critical = f"{last['critical_batch']:,.0f} tokens"
        assert critical in log and critical in report
    else:
        assert "not known" in log


def promised_by_step(noise):
    return {step: promised(values) for step, values in noise.items()}
