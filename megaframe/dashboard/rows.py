"""Turns the rows of ranks, stages, experts and sources into the bars and heat maps of a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megaframe.dashboard.downsample import Floats, block_maxima, list_bucket_starts, round_values
from megaframe.dashboard.run_folder import RunFolder, get_config_value

_PEAK = "ranks/memory_bytes"
RANKS = 160
"""Maximum number of ranks of a run that a page shows, and of its sources; more ranks are thinned
out."""
_MOST_KINDS = 32
_MOST_LAYERS, _MOST_EXPERTS = 2_000, 1 << 12
"""Rows that are set beside each other, and their longest; a hostile file has one of millions."""


def build_bars(run: RunFolder) -> dict[str, Any]:
    """Return by panel the names of the places and, for each kind, the heights of the bars."""
    rows, bars = run.metrics.rows, {}
    stages = _select_longest(
        {
            name: np.mean(rows[f"stages/{name}"].make_table()[1], axis=0, dtype=float) * 1000
            for name in ("work", "bubble")
            if f"stages/{name}" in rows
        }
    )
    if stages:
        bars["stages"] = _group_ranks(stages)
    held = [name for name in rows if name.startswith("ranks/held/")][:_MOST_KINDS]
    kinds = _select_longest(
        {
            name.removeprefix("ranks/held/"): rows[name].last / 2**30
            for name in (*held, *([_PEAK] if _PEAK in rows else []))
        }
    )
    peak = kinds.pop(_PEAK, None)
    if kinds:
        if peak is not None:
            kinds["the rest at its peak"] = np.maximum(0.0, peak - sum(kinds.values()))
        bars["memory_ranks"] = _group_ranks(kinds)
    if "sources" in rows:
        counts, names = rows["sources"].last, _list_source_names(run)
        if len(names) != len(counts):
            names = [f"source {i}" for i in range(min(len(counts), RANKS))]
        bars["sources"] = _group(names[:RANKS], {"samples": counts[:RANKS]})
    return bars


def _group_ranks(kinds: Mapping[str, Floats]) -> dict[str, Any]:
    """Return a bar for each rank, or for the fullest of its neighbours if there are too many."""
    starts = list_bucket_starts(len(next(iter(kinds.values()))), RANKS)
    thinned = {kind: np.maximum.reduceat(row, starts) for kind, row in kinds.items()}
    return _group([f"rank {i}" for i in starts], thinned)


def _select_longest(rows: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the rows with the most places: the others lack ranks, and could not be compared."""
    width = max(map(len, rows.values()), default=0)
    return {name: row for name, row in rows.items() if len(row) == width}


def _list_source_names(run: RunFolder) -> list[str]:
    """Return the paths of the sources with a share of training, as far as the config says."""
    sources, split = (get_config_value(run.config, f"data.{key}") for key in ("sources", "split"))
    names = []
    for source in sources if isinstance(sources, list) else []:
        source_split = (source.get("split") or split) if isinstance(source, dict) else None
        if not (isinstance(source_split, list) and source_split and _is_zero(source_split[0])):
            names.append(str(source.get("path")) if isinstance(source, dict) else str(source))
    return names


def _is_zero(text: Any) -> bool:
    try:
        return float(text) == 0
    except (TypeError, ValueError):
        return False


def _group(places: list[str], kinds: Mapping[str, Floats]) -> dict[str, Any]:
    return {"places": places, "kinds": {kind: round_values(row) for kind, row in kinds.items()}}


def build_heatmaps(run: RunFolder, axes: Mapping[str, Floats], points: int) -> dict[str, Any]:
    """Return by panel the rows `z` of a heat map, with the numbers of its rows and columns. If the
    columns are steps, `x` has their values on each of `axes`, which have a value for every line.

    Args:
        run: The run.
        axes: Values of the horizontal axes by name, with one value for every line.
        points: The most rows and columns.
    """
    rows, heatmaps, most = run.metrics.rows, {}, min(points, 200)

    def build_along(table: Floats, row_kind: str, steps: Sequence[int]) -> dict[str, Any]:
        grid = _build_grid(table, row_kind, steps, most)
        places = np.searchsorted(axes["step"], grid.pop("columns"))
        return {
            **grid,
            "x": {name: round_values(values[places], 9) for name, values in axes.items()},
        }

    if "ranks/work" in rows:
        steps, work = rows["ranks/work"].make_table()
        middle = np.median(work, axis=1, keepdims=True)
        over = 100 * (work / np.where(middle > 0, middle, 1.0) - 1.0)
        heatmaps["stragglers"] = build_along(over.T, "rank", steps)
    layers = sorted((n for n in rows if n.startswith("experts/tokens/")), key=_read_last_number)
    if layers:
        step = rows[layers[0]].steps[-1]
        tokens = [rows[name].last[:_MOST_EXPERTS] for name in layers[:_MOST_LAYERS]]
        width = max(map(len, tokens))
        tokens = [np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in tokens]
        table = np.stack([row / (np.nanmean(row) or 1.0) for row in tokens])
        grid = _build_grid(table, "layer", range(width), 512)
        heatmaps["experts"] = {**grid, "across": "expert", "at": step}
    if "experts/max_load" in rows:
        steps, load = rows["experts/max_load"].make_table()
        heatmaps["expert_load"] = build_along(load.T, "layer", steps)
    return heatmaps


def _read_last_number(name: str) -> int:
    text = name.rsplit("/", 1)[-1]
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def _build_grid(table: Floats, row_kind: str, columns: Sequence[int], most: int) -> dict[str, Any]:
    thinned = block_maxima(table, RANKS, most)
    height, width = list_bucket_starts(len(table), RANKS), list_bucket_starts(len(columns), most)
    return {
        "z": [round_values(row, 3) for row in thinned],
        "rows": height.tolist(),
        "columns": [columns[i] for i in width],
        "what": row_kind,
    }
