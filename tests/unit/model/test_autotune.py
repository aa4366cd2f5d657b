"""The routines of a CPU: chosen by measurement, once, for all ranks, and kept by resumed runs.

Tests `megaframe.metrics.environment`.
"""

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bitwise import assert_same_losses
from entry_runs import make_trainer, read_losses

from megaframe.config import RunSection, TrainConfig, load
from megaframe.config.schema import KernelsConfig
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.model import autotune
from megaframe.model.autotune import (
    RoutineChoice,
    describe_machine,
    find_fastest,
    load_or_measure,
    make_named_routines,
    read_waiting_seconds,
    tune,
)
from megaframe.ops import cpu_attention, matmul
from megaframe.ops.cpu_routines import CPURoutines

FP32 = torch.float32
TORCH = make_named_routines(FP32, "torch")
OTHER = CPURoutines(
    type=str(FP32),
    products={kind: matmul.list_libraries(FP32)[-1] for kind in matmul.KINDS},
    attention={"short": "blocks", "long": "fused"},
)
"""What no rule chooses by itself."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Each test has a cache of its own, and leaves the routines of this process as they were."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(matmul, "_library_of", {})
    monkeypatch.setattr(cpu_attention, "_method_of", {})


@pytest.fixture
def clock(monkeypatch):
    """A clock that only work advances, and the work: work(seconds by candidate) for
    `find_fastest`."""
    time_now = [0.0]
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: time_now[0]))
    monkeypatch.setattr(autotune, "read_waiting_seconds", lambda: 0.0)

    def work(seconds, calls):
        def prepare(name, small):
            def run():
                calls.append((name, small))
                time_now[0] += seconds[name] / (10 if small else 1)

            return run

        return prepare

    return SimpleNamespace(now=time_now, work=work)


def choose(recorded=None, mesh=None, precision="fp32", library="auto", **run):
    """Call `tune` for a run on the CPU."""
    sections = RunSection(device="cpu", **run), TrainConfig(precision=precision)
    return tune(*sections, KernelsConfig(matmul=library), recorded, mesh)


def find_cache():
    return autotune.find_cache_file(describe_machine(FP32))


def write_cache(routines, **changes):
    find_cache().parent.mkdir(parents=True, exist_ok=True)
    machine = {**describe_machine(FP32), **changes}
    find_cache().write_text(json.dumps({"machine": machine, "routines": routines.model_dump()}))


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"a": 2.0, "b": 1.0, "c": 1.5}, "b"),
        ({"a": 1.0, "b": 0.99, "c": 1.0}, "a"),  # as good as equal: torch's own
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c"),
        ({"a": 9.0, "b": 1.0, "c": 9.0}, "b"),
    ],
)
def test_the_fastest_is_chosen(seconds, chosen, clock):
    calls = []
    assert find_fastest(tuple(seconds), clock.work(seconds, calls), 1000.0, "a") == chosen
    hopeless = {name for name in seconds if seconds[name] > 2 * min(seconds.values())}
    assert hopeless.isdisjoint(name for name, small in calls if not small)


def test_measuring_ends_in_time(clock):
    """Nothing starts after the end but the second of two rounds, and without any time left nothing
    is measured."""
    calls, seconds = [], {"a": 1.0, "b": 1.0}
    find_fastest(("a", "b"), clock.work(seconds, calls), 10.0, "b")
    assert clock.now[0] < 10.0 + 2 * sum(seconds.values())
    calls.clear()
    assert find_fastest(("a", "b"), clock.work(seconds, calls), 0.0, "b") == "b" and not calls


def test_a_measurement_names_routines_that_this_machine_has(monkeypatch):
    """All kinds are measured, and what was in use before is in use again."""
    monkeypatch.setattr(autotune, "read_waiting_seconds", lambda: 0.0)  # whatever else runs here
    for dtype in (FP32, torch.bfloat16, torch.float16):
        matmul.use_libraries(dtype, {"dense": "torch"})
        before = matmul.get_libraries_in_use(dtype), cpu_attention.get_methods_in_use(dtype)
        routines = autotune.measure(dtype)
        assert routines.is_available(dtype)
        assert tuple(routines.products) == matmul.KINDS
        assert tuple(routines.attention) == cpu_attention.SIZES
        assert set(routines.attention.values()) <= set(cpu_attention.list_methods(dtype))
        assert (
            matmul.get_libraries_in_use(dtype),
            cpu_attention.get_methods_in_use(dtype),
        ) == before


def test_a_measurement_is_made_once(clock, monkeypatch):
    measured = []
    monkeypatch.setattr(autotune, "measure", lambda dtype: measured.append(dtype) or OTHER)
    monkeypatch.setattr(autotune, "describe_machine", lambda dtype: {"type": str(dtype)})
    for _ in range(2):
        assert load_or_measure(FP32)[0] == OTHER
    assert measured == [FP32]
    load_or_measure(torch.bfloat16)
    assert measured == [FP32, torch.bfloat16]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"machine": {"pro',
        b"\x00" * 100,
        b"[]",
        b'{"machine": {}, "routines": {"products": {"dense": "rm -rf"}}}',
        b" " * (1 << 20),
    ],
)
def test_a_damaged_cache_is_made_anew(content, clock, monkeypatch):
    find_cache().parent.mkdir(parents=True)
    find_cache().write_bytes(content)
    monkeypatch.setattr(autotune, "measure", lambda dtype: OTHER)
    routines, why, _ = load_or_measure(FP32)
    assert routines == OTHER and why.startswith("measured in")
    assert autotune.read_cache(find_cache(), describe_machine(FP32)) == OTHER
    assert [path.name for path in find_cache().parent.iterdir()] == [find_cache().name]


@pytest.mark.parametrize("other", [{"threads": 999}, {"torch": "1.0"}, {"processor": "another"}])
def test_the_cache_of_another_machine_is_made_anew(other, clock, monkeypatch):
    """A folder that was copied, or a home that machines share."""
    write_cache(TORCH, **other)
    monkeypatch.setattr(autotune, "measure", lambda dtype: OTHER)
    assert load_or_measure(FP32)[0] == OTHER


def test_the_cache_of_a_version_with_fewer_kinds_is_made_anew(clock, monkeypatch):
    fewer = {kind: library for kind, library in TORCH.products.items() if kind != "gradient"}
    write_cache(TORCH.model_copy(update={"products": fewer}))
    monkeypatch.setattr(autotune, "measure", lambda dtype: OTHER)
    assert load_or_measure(FP32)[0] == OTHER


def test_the_first_process_that_writes_the_cache_decides_for_all(clock, monkeypatch):
    def measure(dtype):
        write_cache(TORCH)  # as another process, meanwhile
        return OTHER

    monkeypatch.setattr(autotune, "measure", measure)
    routines, why, is_kept = load_or_measure(FP32)
    assert routines == TORCH and is_kept
    assert why == f"kept in {find_cache()} by a run that measured at the same time"


def test_without_a_cache_runs_work(clock, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setattr(autotune, "measure", lambda dtype: OTHER)
    routines, why, is_kept = load_or_measure(FP32)
    assert routines == OTHER and not is_kept and why.endswith(f"not kept: no file {find_cache()}")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(autotune.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError()))
    routines, why, is_kept = load_or_measure(FP32)
    assert routines == OTHER and not is_kept and "no home folder" in why


def test_disturbed_calls_do_not_count(clock, monkeypatch):
    """The faster candidate is disturbed in most of its calls."""
    lost, number = [0.0], [0]

    def prepare(name, small):
        def run():
            number[0] += 1
            clock.now[0] += {"a": 1.0, "b": 0.9}[name]
            if name == "b" and number[0] % 3:
                clock.now[0] += 2.0
                lost[0] += 2.0

        return run

    monkeypatch.setattr(autotune, "read_waiting_seconds", lambda: lost[0])
    assert find_fastest(("a", "b"), prepare, 1000.0, "a") == "b"


def test_a_busy_machine_is_not_measured(clock, monkeypatch):
    """Nothing is kept either, so that the next run measures again."""
    monkeypatch.setattr(autotune, "read_waiting_seconds", lambda: 0.5 * clock.now[0])
    seconds = {"a": 0.01, "b": 0.02}
    monkeypatch.setattr(
        autotune,
        "measure",
        lambda dtype: find_fastest(("a", "b"), clock.work(seconds, []), 1.0, "a"),
    )
    routines, (detail,), (note,) = choose()
    assert routines == TORCH and not find_cache().exists()
    why = "(torch's own, because other work keeps this machine too busy to measure any)"
    assert f"{why}: {TORCH.describe()}" in detail
    assert f"{why}: another run of this config may choose others" in note
    assert "kernels.matmul=torch gives all runs the same" in note


def test_a_run_says_what_it_uses_and_where_that_is_kept(clock, monkeypatch):
    """Two fresh runs on one machine use the same routines, unless the first says otherwise."""
    monkeypatch.setattr(autotune, "measure", lambda dtype: OTHER)
    (first, notes), (second, more) = (choose()[1:] for _ in range(2))
    assert f"s, kept in {find_cache()}): {OTHER.describe()}" in first[0]
    assert f"(measured before, kept in {find_cache()}): {OTHER.describe()}" in second[0]
    assert notes == more == []


def measure_waiting():
    """Return the seconds that this process waits for its processor while three threads use it, of
    which one is another process's."""

    def spin():
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            sum(range(20_000))

    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        before, thread = read_waiting_seconds(), threading.Thread(target=spin)
        thread.start()
        child = os.fork()
        spin()
        if not child:
            os._exit(0)
        waited = read_waiting_seconds() - before
        os.waitpid(child, 0)
        thread.join()
        return waited
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux says this")
def test_threads_that_have_no_processor_are_noticed(pool):
    """Two threads on one processor wait for each other; one alone need not."""
    assert pool.run(1, measure_waiting)[0] > 0.1


