"""The GPU's path on a stand-in for GPUs: whole runs, with the losses of runs on a CPU; and the
stand-in itself, which must see the faults that it is there for.

A run is free of problems if nothing but waits of the host is reported, and these only where a run
may wait. What the hosts of a world have called must come to an end by NCCL's rules as well
(`nccl_rules.py`).
"""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_cuda.build import build_library, explain_obstacle
from fake_cuda.nccl_layouts import LAYOUTS, make_config, name_layout, record_layout
from fake_cuda.nccl_rules import CollectiveCall, CreateCommunicator, MessageGroup, simulate
from rank_pool import free_port
from tolerances import compute_roundoff, promised
from torch.distributed.flight_recorder import fr_trace

from megaframe.errors import EXIT_LOST_RANKS

if (reason := explain_obstacle()) is not None:
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
MAY_WAIT = {
    "initialize_weights": "initial weights are drawn on the host",
    "begin": "optimizer state is made at the start",
    "_get_frequencies_on": "rotary frequencies are computed on the host, once",
    "_can_accumulate_wide": "tries a product, once",
    "_check_size": "the ranks of a communicator, when it is made",
    "_sum_totals": "the totals of an evaluation",
    "_compare_with_previous_loss": "the first loss after a load",
    "_save": "the loss and the norm in a checkpoint",
    "_load": "a checkpoint",
    "restore": "ranks agree on the checkpoint to resume from",
}
"""Functions in which the host may wait for the device, and for what."""


class FakeCuda:
    """run(function, *words) calls a function on the ranks of a world; `reports` is what was
    reported to them, in order: kind, text and place; `calls` is what each rank has called."""

    def __init__(self, folder):
        paths = (ROOT, ROOT / "kernels", ROOT / "tests/support", *sys.path)
        variables = {"FAKE_CUDA_LIBRARY": str(build_library()), "FAKE_CUDA_DEVICES": "4"}
        environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        self._folder, self._runs = folder, 0
        self._server = subprocess.Popen(
            [sys.executable, "-m", "fake_cuda.fake_server"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, function, *words, world=1, fails=False):
        """Call a function, given as module:name, with a command line. fails: it may."""
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        request = {"function": function, "words": words, "world": world, "port": free_port()}
        self._server.stdin.write(json.dumps({**request, "folder": str(folder)}) + "\n")
        self._server.stdin.flush()
        statuses = json.loads(self._server.stdout.readline())
        output = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
        assert fails or statuses == [0] * world, output
        lines = [path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))]
        self.statuses, self.failed = statuses, statuses != [0] * world
        if not self.failed:
            recordings = zip(*map(read_calls, sorted(folder.glob("*.calls"))), strict=True)
            self.calls, queues = recordings
            simulate(self.calls, min(queues))
        self.reports = [tuple(json.loads(line)) for part in lines for line in part]
        return output

    def kinds(self):
        return {kind for kind, _, _ in self.reports}

    def close(self):
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


def read_calls(path):
    return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module")
def fake_gpu(tmp_path_factory):
    started = FakeCuda(tmp_path_factory.mktemp("fake_cuda"))
    yield started
    started.close()


# ------------------------------------------------------------------------------------- whole runs

PLAIN = {f"kernels__{key}": "reference" for key in ("elementwise", "attention", "loss", "update")}
SMALL = {"train__seq": 8, "train__global_batch": 4, "train__steps": 3, "train__eval_samples": 4}


def train_on_gpu(fake_gpu, keys, world=1):
    """Train; return what every step recorded, and the validation losses."""
    fake_gpu.run("pretrain_gpt:main", *keys, world=world)
    folder = Path(next(key for key in keys if key.startswith("run.dir=")).partition("=")[2])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in ("loss", "grad_norm", "eval_loss") if name in row]


def assert_no_problem(fake_gpu, waits=()):
    """waits: further functions in which the host may wait."""
    for kind, text, place in fake_gpu.reports:
        functions = {function.partition(":")[2] for function in place.split(" < ")}
        assert kind == "wait" and functions & {*MAY_WAIT, *waits}, (kind, text, place)


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


def test_a_model_that_a_gpu_has_no_memory_for_is_refused_before_it_is_built(
    fake_gpu, overrides, tmp_path
):
    large = {"model__layers": 100, "model__hidden": 8192, "model__heads": 64}
    keys = overrides(**{**SMALL, **PLAIN, **large}, run__device="cuda")
    output = fake_gpu.run("pretrain_gpt:main", *keys, world=2, fails=True)
    assert fake_gpu.failed and "error: does not fit in memory: rank 0 needs" in output
    assert "(h200) has 140.4 GiB" in output and "--force" in output
    assert not (tmp_path / "run").exists()


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
        ("_expert_owners", "_route_all_to_all", "_grouped", "into"),
        model__moe="{experts: 4, top_k: 2, ffn: 32}",
        parallel__expert=2,
        kernels__experts="reference",
        train__eval_every=3,
    )


