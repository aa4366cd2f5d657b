"""The content of the page: the panels, and the numbers of each run for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaframe.dashboard.downsample import (
    Floats,
    compute_bucket_means,
    find_bucket_extremes,
    list_bucket_starts,
    round_values,
)
from megaframe.dashboard.rows import build_bars, build_heatmaps
from megaframe.dashboard.run_folder import RunFolder, compare_configs, flatten_config, make_showable
from megaframe.errors import UserError
from megaframe.io.untrusted import parse_json, read_file, sanitize_text

POINTS = 800
"""Maximum number of steps of a run that a page shows; more are thinned out."""
_EVENTS = 200
_LARGEST = 1 << 20
"""Bytes of the largest file of a prediction."""
_RATES = ("mfu", "mfu_full_attention", "hfu", "tflops_per_second", "tokens_per_second")
COMMUNICATION = "communication/"


@dataclass(frozen=True)
class Panel:
    """A panel of the page.

    Attributes:
        kind: Lines, bars, waterfall or heat.
        keys: Metrics drawn as lines; a key that ends with a slash stands for all metrics with this
            prefix.
        scale: Factor on values.
    """

    id: str
    title: str
    kind: str
    keys: tuple[str, ...] = ()
    unit: str = ""
    scale: float = 1.0
    help: str = ""
    log: bool = False


PANELS = (
    Panel(
        "waterfall", "Where the peak went", "waterfall", unit="% of peak",
        help="From 100% of the devices' peak down to the MFU: each bar is what one cause costs.",
    ),
    Panel("loss", "Loss", "lines", ("loss", "mtp_loss"), "nats per token"),
    Panel("evaluation", "Evaluation", "lines", ("eval_loss", "eval_bits_per_byte"), "nats; bits"),
    Panel("evaluation_sources", "Evaluation by source", "lines", ("eval_losses/",), "nats"),
    Panel("lr", "Learning rate", "lines", ("lr",)),
    Panel("grad_norm", "Gradient norm", "lines", ("grad_norm",), log=True),
    Panel("tokens", "Tokens per second", "lines", ("tokens_per_second",), "tokens/s"),
    Panel("tflops", "TFLOP/s per device", "lines", ("tflops_per_second",), "TFLOP/s"),
    Panel(
        "mfu", "MFU and HFU", "lines", ("mfu", "hfu", "mfu_full_attention"), "% of peak", 100.0,
        "HFU counts what recompute does again; full attention counts the half that causal "
        "attention leaves out.",
    ),
    Panel(
        "time", "Time of a step", "lines", ("time/",), "ms", 1000.0,
        "The parts of a step sum to it; communication is only what nothing overlapped.",
    ),
    Panel(
        "stragglers", "Ranks: work beyond the median", "heat", unit="%",
        help="How much longer than the median of its step each rank worked, waits not counted.",
    ),
    Panel("stages", "Work and bubble by pipeline rank", "bars", unit="ms a step"),
    Panel("memory", "Peak memory", "lines", ("memory_bytes",), "GiB", 2.0**-30),
    Panel(
        "allocator", "Memory of a GPU's allocator", "lines", ("allocator/",), "GiB", 2.0**-30,
        "Reserved is what it took from the GPU; fragmented is what of it lay in pieces that it "
        "could neither use nor return. Both are peak values.",
    ),
    Panel("memory_ranks", "Memory by kind and rank", "bars", unit="GiB"),
    Panel("bytes", "Sent by a rank in a step", "lines", ("bytes/",), "MiB", 2.0**-20),
    Panel("bandwidth", "Bandwidth where something waited", "lines", ("bandwidth/",), "GB/s", 1e-9),
    Panel(
        "experts", "Load of experts", "heat", unit="of the mean",
        help="Tokens of each expert over the mean of its layer, at the last step that has them.",
    ),
    Panel("expert_load", "Most loaded expert by layer", "heat", unit="of the mean"),
    Panel("sources", "Data sources", "bars", unit="samples"),
)  # fmt: skip


def build_page_data(
    runs: Sequence[RunFolder], prediction: Mapping[str, Any] | None = None, points: int = POINTS
) -> dict[str, Any]:
    """Return everything that the page shows, ready for JSON.

    Args:
        runs: The runs of the page.
        prediction: A predicted step, as `read_prediction` returns it.
        points: The most points of a line.
    """
    names = _make_unique_names([run.name for run in runs])
    with np.errstate(all="ignore"):  # any numbers may be in a file
        run_data = [
            build_run_data(run, name, points) for run, name in zip(runs, names, strict=True)
        ]
    return {
        "runs": run_data,
        "panels": [asdict(panel) for panel in PANELS],
        "differences": compare_configs([run.config for run in runs]) if len(runs) > 1 else [],
        "prediction": [*_build_predicted_waterfall(prediction)] if prediction else [],
    }


def build_run_data(run: RunFolder, name: str, points: int) -> dict[str, Any]:
    """Return one run's part of `build_page_data`.

    Args:
        run: The run.
        name: Its name on the page.
        points: The most points of a line.
    """
    metrics = run.metrics
    starts = list_bucket_starts(len(metrics), points)
    seconds = metrics.get_column("seconds")
    ends = np.append(starts[1:], len(metrics)) - 1 if len(starts) else starts
    tokens = np.nan_to_num(metrics.get_column("tokens")).cumsum()
    hours = np.nan_to_num(seconds).cumsum() / 3600
    axes = {"step": metrics.get_column("step"), "tokens": tokens, "hours": hours}
    return {
        "name": name,
        "folder": sanitize_text(str(run.folder)),
        "steps": len(metrics),
        "notes": run.notes,
        "summary": summarize_run(run),
        "x": {axis: round_values(values[ends], 9) for axis, values in axes.items()},
        "series": _build_series(run, starts, seconds),
        "events": _build_events(run, axes),
        "waterfall": _build_waterfall(compute_mean_losses(run)),
        "bars": build_bars(run),
        "heat": build_heatmaps(run, axes, points),
        "config": [list(row) for row in flatten_config(run.config)],
        "environment": [list(row) for row in flatten_config(run.environment)],
    }


def compute_mean_losses(run: RunFolder) -> dict[str, float]:
    """Return the share of the peak by cause, and `mfu` last if it is known, over all steps but the
    first, which includes warm-up."""
    weights = run.metrics.get_column("seconds").copy()
    if len(weights) > 1:
        weights[0] = 0.0
    single_bucket = np.zeros(min(1, len(weights)), dtype=np.int64)
    names = [name for name in run.metrics.list_names() if name.startswith("lost/")]
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
    memory = np.nan_to_num(metrics.get_column("memory_bytes")).max() / 2**30
    rows = [
        ("steps", f"{metrics.get_column('step')[0]:,.0f} to {metrics.get_column('step')[-1]:,.0f}"),
        ("tokens", f"{tokens:,.0f}"),
        ("hours", f"{total / 3600:,.3g}"),
        ("loss", _format_value(get_last("loss"), ".4f")),
        (
            "best validation loss",
            _format_value(float(np.nanmin(best)), ".4f") if _has_values(best) else "n/a",
        ),
        ("tokens/s", _format_value(tokens / total if total else math.nan, ",.0f")),
        ("TFLOP/s per device", _format_value(compute_rate("tflops_per_second"), ".4g")),
        ("MFU", _format_value(compute_rate("mfu"), ".1%")),
        ("HFU", _format_value(compute_rate("hfu"), ".1%")),
        ("peak memory of a rank", f"{memory:.3g} GiB"),
    ]
    return [list(row) for row in rows]


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


def _build_predicted_waterfall(prediction: Mapping[str, Any]) -> tuple[str, list[list[Any]]]:
    """Return the name of the prediction, and its waterfall."""
    of = f" for {prediction['cluster']}" if "cluster" in prediction else ""
    return f"predicted{of}", _build_waterfall(compute_predicted_losses(prediction))


def label_cause(cause: str) -> str:
    """Return the text that is shown for a cause of a loss."""
    named = {"kernels": "kernels below peak", "mfu": "MFU"}.get(cause, cause)
    return named.replace(COMMUNICATION, "waits: ").replace("+", " + ")


def _build_waterfall(lost: Mapping[str, float]) -> list[list[Any]]:
    """Return rows of cause, label and share."""
    return [
        [cause, label_cause(cause), round_values([share], 6)[0]] for cause, share in lost.items()
    ]


def _format_value(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "n/a"


def _has_values(values: Floats) -> bool:
    return bool(np.isfinite(values).any())


def _make_unique_names(names: Sequence[str]) -> list[str]:
    """Return the names of runs, numbered where names are repeated."""
    counts: dict[str, int] = {}
    unique_names = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique_names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return unique_names


def _build_series(run: RunFolder, starts: Any, seconds: Floats) -> dict[str, dict[str, Any]]:
    """Return by metric the means of buckets and, if steps were thinned out, also the extremes."""
    series = {}
    for name in _select_names(run.metrics.list_names()):
        values = run.metrics.get_column(name)
        if not _has_values(values) or (
            name.startswith(("time/", "bytes/")) and not np.nan_to_num(values).any()
        ):
            continue  # fmt: skip
        weights = seconds if name in _RATES else None
        series[name] = {"y": round_values(compute_bucket_means(values, starts, weights))}
        if len(values) > len(starts):
            low, high = find_bucket_extremes(values, starts)
            series[name] |= {"low": round_values(low), "high": round_values(high)}
    return series


def _select_names(names: Iterable[str]) -> list[str]:
    keys = [key for panel in PANELS for key in panel.keys]
    return [n for n in names if any(n.startswith(k) if k.endswith("/") else n == k for k in keys)]


def _build_events(run: RunFolder, axes: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """Return events and their places on the axes. If there are too many, restarts and skips have
    precedence over checkpoints."""
    events = list(run.list_events())
    if len(events) > _EVENTS:
        rare = [event for event in events if event.kind != "checkpoint"][:_EVENTS]
        checkpoints = [event for event in events if event.kind == "checkpoint"]
        events = rare + checkpoints[:: max(1, len(checkpoints) // max(1, _EVENTS - len(rare)))]
    steps = axes["step"]
    placed_events = []
    for event in events:
        index = min(len(steps) - 1, int(np.searchsorted(steps, event.step)))
        at = {name: round_values([values[index]], 9)[0] for name, values in axes.items()}
        placed_events.append({**at, "kind": event.kind, "text": event.text})
    return placed_events