def test_a_key_and_deterministic_runs_fix_the_routines(monkeypatch):
    monkeypatch.setattr(autotune, "measure", None)  # is not called
    mesh = Mesh(Layout(), device="cpu")
    assert choose(None, mesh, library="torch")[0] == TORCH
    assert choose(None, mesh, deterministic=True)[0] == TORCH
    named, lines, _ = choose(OTHER, mesh, library="onednn")
    assert set(named.products.values()) == {matmul.list_libraries(FP32)[-1]}
    assert "kernels.matmul=onednn" in lines[0] and "dense onednn" in lines[0]
    assert matmul.get_libraries_in_use(FP32) == named.products
    assert choose(None, mesh, "fp64") == (CPURoutines(), [], [])


@pytest.mark.parametrize("fast", [True, False])
def test_narrow_types_are_never_left_to_a_slow_routine(fast, monkeypatch):
    """torch multiplies bf16 and fp16 element by element on processors without such instructions."""
    narrow = (torch.bfloat16, torch.float16)
    multiplies = matmul.has_fast_matmul
    monkeypatch.setattr(matmul, "has_fast_matmul", lambda x: fast if x in narrow else multiplies(x))
    for dtype in narrow:
        assert ("torch" in matmul.list_libraries(dtype)) == fast
        for library in ("torch", "onednn"):
            (routine,) = set(make_named_routines(dtype, library).products.values())
            assert (routine == "torch") == fast
            if library == "onednn" and not fast and matmul._ONEDNN:
                assert routine == "fp32-onednn"


