"""Real ranks, delayed on purpose: the time shows in the part that was delayed and in no other."""

import json
import time
from functools import partial
from statistics import median

import pytest
import torch.distributed as dist

from megaframe.comm import Pending
from megaframe.config import load
from megaframe.data.loader import Loader
from megaframe.layout import Layout
from megaframe.mesh import Mesh, global_rank, world_size
from megaframe.meter import Meter
from megaframe.optim.optimizer import Optimizer
from megaframe.pipeline import Pipeline
from megaframe.stage import Stage
from megaframe.trainer import Trainer

DELAY, FIRST, ROUNDS = 0.25, 3, 2
PLACES = {
    "compute": (Pipeline, "train"),
    "optimizer": (Optimizer, "update"),
    "data": (Loader, "next"),
    "evaluation": (Pipeline, "evaluate"),
    "checkpoint": (Trainer, "_save"),
    "other": (Trainer, "_due"),
    "communication/data": (Pending, "_finish"),
    "communication/tensor": (Pending, "_finish"),
}
LAST = FIRST + ROUNDS * len(PLACES)


class Delays:
    """From step FIRST on, the first call of a place in each step takes longer, one place a step,
    all of them in each of ROUNDS rounds."""

    def __init__(self, patch):
        self.step, self.left = 1, False
        for number, (part, (owner, name)) in enumerate(PLACES.items()):
            axes = part.removeprefix("communication/") if owner is Pending else None
            patch.setattr(owner, name, self.delayed(getattr(owner, name), FIRST + number, axes))
        flush = Meter.flush
        patch.setattr(Meter, "flush", lambda meter, step: self.next(partial(flush, meter), step))

    def next(self, flush, step):
        known = flush(step)
        self.step, self.left = step + 1, True
        return known

    def delayed(self, plain, step, axes):
        def call(it, *args, **kwargs):
            here = axes is None or getattr(it._waits, "_axes", None) == axes
            if here and self.left and self.step in range(step, LAST, len(PLACES)):
                self.left = False
                time.sleep(DELAY)
            return plain(it, *args, **kwargs)

        return call


def run(overrides, prepare):
    config = load(None, overrides)
    mesh = Mesh(Layout.from_parallel(config.parallel, world_size()), device="cpu", timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        Trainer(config, mesh).run()
    mesh.close()


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
    for number, part in enumerate(PLACES):
        rounds = lines[FIRST + number - 1 : LAST - 1 : len(PLACES)]
        # What a busy machine adds somewhere is not in both rounds.
        more = {n: min(line["time"][n] for line in rounds) - usual[n] for n in usual}
        # Of a wait that is longer some was waited before, for ranks that are not quite as fast.
        assert more.pop(part) > 0.7 * DELAY, (part, rounds)
        assert max(more.values()) < 0.5 * DELAY, (part, more)
        cause = part if part != "compute" else "kernels"
        assert all(line["lost"][cause] * line["seconds"] > 0.9 * DELAY for line in rounds)


def test_rows_have_every_rank_and_sum_to_the_step(pool, overrides, tmp_path):
    pool.run(4, run, overrides(train__steps=4, parallel__tensor=2, meter__ranks_every=2), late)
    lines = read(tmp_path)
    assert ["ranks" in line for line in lines] == [False, True, False, True]
    for line in lines[1::2]:
        rows = line["ranks"]
        for part, mean in line["time"].items():
            assert len(rows[part]) == 4
            assert sum(rows[part]) / 4 == pytest.approx(mean, abs=1e-6)
            assert (min(rows[part]), max(rows[part])) == pytest.approx(
                (line["time_min"][part], line["time_max"][part]), abs=1e-6
            )
    line = lines[3]
    assert line["bytes"]["tensor"] > 0 and line["bandwidth"]["tensor"] > 0
    # One rank of four is late: the others wait for it, and no network is to blame.
    late_by = 0.75 * DELAY
    assert line["stragglers"] == pytest.approx(late_by, rel=0.3)
    assert line["lost"]["stragglers"] * line["seconds"] == pytest.approx(late_by, rel=0.3)
    waits = [lost for cause, lost in line["lost"].items() if cause.startswith("communication/")]
    assert sum(waits) * line["seconds"] < 0.5 * DELAY


def late(patch):
    if global_rank() == 2:
        slower(patch, Pipeline, "train", DELAY)


def slower(patch, owner, name, seconds):
    plain = getattr(owner, name)

    def call(*args, **kwargs):
        time.sleep(seconds)
        return plain(*args, **kwargs)

    patch.setattr(owner, name, call)


class SlowWork:
    """A link on which what was sent is there LATENCY after it arrived."""

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


def slow_link(patch):
    receive = dist.irecv
    patch.setattr(dist, "irecv", lambda *args, **kwargs: SlowWork(receive(*args, **kwargs)))


def slow_stage(patch):
    if global_rank() == 0:
        slower(patch, Stage, "forward", SlowWork.latency)


@pytest.mark.parametrize("prepare", [slow_link, slow_stage])
def test_a_wait_for_a_neighbour_is_bubble_and_for_a_slow_link_communication(
    prepare, pool, overrides, tmp_path
):
    pool.run(2, run, overrides(train__steps=3, parallel__pipeline=2, meter__ranks_every=1), prepare)
    line = read(tmp_path)[-1]
    # The second stage waits for four microbatches of the first one.
    delay = 4 * SlowWork.latency
    bubble, moving = (line["ranks"][part][1] for part in ("bubble", "communication/pipeline"))
    wanted, other = (moving, bubble) if prepare is slow_link else (bubble, moving)
    assert 0.9 * delay < wanted and other < 0.5 * delay, line["ranks"]
    if prepare is slow_stage:
        assert line["ranks"]["compute"][0] > 0.9 * delay > 2 * line["ranks"]["compute"][1]
        assert line["stages"]["bubble"][1] == pytest.approx(bubble, abs=1e-6)
