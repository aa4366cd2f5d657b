"""The content of the page: the numbers and texts of each run for its panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megaframe.dashboard.colours import assign_colours, make_palette
from megaframe.dashboard.downsample import (
    Floats,
    compute_bucket_means,
    find_bucket_extremes,
    list_bucket_starts,
    round_values,
)
from megaframe.dashboard.find_runs import name_runs
from megaframe.dashboard.panels import PANELS, Panel
from megaframe.dashboard.rows import build_bars, build_heatmaps
from megaframe.dashboard.run_folder import RunFolder, flatten_config
from megaframe.dashboard.run_texts import read_log, read_samples
from megaframe.dashboard.summary import (
    compute_mean_losses,
    compute_outcome,
    compute_predicted_losses,
    label_cause,
    summarize_run,
)
from megaframe.io.untrusted import sanitize_text

POINTS = 800
"""Maximum number of steps of a run that a page shows; more are thinned out."""
_FEWEST_POINTS = 80
_RUNS = 8
"""Runs up to which each has its `POINTS` and its texts; more runs share what these would have."""
_LOG, _SAMPLES = 1 << 16, 1 << 18
"""Characters of a run's log and of its samples."""
_EVENTS = 200
_RATES = ("mfu", "mfu_full_attention", "hfu", "tflops_per_second", "tokens_per_second")


def build_page_data(
    runs: Sequence[RunFolder],
    prediction: Mapping[str, Any] | None = None,
    *,
    metric: str | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return everything that the page shows, ready for JSON. Its size is bounded, however long and
    many the runs are.

    Args:
        runs: The runs of the page.
        prediction: A predicted step, as `read_prediction` returns it.
        metric: What runs are compared by, over the keys that differ; None for the loss of the
            evaluation, or of training if there is none.
        notes: What a reader should know about the choice of runs.
    """
    names = name_runs([run.folder for run in runs])
    share = min(1.0, _RUNS / max(1, len(runs)))
    if metric is None:
        has_evaluation = any(np.isfinite(r.metrics.get_column("eval_loss")).any() for r in runs)
        metric = "eval_loss" if has_evaluation else "loss"
    with np.errstate(all="ignore"):  # any numbers may be in a file
        run_data = [
            {**build_run_data(run, name, share), "outcome": compute_outcome(run.metrics, metric)}
            for run, name in zip(runs, names, strict=True)
        ]
    colours = assign_colours(names)
    for run in run_data:
        run["colour"] = colours[run["name"]]
    panels = [{**asdict(panel), "colours": _assign(panel, run_data)} for panel in PANELS]
    numbers = [number for panel in panels for number in panel["colours"].values()]
    numbers += [run["colour"] for run in run_data]
    return {
        "runs": run_data,
        "panels": panels,
        "palette": make_palette(max(numbers, default=0) + 1),
        "metric": sanitize_text(metric),
        "notes": list(notes),
        "prediction": [*_build_predicted_waterfall(prediction)] if prediction else [],
    }


def build_run_data(run: RunFolder, name: str, share: float = 1.0) -> dict[str, Any]:
    """Return one run's part of `build_page_data`.

    Args:
        run: The run.
        name: Its name on the page.
        share: Of the most points and characters of a run.
    """
    metrics, points = run.metrics, max(_FEWEST_POINTS, int(POINTS * share))
    starts = list_bucket_starts(len(metrics), points)
    seconds = metrics.get_column("seconds")
    ends = np.append(starts[1:], len(metrics)) - 1 if len(starts) else starts
    tokens = np.nan_to_num(metrics.get_column("tokens")).cumsum()
    hours = np.nan_to_num(seconds).cumsum() / 3600
    axes = {"step": metrics.get_column("step"), "tokens": tokens, "hours": hours}
    series, left_out = _build_series(run, starts, seconds)
    return {
        "name": name,
        "folder": sanitize_text(str(run.folder)),
        "steps": len(metrics),
        "notes": [*run.notes, *left_out],
        "summary": summarize_run(run),
        "x": {axis: round_values(values[ends], 9) for axis, values in axes.items()},
        "series": series,
        "events": _build_events(run, axes),
        "waterfall": _build_waterfall(compute_mean_losses(run)),
        "bars": build_bars(run),
        "heat": build_heatmaps(run, axes, points),
        "samples": read_samples(run.folder, int(_SAMPLES * share)),
        "log": read_log(run.folder, int(_LOG * share)),
        "config": [list(row) for row in flatten_config(run.config)],
        "environment": [list(row) for row in flatten_config(run.environment)],
    }


def _assign(panel: Panel, runs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the colours of a panel's series by their names."""
    if panel.kind == "lines":
        named = [name for run in runs for name in run["series"] if panel.shows(name)]
    elif panel.kind == "waterfall":
        return assign_colours(row[0] for run in runs for row in run["waterfall"])
    else:
        named = [kind for run in runs for kind in run["bars"].get(panel.id, {}).get("kinds", ())]
    return assign_colours(named, [key for key in panel.keys if not key.endswith("/")])


def _build_predicted_waterfall(prediction: Mapping[str, Any]) -> tuple[str, list[list[Any]]]:
    """Return the name of the prediction, and its waterfall."""
    of = f" for {prediction['cluster']}" if "cluster" in prediction else ""
    return f"predicted{of}", _build_waterfall(compute_predicted_losses(prediction))


def _build_waterfall(lost: Mapping[str, float]) -> list[list[Any]]:
    """Return rows of cause, label and share."""
    return [
        [cause, label_cause(cause), round_values([share], 6)[0]] for cause, share in lost.items()
    ]


def _build_series(
    run: RunFolder, starts: Any, seconds: Floats
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return by metric the means of buckets and, if steps were thinned out, also the extremes; and
    notes about metrics that are left out."""
    series, notes = {}, []
    for key in dict.fromkeys(key for panel in PANELS for key in panel.keys):
        names, count = run.metrics.select_names(key)
        if len(names) < count:
            notes.append(f"only the first {len(names)} of {count:,} metrics {key} are shown")
        for name in names:
            values = run.metrics.get_column(name)
            has_values = bool(np.isfinite(values).any())
            is_zero = name.startswith(("time/", "bytes/")) and not np.nan_to_num(values).any()
            if not has_values or is_zero:
                continue
            weights = seconds if name in _RATES else None
            series[name] = {"y": round_values(compute_bucket_means(values, starts, weights))}
            if len(values) > len(starts):
                low, high = find_bucket_extremes(values, starts)
                series[name] |= {"low": round_values(low), "high": round_values(high)}
    return series, notes


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
