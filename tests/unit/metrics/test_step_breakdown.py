"""Real ranks with artificial delays: the time shows in the part that was delayed and in no other.

An artificial clock advances by nothing but these delays, so a busy machine adds no time. Where a
rank waits for another one, its clock goes on to what the other's clock showed.
"""

import json
from functools import partial
from itertools import islice
from statistics import median
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from entry_runs import run_prepared

from megaframe.data.loader import Loader
from megaframe.distributed.collectives import Pending
from megaframe.distributed.mesh import read_global_rank
from megaframe.metrics import MetricsLogger, StepTimer, link_latency
from megaframe.metrics.timers import TransferTimer
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


class CommonClock(OwnClock):
    """A clock that goes on, in a wait, to the time at which what is waited for is there: the time
    of the last rank of a collective or of the sender of a message, whose receiver then waits for
    `latency` seconds more."""

    def __init__(self, patch, latency=0.0):
        self.now, self._latency = 0, round(latency * 1e9)
        # As a GPU's clock, by which every transfer may be late.
        patch.setattr(
            StepTimer,
            "make_for_device",
            lambda device: StepTimer(self, lambda start, end: end - start),
        )
        seconds = SimpleNamespace(perf_counter=lambda: self() / 1e9)
        patch.setattr(link_latency, "time", seconds)
        wait, isend, irecv = Pending._wait_for_all, dist.isend, dist.irecv
        patch.setattr(Pending, "_wait_for_all", lambda it: (self._meet(it), wait(it)))
        patch.setattr(dist, "isend", lambda *args, **kwargs: self._send(isend, *args, **kwargs))
        patch.setattr(dist, "irecv", lambda *args, **kwargs: self._receive(irecv, *args, **kwargs))

    def _meet(self, pending):
        """Go on to the time of the last rank of a collective that steps are charged with."""
        timed = isinstance(pending._timer, TransferTimer) and pending._work is not None
        if timed and pending._kind not in ("send", "receive"):
            latest = torch.tensor(self.now)
            dist.all_reduce(latest, dist.ReduceOp.MAX, group=pending._group.handle)
            self.now = int(latest)

    def _send(self, isend, *args, **kwargs):
        """Send a message, and after it the time."""
        work = isend(*args, **kwargs)
        isend(torch.tensor(self.now), **kwargs).wait()
        return work

    def _receive(self, irecv, *args, **kwargs):
        now = torch.tensor(0)
        return TimedMessage(self, irecv(*args, **kwargs), irecv(now, **kwargs), now)

    def go_on_to(self, sent):
        self.now = max(self.now, sent) + self._latency


class TimedMessage:
    """A message that is received, and after it the time at which it was sent."""

    def __init__(self, clock, work, work_of_time, sent):
        self._clock, self._works, self._sent = clock, (work, work_of_time), sent

    def wait(self):
        for work in self._works:
            work.wait()
        self._clock.go_on_to(int(self._sent))

    def is_completed(self):
        return all(work.is_completed() for work in self._works)


class Delays:
    """From step FIRST on, delays the first call of one place per step, each step another place."""

    def __init__(self, patch):
        self.clock, self.step, self.left = OwnClock(patch), 1, False
        for number, (part, (owner, name)) in enumerate(PLACES.items()):
            axes = part.removeprefix("communication/") if owner is Pending else None
            patch.setattr(owner, name, self.delayed(getattr(owner, name), FIRST + number, axes))
        flush = MetricsLogger.flush
        patch.setattr(
            MetricsLogger, "flush", lambda logger, step: self.next(partial(flush, logger), step)
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


def read(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]


@pytest.mark.slow
def test_a_delay_shows_in_its_part_and_in_no_other(pool, overrides, tmp_path):
    keys = overrides(
        train__steps=LAST + 1,
        train__eval_every=1,
        train__eval_samples=4,
        checkpoint__every=1,
        parallel__tensor=2,
        metrics__ranks_every=2,
    )
    pool.run(4, run_prepared, keys, Delays)
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
    keys = overrides(train__steps=4, parallel__tensor=2, metrics__ranks_every=2)
    pool.run(4, run_prepared, keys, delay_rank)
    lines = read(tmp_path)
    assert ["ranks" in line for line in lines] == [False, True] * 2
    for line in lines[1::2]:
        rows = line["ranks"]
        for part, mean in line["time"].items():
            assert len(rows[part]) == 4
            assert sum(rows[part]) / 4 == pytest.approx(mean, abs=1e-6)
            assert (min(rows[part]), max(rows[part])) == pytest.approx(
                (line["time_min"][part], line["time_max"][part]), abs=1e-6
            )
        assert line["bytes"]["tensor"] > 0 and line["bandwidth"]["tensor"] > 0
        check_late_rank_is_charged(line)


def check_late_rank_is_charged(line):
    """The waits of the others are charged to the late rank, not to the network."""
    late_by = pytest.approx(0.75 * DELAY, rel=0.02)
    waits = [lost for cause, lost in line["lost"].items() if cause.startswith("communication/")]
    assert line["stragglers"] == late_by
    assert line["lost"]["stragglers"] * line["seconds"] == late_by
    assert sum(waits) * line["seconds"] < 0.02 * DELAY


def delay_rank(patch):
    clock = CommonClock(patch)
    if read_global_rank() == 2:
        slow_down(patch, clock, TrainStep, "train", DELAY)


def slow_down(patch, clock, owner, name, seconds):
    plain = getattr(owner, name)

    def call(*args, **kwargs):
        clock.delay(seconds)
        return plain(*args, **kwargs)

    patch.setattr(owner, name, call)


LATENCY = 0.06


def delay_link(patch):
    CommonClock(patch, LATENCY)


def delay_stage(patch):
    clock = CommonClock(patch)
    if read_global_rank() == 0:
        slow_down(patch, clock, Stage, "forward", LATENCY)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [delay_link, delay_stage])
def test_a_wait_for_a_neighbour_is_bubble_and_for_a_slow_link_communication(
    prepare, pool, overrides, tmp_path
):
    keys = {"train__microbatch": 2, "parallel__pipeline": 2, "metrics__ranks_every": 1}
    pool.run(2, run_prepared, overrides(train__steps=6, **keys), prepare)
    for line in read(tmp_path)[2:]:
        check_told_apart(line, prepare)
        bubble = line["ranks"]["bubble"][1]
        assert line["stages"]["bubble"][1] == pytest.approx(bubble, abs=1e-6)


def check_told_apart(line, prepare):
    """The second stage's wait for four microbatches is charged to its cause: to communication for
    a slow link, to the bubble for a slow first stage."""
    delay = 4 * LATENCY
    bubble, moving = (line["ranks"][part][1] for part in ("bubble", "communication/pipeline"))
    if prepare is delay_link:
        assert moving > 0.9 * delay and bubble < 0.5 * delay
    else:
        first, second = line["ranks"]["compute"]
        assert bubble > 0.9 * delay and moving < 0.5 * delay and first > 0.9 * delay > 2 * second
