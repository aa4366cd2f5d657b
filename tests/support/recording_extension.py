"""An extension whose callbacks write down what they are called with, and do what their keys say;
and with a transform that masks labels."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from megaframe.extensions import Callback, CallbackPart, DataTransformPart


class RecordingConfig(CallbackPart):
    kind: Literal["recording"] = "recording"
    stop_at: int = 0
    """Step after which it asks to stop, once."""
    fail: str = ""
    """What it does wrong."""

    def make_callback(self, config):
        if self.fail == "no callback":
            return 3
        if self.fail == "make":
            raise KeyError("nothing")
        return Recording(self, Path(config.run.dir) / "calls.jsonl")


class Recording(Callback):
    """Counts steps in its state, so a step that is counted twice or not at all shows."""

    def __init__(self, part, path):
        self.part, self.path, self.steps, self.has_asked = part, path, 0, False

    def write(self, method, run, **more):
        with self.path.open("a") as file:
            line = [method, run.step, run.metrics_step, run.metrics.get("loss"), more]
            file.write(json.dumps(line) + "\n")

    def before_step(self, run):
        self.write("before_step", run)

    def after_step(self, run):
        self.steps += 1
        run.record("steps", -1)
        run.record("steps", self.steps)
        self.write("after_step", run)
        if run.step == self.part.stop_at and not self.has_asked:
            self.has_asked = True
            run.stop("enough is enough")
            run.stop("not this")
        if run.step == 3 and self.part.fail:
            self.do_wrong(run)

    def do_wrong(self, run):
        if self.part.fail == "raise":
            raise ZeroDivisionError("of nothing")
        if self.part.fail == "sleep":
            time.sleep(1000)
        if self.part.fail == "name":
            run.record("a/b", 1)
        if self.part.fail == "value":
            run.record("a", "much")

    def after_evaluation(self, run, values):
        self.write("after_evaluation", run, **values)

    def after_save(self, run, step):
        self.write("after_save", run, saved=step)
        run.note(f"told of the save of step {step}")

    def state(self):
        if self.part.fail == "state":
            return {"steps": {1, 2}}
        if self.part.fail == "list":
            return [1]
        return {"steps": self.steps, "has_asked": self.has_asked}

    def load_state(self, state):
        self.steps, self.has_asked = state["steps"], state["has_asked"]


class MaskingConfig(DataTransformPart):
    kind: Literal["masking"] = "masking"
    samples: tuple[int, ...] = ()
    """Samples from each of these numbers to the next one have no label at all; without any, each
    sample lacks some."""

    def transform(self, sample, random):
        """Mask all labels of some samples, or a share that differs from sample to sample."""
        if self.samples:
            ends = zip(self.samples[::2], self.samples[1::2], strict=True)
            if not any(first <= sample.number < last for first, last in ends):
                return sample
            return replace(sample, labels=np.full_like(sample.labels, -1))
        masked = random.random(len(sample.labels)) < random.random()
        return replace(sample, labels=np.where(masked, -100, sample.labels))


def register(registry):
    registry.register(RecordingConfig)
    registry.register(MaskingConfig)
