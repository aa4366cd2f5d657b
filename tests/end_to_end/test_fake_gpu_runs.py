"""Whole runs on stand-ins for GPUs, with the losses of runs on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from fake_cuda.client import PLAIN, SMALL, assert_no_problem
from repo_copy import ROOT
from tolerances import compute_roundoff, promised


def train_on_gpu(fake_gpu, keys, world=1):
    """Train; return what every step recorded, and the validation losses."""
    fake_gpu.run("pretrain_gpt:main", *keys, world=world)
    folder = Path(next(key for key in keys if key.startswith("run.dir=")).partition("=")[2])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in ("loss", "grad_norm", "eval_loss") if name in row]


@pytest.fixture
def both(fake_gpu, overrides, tmp_path):
    """both(world, waits, **changes): train on the stand-in and on one rank of the CPU, and compare:
    in fp64, with the tolerance of the parity tests."""

    def compare(world=1, waits=(), **changes):
        changes = {**SMALL, **PLAIN, **changes}
        single_rank = {
            f"parallel__{axis}": 1 for axis in ("tensor", "context", "pipeline", "expert")
        }
        single_rank["train__cuda_graph"] = "false"
        expected = train_on_gpu(
            fake_gpu, overrides(**changes | single_rank | {"run__dir": tmp_path / "cpu"})
        )
        actual = train_on_gpu(fake_gpu, overrides(**changes, run__device="cuda"), world)
        assert_no_problem(fake_gpu, waits)
        assert len(actual) == len(expected) >= 6
        assert actual == promised(expected)

    return compare


@pytest.mark.slow
def test_offload_recompute_saves_and_a_resumed_run(fake_gpu, overrides, tmp_path):
    """Everything that copies beside the computation, in fp64."""
    keys = {
        **SMALL,
        **PLAIN,
        "model__dropout": 0.1,
        "model__layers": 3,
        "train__steps": 4,
        "optim__schedule": "constant",
        "train__recompute": "full",
        "train__eval_every": 2,
        "checkpoint__every": 1,
        "checkpoint__memory_every": 1,
    }
    expected = train_on_gpu(fake_gpu, overrides(**keys | {"run__dir": tmp_path / "cpu"}))
    keys |= {"run__device": "cuda", "train__offload": "true", "optim__offload": "true"}
    train_on_gpu(fake_gpu, overrides(**keys | {"train__steps": 2}))
    assert_no_problem(fake_gpu)
    actual = train_on_gpu(fake_gpu, overrides(**keys, checkpoint__resume="latest"))
    assert_no_problem(fake_gpu)
    assert len(actual) == len(expected) == 10
    assert actual == promised(expected)


def test_bf16_with_the_kernels_of_a_gpu(fake_gpu, overrides, tmp_path):
    """Those that `auto` chooses, with Triton's in its interpreter. The distance of losses and norms
    from those in fp64 is at most twice that of plain code in bf16 on a CPU, or one rounding: either
    may be near by chance."""
    keys = {
        **SMALL,
        "model__layers": 1,
        "model__norm": "rmsnorm",
        "model__activation": "swiglu",
        "model__position": "rotary",
        "model__dropout": 0.1,
        "model__hidden": 32,
        "model__vocab": 64,
        "train__steps": 2,
        "train__global_batch": 2,
    }
    exact = train_on_gpu(fake_gpu, overrides(**keys | {"run__dir": tmp_path / "exact"}))
    keys["train__precision"] = "bf16"
    plain = train_on_gpu(fake_gpu, overrides(**keys | {"run__dir": tmp_path / "plain"}))
    actual = train_on_gpu(fake_gpu, overrides(**keys, run__device="cuda"))
    assert_no_problem(fake_gpu)
    assert len(actual) == len(exact) == 4
    for kind in (slice(0, None, 2), slice(1, None, 2)):  # losses, norms
        rounding = compute_roundoff(torch.bfloat16) * max(exact[kind])
        allowed = max(2 * measure_farthest(plain[kind], exact[kind]), rounding)
        assert measure_farthest(actual[kind], exact[kind]) <= allowed


def measure_farthest(these, those):
    return max(abs(this - that) for this, that in zip(these, those, strict=True))


def test_a_graph_on_one_device(both):
    both(train__cuda_graph="true", train__steps=5, train__eval_every=2, checkpoint__every=2)


def test_data_ranks_with_optimizer_state_in_host_memory(both):
    both(2, optim__name="muon", optim__offload="true", parallel__zero=2, train__microbatch=1)


@pytest.mark.slow
def test_expert_ranks(both):
    """The host must know how many tokens come, and how many each expert has in plain code."""
    both(
        2,
        ("_list_expert_owners", "_route_all_to_all", "_grouped", "into"),
        model__moe="{experts: 4, top_k: 2, ffn: 32}",
        parallel__expert=2,
        kernels__experts="reference",
        train__eval_every=3,
    )


def test_pipeline_ranks_train_as_on_a_cpu(both, tmp_path):
    both(2, parallel__pipeline=2, train__eval_every=3, checkpoint__every=2)
    log = (tmp_path / "run/run.log").read_text()
    assert "nccl: CUDA_DEVICE_MAX_CONNECTIONS=8, as the layout has 6 streams" in log
    assert "nccl: links use up to 8 thread blocks, other transfers as NCCL decides" in log


@pytest.mark.slow
def test_ring_context_ranks_train_as_on_a_cpu(both):
    both(2, parallel__context=2, train__eval_every=3)


@pytest.mark.slow
def test_a_graph_of_several_communicators(both):
    both(
        4,
        parallel__tensor=2,
        parallel__zero=3,
        train__cuda_graph="true",
        train__steps=5,
        train__eval_every=2,
        train__microbatch=1,
    )


@pytest.mark.slow
def test_a_loss_and_a_callback_from_outside_in_a_graph(both, tmp_path):
    """Neither waits for the device: a callback is told of metrics two steps later."""
    files = ("examples/callback.py", "tests/support/recording_extension.py")
    both(
        2,
        ["check_same_extensions"],  # once, before the first step
        parallel__tensor=2,
        train__cuda_graph="true",
        train__steps=6,
        run__extensions=f"[{', '.join(str(ROOT / file) for file in files)}]",
        run__callbacks="[recording]",
        train__loss="focal",
    )
    lines = (tmp_path / "run/calls.jsonl").read_text().splitlines()
    calls = [call[:3] for call in map(json.loads, lines)]
    known = [call[1:] for call in calls if call[0] == "after_step"]
    assert known == [[step, step] for step in range(1, 7)]
    assert calls.index(["after_step", 1, 1]) > calls.index(["before_step", 3, 0])
