"""Steps of a MetricsLogger without a trainer."""

from __future__ import annotations

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import MetricsLogger
from megaframe.model.model_chunk import list_model_specs


def make(folder, start=0, **metrics):
    config = RunConfig.model_validate(
        {
            "run": {"dir": str(folder), "device": "cpu"},
            "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 97},
            "train": {"steps": 9, "seq": 16, "recompute": "full"},
            "metrics": {"peak_tflops": 0.5, **metrics},
        }
    )
    return config, MetricsLogger(
        config,
        Mesh(Layout(), device="cpu"),
        list_model_specs(config.model, config.train),
        start_step=start,
    )


def step(logger, number):
    logger.start_step()
    with logger.time("compute"), logger.time("data"):
        sum(range(1000))
    logger.record("loss", 5.0)
    logger.record("tokens", 128)
    logger.record("traffic_bytes/data", number, "sum")
    logger.flush(number)
