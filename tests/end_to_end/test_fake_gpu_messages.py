"""What a run on stand-ins for GPUs says at first: chips, kernels, and what they do not take."""

import json

from fake_cuda.client import PLAIN, SMALL


def test_a_model_that_a_gpu_has_no_memory_for_is_refused_before_it_is_built(
    fake_gpu, overrides, tmp_path
):
    large = {"model__layers": 100, "model__hidden": 8192, "model__heads": 64}
    keys = overrides(**{**SMALL, **PLAIN, **large}, run__device="cuda")
    output = fake_gpu.run("pretrain_gpt:main", *keys, world=2, fails=True)
    assert fake_gpu.failed and "error: does not fit in memory: rank 0 needs" in output
    assert "(h200) has 140.4 GiB" in output and "--force" in output
    assert not (tmp_path / "run").exists()


A100, ADA = ("NVIDIA A100-SXM4-40GB", "8.0", "39.4"), ("NVIDIA L40S", "8.9", "44.4")
STRANGER = ("NVIDIA Abacus", "9.0", "47")


def pretrain_on(fake_gpu, on, keys, fails=False):
    """Pretrain on a device: name, compute capability, GiB. Return what was printed."""
    return fake_gpu.run("fake_cuda.programs:pretrain_on", *on, *keys, fails=fails)


def test_chip_and_kernels_are_in_the_log_and_in_the_environment(fake_gpu, overrides, tmp_path):
    keys = {**SMALL, **PLAIN, "kernels__update": "auto", "train__steps": 1}
    keys["train__precision"] = "fp32"
    output = pretrain_on(fake_gpu, A100, overrides(**keys, run__device="cuda"))
    for line in (
        "NVIDIA A100-SXM4-40GB is the chip a100-40gb, with 39.4 GiB; parallel.cluster is not given",
        "kernels, and why not faster ones:",
        "  attention: plain code, because kernels.attention=reference",
        "  update: adamw, square_sum triton",
    ):
        assert line in output and line in (tmp_path / "run/run.log").read_text()
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["kernels"]["adamw"] == {"uses": "triton", "not": {}}
    assert environment["kernels"]["loss"]["why"] == "kernels.loss=reference"


def test_an_update_in_fp64_is_plain_code_and_says_why(fake_gpu, overrides):
    keys = {**SMALL, **PLAIN, "kernels__update": "auto", "train__steps": 1}
    output = fake_gpu.run("pretrain_gpt:main", *overrides(**keys, run__device="cuda"))
    assert "kernel adamw: torch in place of triton, which does not take some of this" in output
    assert "warning: kernel adamw: reference in place of torch" in output
    assert "divisor and skip in fp32" in output


def test_what_the_kernels_of_another_stage_refuse_is_in_the_log(fake_gpu, overrides, tmp_path):
    keys = {**SMALL, **PLAIN, "kernels__loss": "auto", "train__steps": 1, "parallel__pipeline": 2}
    fake_gpu.run("pretrain_gpt:main", *overrides(**keys, run__device="cuda"), world=2)
    log = (tmp_path / "run/run.log").read_text()
    assert log.count("rank 1: warning: kernel loss: reference in place of triton") == 1


def test_8_bits_that_would_be_slow_are_an_error_unless_they_are_asked_for(fake_gpu, overrides):
    keys = {**SMALL, **PLAIN, "train__precision": "bf16", "train__steps": 1, "run__device": "cuda"}
    output = pretrain_on(fake_gpu, A100, overrides(**keys, train__fp8="row"), fails=True)
    assert fake_gpu.failed and "train.fp8=row would run as the reference on this GPU" in output
    assert "need compute capability 8.9, and this GPU has 8.0; use train.fp8=none, or ker" in output
    output = pretrain_on(fake_gpu, ADA, overrides(**keys, train__fp8="block"), fails=True)
    assert fake_gpu.failed and "takes scales of 128 on compute capability 9.0" in output
    assert "use train.fp8=tensor or train.fp8=row or train.fp8=none" in output
    plain = overrides(**keys, train__fp8="row", kernels__fp8="reference")
    assert "warning: train.fp8=row runs as the reference" in pretrain_on(fake_gpu, A100, plain)


def test_an_unknown_chip_runs_and_has_no_prediction(fake_gpu, overrides):
    keys = {**SMALL, **PLAIN, "train__steps": 1, "run__device": "cuda"}
    keys["metrics__peak_tflops"] = "null"
    output = pretrain_on(fake_gpu, STRANGER, overrides(**keys))
    assert "unknown chip NVIDIA Abacus with 47.0 GiB: its memory is planned" in output
    assert "mfu n/a: unknown chip: 'NVIDIA Abacus'; set metrics.peak_tflops" in output
    output = pretrain_on(fake_gpu, STRANGER, overrides(**keys, parallel__auto="true"), fails=True)
    assert fake_gpu.failed and "speed is not predicted; measure it there with" in output