def test_pipeline(both, tmp_path):
    both(2, parallel__pipeline=2, train__eval_every=3, checkpoint__every=2)
    log = (tmp_path / "run/run.log").read_text()
    assert "nccl: CUDA_DEVICE_MAX_CONNECTIONS=8, as the layout has 6 streams" in log
    assert "nccl: links use up to 8 thread blocks, other transfers as NCCL decides" in log


@pytest.mark.slow
def test_a_ring(both):
    both(2, parallel__context=2, train__eval_every=3)


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


# ------------------------------------------------------------------------- what a run says at first

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
    keys["meter__peak_tflops"] = "null"
    output = pretrain_on(fake_gpu, STRANGER, overrides(**keys))
    assert "unknown chip NVIDIA Abacus with 47.0 GiB: its memory is planned" in output
    assert "mfu n/a: unknown chip: 'NVIDIA Abacus'; set meter.peak_tflops" in output
    output = pretrain_on(fake_gpu, STRANGER, overrides(**keys, parallel__auto="true"), fails=True)
    assert fake_gpu.failed and "speed is not predicted; measure it there with" in output


# --------------------------------------------------------------------------- the stand-in can fail

PROGRAMS = {
    "unordered_streams": {"race"},
    "ordered_streams": set(),
    "reads_of_two_streams": set(),
    "freed_in_use": {"lifetime"},
    "freed_but_recorded": set(),
    "freed_after_a_wait": set(),
    "pinned_memory_read_too_early": set(),
    "pinned_memory_changed_too_early": {"race"},
    "unrecorded_event": {"event"},
    "nothing_written": set(),
    "a_graph": set(),
    "a_graph_that_waits": {"capture"},
    "a_graph_that_copies_from_pageable_memory": {"capture"},
    "a_graph_with_an_event_from_outside": {"capture"},
    "a_graph_that_loses_a_stream": {"capture", "race"},
    "a_graph_and_another_stream": {"race"},
    "a_mask": {"wait"},
    "mixed_devices": set(),
    "a_kernel_without_order": {"race"},
    "activations": set(),
    "landing": set(),
    "optimizer_state": set(),
    "background": set(),
    "background_far_behind": set(),
    "clock": set(),
    "transfer": set(),
    "messages_both_ways_as_one": set(),
    "settings": set(),
}


@pytest.mark.parametrize(("program", "kinds"), PROGRAMS.items(), ids=PROGRAMS)
def test_every_fault_is_reported_and_nothing_else(fake_gpu, program, kinds):
    fake_gpu.run("fake_cuda.programs:main", program, world=RANKS.get(program, 1))
    assert fake_gpu.kinds() - ({"wait"} - kinds) == kinds, fake_gpu.reports


RANKS = {"transfer": 2, "messages_both_ways_as_one": 2, "settings": 2}
LEFT_OUT = [
    ("activations", "_copy_out", "wait_stream", "race"),
    ("activations", "take", "wait_event", "race"),
    ("activations", "_free_outgoing", "wait_event", "lifetime"),
    ("activations", "_copy_in", "wait_stream", "race"),
    ("landing", "copy_to_host", "wait_stream", "race"),
    ("landing", "copy_to_host", "record_stream", "lifetime"),
    ("landing", "wait_for_copies", "synchronize", None),
    ("optimizer_state", "wait_for_fetched", "wait_stream", "race"),
    ("optimizer_state", "write_back", "wait_stream", "race"),
    ("optimizer_state", "_copy_in", "wait_event", "race"),
    ("optimizer_state", "_allocate", "wait_stream", "race"),
    ("optimizer_state", "_allocate", "record_stream", "lifetime"),
    ("optimizer_state", "synchronize", "synchronize", None),
    ("background", "_copy_from_device", "wait_event", "race"),
    ("background", "_copy_from_device", "synchronize", None),
    ("background_far_behind", "wait_for_copy", "wait_event", "race"),
    ("clock", "__call__", "is_current_stream_capturing", "capture"),
    ("transfer", "_wait_for_all", "wait", "race"),
]
"""A wait or a note of the project's own code, and what is reported without it; None: nothing, but
the result is wrong."""


