"""Steps of a MetricsLogger without a trainer."""

from __future__ import annotations

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import MetricsLogger
from megaframe.model.model_chunk import list_model_specs


def make(folder, start=0, **meter):
    config = RunConfig.model_validate(
        {
            "run": {"dir": str(folder), "device": "cpu"},
            "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 97},
            "train": {"steps": 9, "seq": 16, "recompute": "full"},
            "meter": {"peak_tflops": 0.5, **meter},
        }
    )
    return config, MetricsLogger(
        config, Mesh(Layout(), device="cpu"), list_model_specs(config), start_step=start
    )


def step(meter, number):
    meter.start_step()
    with meter.time("compute"), meter.time("data"):
        sum(range(1000))
    meter.record("loss", 5.0)
    meter.record("tokens", 128)
    meter.record("traffic_bytes/data", number, "sum")
    meter.flush(number)