def choose_on_a_rank(folder):
    """Return what this rank uses if its own measurement would say something else on each rank."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    mesh = Mesh(Layout(data=2), device="cpu")
    own_routines = OTHER if mesh.rank == 0 else TORCH
    autotune.load_or_measure, original = (
        lambda dtype: RoutineChoice(own_routines, ""),
        autotune.load_or_measure,
    )
    try:
        return choose(None, mesh)[0], matmul.get_libraries_in_use(FP32)
    finally:
        autotune.load_or_measure = original
        matmul.use_libraries(FP32, {})
        cpu_attention.use_methods(FP32, {})
        mesh.close()


def test_all_ranks_use_what_the_first_rank_chose(pool, tmp_path):
    for routines, in_use in pool.run(2, choose_on_a_rank, tmp_path):
        assert routines == OTHER and in_use == OTHER.products


def train(overrides):
    """Train in this process. Returns the run's log and the losses of its steps."""
    config = load(None, overrides)
    make_trainer(config).run()
    folder = Path(config.run.dir)
    return (folder / "run.log").read_text(), read_losses(folder)


def test_a_resumed_run_keeps_its_routines(overrides, tmp_path):
    """It is bitwise the uninterrupted one, although the cache says otherwise by then. The routines
    are in the log, in the record of the environment and in the checkpoint."""
    write_cache(OTHER)
    keys = {"kernels__matmul": "auto", "train__precision": "fp32", "checkpoint__every": 4}
    shape = {"model__hidden": 64, "optim__schedule": "constant"}
    log, uninterrupted = train(overrides(run__dir=tmp_path / "whole", **keys, **shape))
    assert f"(measured before, kept in {find_cache()}): {OTHER.describe()}" in log
    train(overrides(train__steps=4, **keys, **shape))
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["matrix products"] == OTHER.products
    write_cache(TORCH)
    log, losses = train(overrides(checkpoint__resume="latest", **keys, **shape))
    assert f"(as the checkpoint records): {OTHER.describe()}" in log
    assert_same_losses(losses, uninterrupted, because="the checkpoint names the routines")
    # The routines make a difference that this test could see.
    _, fresh = train(overrides(run__dir=tmp_path / "fresh", **keys, **shape))
    assert list(fresh) != list(uninterrupted)


def test_a_run_that_resumes_in_another_precision_chooses_anew(monkeypatch):
    def take_torch(dtype):
        return RoutineChoice(make_named_routines(dtype, "torch"), "")

    monkeypatch.setattr(autotune, "load_or_measure", take_torch)
    mesh = Mesh(Layout(), device="cpu")
    assert choose(OTHER, mesh, "bf16")[0] == make_named_routines(torch.bfloat16, "torch")
    assert choose(CPURoutines(), mesh)[0] == TORCH  # of a GPU, or an older version