@pytest.mark.parametrize(("program", "function", "method", "kind"), LEFT_OUT)
def test_every_wait_is_needed(fake_gpu, program, function, method, kind):
    words = (program, function, method)
    fake_gpu.run("fake_cuda.programs:without", *words, world=RANKS.get(program, 1), fails=True)
    kinds = fake_gpu.kinds() - {"wait"}
    assert kind in kinds if kind else fake_gpu.failed, kinds


FOREVER = {
    "messages_both_ways_one_by_one": (
        "rank 0 waits forever for rank 1 to connect",
        "rank 0: send float32 4 to rank 1",
        "rank 1: send float32 4 to rank 0",
        "[programs.py:",
    ),
    "collectives_in_opposite_orders": (
        "rank 0 waits forever for ranks [1] to connect",
        "rank 0: all_reduce float32 4 over",
        "rank 1: all_reduce float32 4 over",
    ),
    "communicators_in_another_order": ("ranks do not make communicators in one order: rank ",),
    "a_collective_without_a_rank": ("rank 0 waits forever for ranks [1] to connect",),
}
"""Programs of two ranks that NCCL would not bring to an end, and what is said."""


# The program without a rank repeats another one; that of communicators waits 90 s for torch.
@pytest.mark.quick(when=lambda program: program in [*FOREVER][:2])
@pytest.mark.parametrize(("program", "expected"), FOREVER.items(), ids=FOREVER)
def test_what_nccl_would_wait_for_is_an_error(fake_gpu, program, expected):
    output = fake_gpu.run("fake_cuda.programs:main", program, world=2, fails=True)
    assert fake_gpu.failed
    for text in expected:
        assert text in output


def test_a_pipeline_whose_links_nothing_connects_before_a_step_is_an_error(fake_gpu, overrides):
    """With 1F1B both ranks begin with a receive."""
    keys = {**SMALL, **PLAIN, "parallel__pipeline": 2, "train__steps": 1}
    keys = overrides(**keys, run__device="cuda")
    output = fake_gpu.run(
        "fake_cuda.programs:pretrain_without_connecting", *keys, world=2, fails=True
    )
    assert fake_gpu.failed and "rank 0 waits forever for rank 1 to connect" in output
    assert "rank 1: receive float64" in output and "[executor.py:" in output


ALSO_ALONE = [
    i
    for i, (world, _, layout) in enumerate(LAYOUTS)
    if (world == 2 and layout.get("schedule") in (None, "1f1b") and layout.get("zero") in (None, 3))
    or layout.get("dispatch") == "all_gather"
]
"""Each axis, and collectives on parts of any sizes."""


@pytest.mark.quick(when=lambda layout: "context" in LAYOUTS[layout][2])
@pytest.mark.parametrize("layout", ALSO_ALONE, ids=[name_layout(*LAYOUTS[i]) for i in ALSO_ALONE])
def test_a_rank_that_runs_alone_calls_the_same(fake_gpu, layout):
    """So what is simulated of many ranks is what they call."""
    world, model, parallel = LAYOUTS[layout]
    fake_gpu.run("fake_cuda.programs:main", "layout_of_a_test", str(layout), world=world)
    single_recorded = record_layout(make_config(world, model, parallel), world)
    assert [*map(list_transfers, fake_gpu.calls)] == [*map(list_transfers, single_recorded)]
    assert all(len(list_transfers(calls)) > 20 for calls in single_recorded)


def list_transfers(calls):
    """Return what a rank makes and transfers, without lines and streams. One number more is summed
    over each communicator that torch splits from another."""
    kinds = [
        recorded_call
        for recorded_call in calls
        if isinstance(recorded_call, CollectiveCall | CreateCommunicator | MessageGroup)
    ]
    return [
        str(recorded_call)
        for recorded_call in kinds
        if not str(recorded_call).startswith("all_reduce float32 1 ")
    ]


# --------------------------------------------------------------------------------- what fails there

FAILING = {
    **SMALL,
    **PLAIN,
    "run__device": "cuda",
    "parallel__pipeline": 2,
    "train__steps": 7,
    "train__eval_every": 0,
    "checkpoint__every": 2,
    "checkpoint__resume": "latest",
}


def read_losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture
def failing(fake_gpu, overrides, tmp_path):
    """failing(fault, rank) -> what was printed, for a run of two ranks with a fault in step 6.
    limit: the seconds that a step may take from then on."""

    def run(fault, rank, limit=1, fails=False, **changes):
        words = fault, str(rank), "5", str(limit), *overrides(**FAILING | changes)
        return fake_gpu.run("fake_cuda.fake_failures:pretrain", *words, world=2, fails=fails)

    return run


