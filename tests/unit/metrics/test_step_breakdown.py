"""Real ranks with artificial delays: the time shows in the part that was delayed and in no other.

If a rank delays itself, an artificial clock advances by nothing else, so a busy machine adds no
time. Waits between ranks take real time, which a busy machine lengthens in some steps. Such a test
passes if all values are right in any one step; wrong code has no such step.
"""

import json
import time
from functools import partial
from itertools import islice
from statistics import median

import pytest
import torch.distributed as dist
from entry_runs import make_trainer

from megaframe.config import load
from megaframe.data.loader import Loader
from megaframe.distributed.collectives import Pending
from megaframe.distributed.mesh import read_global_rank
from megaframe.metrics import MetricsLogger, StepTimer
from megaframe.optim.optimizer import Optimizer
from megaframe.pipeline_parallel.stage import Stage
from megaframe.training.train_step import TrainStep
from megaframe.training.trainer import Trainer

DELAY, FIRST = 0.25, 3
PLACES = {
    "compute": (TrainStep, "train"),
    "optimizer": (Optimizer, "update"),
    "data": (Loader, "next"),
    "evaluation": (TrainStep, "evaluate"),
    "checkpoint": (Trainer, "_save"),
    "other": (Trainer, "_is_due"),
    "communication/data": (Pending, "_wait_for_all"),
    "communication/tensor": (Pending, "_wait_for_all"),
}
LAST = FIRST + len(PLACES)


class OwnClock:
    """A clock in nanoseconds that advances only by TICK per reading and by explicit delays."""

    TICK = 10_000

    def __init__(self, patch):
        self.now = 0
        patch.setattr(StepTimer, "make_for_device", lambda device: StepTimer(self))

    def __call__(self):
        self.now += self.TICK
        return self.now

    def delay(self, seconds):
        self.now += round(seconds * 1e9)


class Delays:
    """From step FIRST on, delays the first call of one place per step, each step another place."""

    def __init__(self, patch):
        self.clock, self.step, self.left = OwnClock(patch), 1, False
        for number, (part, (owner, name)) in enumerate(PLACES.items()):
            axes = part.removeprefix("communication/") if owner is Pending else None
            patch.setattr(owner, name, self.delayed(getattr(owner, name), FIRST + number, axes))
        flush = MetricsLogger.flush
        patch.setattr(
            MetricsLogger, "flush", lambda meter, step: self.next(partial(flush, meter), step)
        )

    def next(self, flush, step):
        known = flush(step)
        self.step, self.left = step + 1, True
        return known

    def delayed(self, plain, step, axes):
        def call(it, *args, **kwargs):
            applies = axes is None or getattr(it._timer, "_axes", None) == axes
            if applies and self.left and self.step == step:
                self.left = False
                self.clock.delay(DELAY)
            return plain(it, *args, **kwargs)

        return call


def run(overrides, prepare):
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        trainer = make_trainer(load(None, overrides))
        trainer.run()
    trainer.mesh.close()


def read(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]


def test_a_delay_shows_in_its_part_and_in_no_other(pool, overrides, tmp_path):
    keys = overrides(
        train__steps=LAST + 1,
        train__eval_every=1,
        train__eval_samples=4,
        checkpoint__every=1,
        parallel__tensor=2,
        meter__ranks_every=2,
    )
    pool.run(4, run, keys, Delays)
    lines = read(tmp_path)
    usual = {part: median(line["time"][part] for line in lines[2:]) for part in lines[0]["time"]}
    assert {*PLACES, "bubble"} <= usual.keys()
    for line in lines:
        assert sum(line["time"].values()) == pytest.approx(line["seconds"], rel=1e-9)
        assert line["mfu"] + sum(line["lost"].values()) == pytest.approx(1, abs=1e-9)
    for part, line in zip(PLACES, islice(lines, FIRST - 1, None), strict=False):
        changes = {name: line["time"][name] - usual[name] for name in usual}
        assert changes.pop(part) == pytest.approx(DELAY, rel=0.02), (part, line)
        assert max(changes.values()) < 0.02 * DELAY, (part, changes)
        cause = part if part != "compute" else "kernels"
        assert line["lost"][cause] * line["seconds"] > 0.9 * DELAY


def test_rows_have_every_rank_and_sum_to_the_step(pool, overrides, tmp_path):
    pool.run(
        4, run, overrides(train__steps=8, parallel__tensor=2, meter__ranks_every=2), delay_rank
    )
    lines = read(tmp_path)
    assert ["ranks" in line for line in lines] == [False, True] * 4
    for line in lines[1::2]:
        rows = line["ranks"]
        for part, mean in line["time"].items():
            assert len(rows[part]) == 4
            assert sum(rows[part]) / 4 == pytest.approx(mean, abs=1e-6)
            assert (min(rows[part]), max(rows[part])) == pytest.approx(
                (line["time_min"][part], line["time_max"][part]), abs=1e-6
            )
        assert line["bytes"]["tensor"] > 0 and line["bandwidth"]["tensor"] > 0
    assert any(map(is_late_rank_charged, lines[1::2])), lines


def is_late_rank_charged(line):
    """Return whether the waits of the others are charged to the late rank, not to the network."""
    late_by = pytest.approx(0.75 * DELAY, rel=0.3)
    waits = [lost for cause, lost in line["lost"].items() if cause.startswith("communication/")]
    return (
        line["stragglers"] == late_by
        and line["lost"]["stragglers"] * line["seconds"] == late_by
        and sum(waits) * line["seconds"] < 0.5 * DELAY
    )


def delay_rank(patch):
    if read_global_rank() == 2:
        slow_down(patch, TrainStep, "train", DELAY)


def slow_down(patch, owner, name, seconds):
    plain = getattr(owner, name)

    def call(*args, **kwargs):
        time.sleep(seconds)
        return plain(*args, **kwargs)

    patch.setattr(owner, name, call)


class SlowWork:
    """A transfer over a slow link: it completes `latency` seconds after its message arrived."""

    latency = 0.06

    def __init__(self, work):
        self.work, self.waited = work, False

    def wait(self):
        self.work.wait()
        if not self.waited:
            time.sleep(self.latency)
        self.waited = True

    def is_completed(self):
        return False


def delay_link(patch):
    receive = dist.irecv
    patch.setattr(dist, "irecv", lambda *args, **kwargs: SlowWork(receive(*args, **kwargs)))


def delay_stage(patch):
    if read_global_rank() == 0:
        slow_down(patch, Stage, "forward", SlowWork.latency)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [delay_link, delay_stage])
def test_a_wait_for_a_neighbour_is_bubble_and_for_a_slow_link_communication(
    prepare, pool, overrides, tmp_path
):
    pool.run(2, run, overrides(train__steps=6, parallel__pipeline=2, meter__ranks_every=1), prepare)
    lines = read(tmp_path)[2:]
    assert any(is_told_apart(line, prepare) for line in lines), lines
    for line in lines:
        bubble = line["ranks"]["bubble"][1]
        assert line["stages"]["bubble"][1] == pytest.approx(bubble, abs=1e-6)


def is_told_apart(line, prepare):
    """Return whether the second stage's wait for four microbatches is charged to its cause: to
    communication for a slow link, to the bubble for a slow first stage."""
    delay = 4 * SlowWork.latency
    bubble, moving = (line["ranks"][part][1] for part in ("bubble", "communication/pipeline"))
    if prepare is delay_link:
        return moving > 0.9 * delay and bubble < 0.5 * delay
    first, second = line["ranks"]["compute"]
    return bubble > 0.9 * delay and moving < 0.5 * delay and first > 0.9 * delay > 2 * second
