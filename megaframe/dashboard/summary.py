"""What sums a run up: its rates, where its peak went, and what was predicted instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megaframe.config.batch_advice import BatchSettings, advise_batch
from megaframe.dashboard.downsample import Floats, compute_bucket_means, round_values
from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.dashboard.run_folder import RunFolder, get_config_value, make_showable
from megaframe.errors import UserError
from megaframe.io.untrusted import parse_json, read_file

_LARGEST = 1 << 20
"""Bytes of the largest file of a prediction."""
_MOST = 1 << 40
"""Largest number of samples or tokens, or learning rate, that is believed."""
SMOOTHED = 10
"""Steps over which a training metric is averaged; evaluation metrics are not averaged."""
COMMUNICATION = "communication/"


def compute_mean_losses(run: RunFolder) -> dict[str, float]:
    """Return the share of the peak by cause, and `mfu` last if it is known, over all steps but the
    first, which includes warm-up."""
    weights = run.metrics.get_column("seconds").copy()
    if len(weights) > 1:
        weights[0] = 0.0
    single_bucket = np.zeros(min(1, len(weights)), dtype=np.int64)
    names, _ = run.metrics.select_names("lost/")
    losses = {}
    for name in (*names, "mfu"):
        # A cause that a line does not name cost nothing in that step.
        values = run.metrics.get_column(name)
        value = compute_bucket_means(
            values if name == "mfu" else np.nan_to_num(values), single_bucket, weights
        )
        if value.size and np.isfinite(value[0]):
            losses[name.removeprefix("lost/")] = float(value[0])
    return losses if names else {}


def summarize_run(run: RunFolder) -> list[list[str]]:
    """Return rows of a name and a value, for the summary of a run."""
    metrics = run.metrics
    if not len(metrics):
        return []
    seconds = metrics.get_column("seconds")
    total = float(np.nansum(seconds))
    tokens = float(np.nansum(metrics.get_column("tokens")))

    def get_last(name: str) -> float:
        values = metrics.get_column(name)
        values = values[np.isfinite(values)]
        return float(values[-1]) if values.size else math.nan

    def compute_rate(name: str) -> float:
        return float(
            compute_bucket_means(metrics.get_column(name), np.zeros(1, dtype=np.int64), seconds)[0]
        )

    best = metrics.get_column("eval_loss")
    bits = metrics.get_column("eval_bits_per_byte")
    memory = metrics.get_column("memory_bytes") / 2**30
    rows = [
        ("steps", f"{metrics.get_column('step')[0]:,.0f} to {metrics.get_column('step')[-1]:,.0f}"),
        ("tokens", f"{tokens:,.0f}"),
        ("hours", f"{total / 3600:,.3g}"),
        ("loss", _format_value(get_last("loss"), ".4f")),
        (
            "best validation loss",
            _format_value(float(np.nanmin(best)), ".4f") if _has_values(best) else "n/a",
        ),
        *([("best bits per byte", f"{np.nanmin(bits):.4f}")] if _has_values(bits) else []),
        ("tokens/s", _format_value(tokens / total if total else math.nan, ",.0f")),
        ("TFLOP/s per device", _format_value(compute_rate("tflops_per_second"), ".4g")),
        ("MFU", _format_value(compute_rate("mfu"), ".1%")),
        ("HFU", _format_value(compute_rate("hfu"), ".1%")),
        ("peak memory of a rank", f"{np.nanmax(memory):.3g} GiB" if _has_values(memory) else "n/a"),
    ]
    return [list(row) for row in rows]


def advise_batch_of_run(run: RunFolder) -> str | None:
    """Return what the measured critical batch says about the batch and the learning rate; None if
    it was not measured, or if the folder does not say which the run had."""
    measured = run.metrics.get_column("gradient_noise/critical_batch")
    measured = measured[np.isfinite(measured) & (measured > 0)]
    keys = ("train.global_batch", "train.seq", "optim.lr")
    samples, seq, lr = (_read_number(get_config_value(run.config, key)) for key in keys)
    if not measured.size or samples is None or seq is None or lr is None:
        return None
    optimizer = str(get_config_value(run.config, "optim.name"))
    settings = BatchSettings(math.ceil(samples), math.ceil(seq), optimizer, lr)
    return advise_batch(settings, float(measured[-1]))


def _read_number(value: Any) -> float | None:
    """Return a number above 0 of a config of unknown shape; None if it is none that a run has."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < _MOST else None


def compute_outcome(metrics: MetricsFile, metric: str) -> float | None:
    """Return the last value of a metric; one of training is averaged over the last `SMOOTHED` steps
    that have it. None if there is none."""
    values = metrics.get_column(metric)
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    value = values[-1] if metric.startswith("eval") else values[-SMOOTHED:].mean()
    return round_values([value], 6)[0]


def compute_predicted_losses(prediction: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of the peak of a predicted step by cause.

    Args:
        prediction: Has `step_seconds`, `mfu` and `breakdown`: seconds by part, with exposed
            communication under the names of axes.
    """
    seconds, mfu = float(prediction["step_seconds"]), prediction.get("mfu")
    losses: dict[str, float] = {}
    for part, spent in prediction["breakdown"].items():
        axis = part in ("tensor", "context", "expert", "data", "pipeline")
        if part != "compute":
            losses[COMMUNICATION + part if axis else part] = float(spent) / seconds
    remainder = 1.0 - sum(losses.values())
    if mfu is None:
        return {"compute": remainder, **losses}
    return {"kernels": remainder - float(mfu), **losses, "mfu": float(mfu)}


def read_prediction(path: Path | None) -> dict[str, Any] | None:
    """Read a predicted step from a JSON file, as `compute_predicted_losses` takes it.

    Raises:
        UserError: If the file has none.
    """
    if path is None:
        return None
    try:
        prediction = make_showable(parse_json(read_file(path, _LARGEST)))
        if not all(map(math.isfinite, compute_predicted_losses(prediction).values())):
            raise ValueError("not finite")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        raise UserError(
            f"--prediction={path} is not a JSON object with step_seconds, mfu and breakdown"
        ) from None
    return prediction


def label_cause(cause: str) -> str:
    """Return the text that is shown for a cause of a loss."""
    named = {"kernels": "kernels below peak", "mfu": "MFU"}.get(cause, cause)
    return named.replace(COMMUNICATION, "waits: ").replace("+", " + ")


def _format_value(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "n/a"


def _has_values(values: Floats) -> bool:
    return bool(np.isfinite(values).any())