def test_a_transfer_that_hangs_is_aborted_and_the_run_goes_on(
    failing, fake_gpu, overrides, tmp_path
):
    fake_gpu.run("pretrain_gpt:main", *overrides(**FAILING, run__dir=tmp_path / "whole"), world=2)
    output = failing("hang", 1)
    assert_no_problem(fake_gpu)
    assert (
        "restarted in the same processes (1 of faults.restarts=3): step 6 took more than" in output
    )
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "whole")
    assert output.count("flight record in ") == 2


@pytest.mark.slow
def test_a_communicator_that_fails_is_aborted_and_the_run_goes_on(failing, fake_gpu):
    """The host is not told by its transfers; the time limits are too long to help."""
    output = failing("lose_connection", 0, limit=100)
    assert_no_problem(fake_gpu)
    assert re.search(r"restarted in the same .*: step 6 failed, NCCL reports COMM_ERROR in", output)


@pytest.mark.slow
def test_a_device_with_an_error_that_stays_ends_the_run(failing, fake_gpu, tmp_path):
    output = failing("fail_device", 1, fails=True)
    assert fake_gpu.statuses == [EXIT_LOST_RANKS] * 2
    assert "restarted" not in output and "step 6 took more than faults.step_timeout=1 s" in output


@pytest.mark.slow
def test_torchs_analyser_reads_the_flight_records_of_a_hang(failing, tmp_path):
    failing("hang", 1, checkpoint__resume="null", fails=True)
    folder = tmp_path / "run/faults"
    assert sorted(path.name for path in folder.glob("nccl-*")) == ["nccl-rank-0", "nccl-rank-1"]
    fr_trace.main([str(folder), "-p", "nccl-rank-", "-o", str(tmp_path / "found")])
    _, database = pickle.loads((tmp_path / "found").read_bytes())
    unmatched = [call for call in database.ncclcalls if call.collective_id is None]
    assert len(database.collectives) > 20  # which all ranks have started
    assert {call.global_rank for call in unmatched} == {
        1
    }  # the first rank waits in another transfer


FAILURES = {
    "abort_together": set(),
    "abort_one_after_the_other": {"abort"},
    "destroy_in_use": {"abort"},
}


@pytest.mark.parametrize(("program", "kinds"), FAILURES.items(), ids=FAILURES)
def test_how_communicators_end(fake_gpu, program, kinds):
    fake_gpu.run(f"fake_cuda.fake_failures:{program}", world=2, fails=bool(kinds))
    assert fake_gpu.kinds() - {"wait"} == kinds, fake_gpu.reports


# ------------------------------------------------------------------------------------ slow devices

PACED = {
    **SMALL,
    **PLAIN,
    "run__device": "cuda",
    "train__microbatch": 1,
    "train__steps": 21,
    "train__eval_every": 0,
    "faults__straggler_factor": 1.5,
}


@pytest.mark.parametrize(
    ("pace", "expected"),
    [
        pytest.param((1e3, 5e3, 1e3, 20e3), {"1"}, id="device"),
        pytest.param((1e3, 5e3, 4e3, 5e3), set(), id="hidden-host"),
        pytest.param((1e3, 5e3, 40e3, 5e3), {"1"}, id="host", marks=pytest.mark.slow),
    ],
)
def test_a_slow_device_is_named_and_not_a_host_that_its_device_hides(
    fake_gpu, overrides, pace, expected
):
    """pace: nanoseconds in which the host launches and the device runs a piece of work, of the
    first rank and of the second."""
    words = [*map(str, pace), *overrides(**PACED)]
    output = fake_gpu.run("fake_cuda.fake_failures:pretrain_at_a_pace", *words, world=2)
    pattern = r"rank (\d) is slow: [\d.]+ s of [FB] per step on its device, .* launched it in"
    assert {*re.findall(pattern, output)} == expected, output


# ------------------------------------------------------------------------------------- the doctor

DOCTOR = ["settings", "links", "rings", "collectives", "abort"]
COMPARED = ["layout: context, ring", "layout: pipeline, zb-v"]


@pytest.mark.parametrize("names", [DOCTOR, pytest.param(COMPARED, marks=pytest.mark.slow)])
def test_the_doctor_finds_that_ranks_work_together(fake_gpu, tmp_path, names):
    fake_gpu.run("fake_cuda.fake_failures:doctor", str(tmp_path), *names, world=2)
    for rank in (0, 1):
        lines = map(json.loads, (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines())
        result_lines = [line for line in lines if "what" in line]
        assert {line["part"] for line in result_lines} == {*names}
        assert not [line for line in result_lines if line["right"] is False]
    assert fake_gpu.kinds() <= {"wait"}, fake_gpu.reports
