"""A plan as one HTML page with charts: memory, step time, roofline, scaling from 8 to 100,000 GPUs.

The page works without a network, because it contains the plotting library.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaframe.errors import UserError, explain_failed_write
from megaframe.hardware.cluster import Cluster
from megaframe.io.regular_file import write_file
from megaframe.planner.advice import describe_alternatives, describe_decision, describe_prediction
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.constants import Constants
from megaframe.planner.explanations import Explanation
from megaframe.planner.island_advice import list_reasons
from megaframe.planner.layout_search import LayoutChoice, SearchResult, find_fastest
from megaframe.planner.rooflines import compute_communication_rooflines

_GIB = 2.0**30
_MOST_GPUS = 100_000
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; color: #222;
       padding: 0 1rem }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.05rem; margin: 1.6rem 0 .3rem }}
.grid {{ display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem }}
@media (max-width: 900px) {{ .grid {{ grid-template-columns: minmax(0, 1fr) }} }}
.grid > div {{ border: 1px solid #ddd; border-radius: 6px; padding: .3rem; min-width: 0;
       overflow: hidden }}
li {{ margin: .15rem 0 }} .wide {{ overflow-x: auto }} table {{ border-collapse: collapse }}
th, td {{ padding: .1rem .6rem .1rem 0; text-align: left; font-variant-numeric: tabular-nums }}
</style><script>{script}</script></head><body>
"""
_SHOWN = {"responsive": True, "displayModeBar": False}


def write_page(
    path: Path,
    choice: LayoutChoice,
    result: SearchResult | None,
    cluster: Cluster,
    constants: Constants,
    explanations: Mapping[str, Explanation],
) -> None:
    """Write the page of a plan, which needs no network.

    Args:
        path: The HTML file.
        choice: The layout that is described.
        result: The search that made the choice, if any; with it the page lists the alternatives.
        cluster: The chips and links.
        constants: What kernels and collectives reach there.
        explanations: What the theory says of the plan.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as graph
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(
            "--html needs plotly, which is not installed; pip install 'megaframe[plan]'"
        ) from None
    title = f"{choice.layout.world} GPUs of {cluster.name}: {choice.layout}"
    words = (
        describe_decision(result, cluster)
        if result is not None
        else describe_prediction(choice, cluster)
    )
    figures = [_draw_chart(graph, chart) for chart in make_charts(choice, cluster, constants)]
    parts = [
        _HEAD.format(title=html.escape(title), script=get_plotlyjs()),
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in words),
        _format_list("Why", tuple(list_reasons(choice, cluster))),
        '<div class="grid">',
        *(f"<div>{figure}</div>" for figure in figures),
        "</div>",
        _format_list(
            "Other choices, each with the best values of everything else",
            tuple(describe_alternatives(result, cluster)),
        )
        if result is not None
        else "",
        *map(_format_explanation, explanations.values()),
        "</body></html>\n",
    ]
    with explain_failed_write(path):
        write_file(path, "\n".join(parts))


def _format_list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<h2>{html.escape(title)}</h2><ul>{items}</ul>"


def _format_explanation(explanation: Explanation) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in explanation.head)
    rows = (
        "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        for row in explanation.format_rows()
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
    return _format_list(explanation.title, explanation.lines) + (table if body else "")


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        traces: What plotly draws, as (kind of trace, its data).
        axes: Further arguments of plotly's layout.
    """

    title: str
    traces: Sequence[tuple[str, dict[str, Any]]]
    axes: dict[str, Any]


def _draw_chart(graph: Any, chart: Chart) -> str:
    """Return a chart as HTML, drawn by plotly's module of figures."""
    figure = graph.Figure(data=[getattr(graph, kind)(**trace) for kind, trace in chart.traces])
    figure.update_layout(
        title=chart.title,
        template="plotly_white",
        height=420,
        margin={"t": 60},
        legend={"orientation": "h", "y": -0.2},
        **chart.axes,
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=_SHOWN))


def make_charts(choice: LayoutChoice, cluster: Cluster, constants: Constants) -> Iterator[Chart]:
    """Yield the charts: memory, step, roofline and scaling.

    Args:
        choice: The layout that is shown.
        cluster: Chips and links.
        constants: Fitted constants of the chips.
    """
    memory = choice.prediction.memory_bytes
    total = cluster.chip.memory / _GIB
    yield Chart(
        f"Memory of the fullest GPU, of {total:.0f} GiB",
        [_make_bar(kind, size / _GIB, "GiB") for kind, size in memory.items()],
        {
            "barmode": "stack",
            "xaxis": {"title": "GiB", "range": [0, 1.05 * max(total, sum(memory.values()) / _GIB)]},
            "shapes": [_draw_line(total)],
        },
    )
    parts = {name: value for name, value in choice.prediction.breakdown.items() if value > 1e-9}
    yield Chart(
        f"A step of {choice.prediction.step_seconds:.3g} s",
        [_make_bar(name, seconds, "s") for name, seconds in parts.items()],
        {"barmode": "stack", "xaxis": {"title": "seconds"}},
    )
    yield _make_roofline_chart(choice, cluster, constants)
    yield _make_scaling_chart(choice, cluster, constants)


def _make_bar(name: str, value: float, unit: str) -> tuple[str, dict[str, Any]]:
    hover = f"{name}: %{{x:.3g}} {unit}<extra></extra>"
    return "Bar", {
        "x": [value],
        "y": [""],
        "orientation": "h",
        "name": name,
        "hovertemplate": hover,
    }


def _draw_line(x: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"dash": "dash", "color": "#c00"},
    }


def _make_roofline_chart(choice: LayoutChoice, cluster: Cluster, constants: Constants) -> Chart:
    """Return the roofline: the work per byte that each axis moves, below the roof of the tier that
    it uses."""
    config = choice.config
    peak = cluster.chip.peaks[config.train.precision]
    intensity = np.logspace(0, 6, 61)
    roofs: list[tuple[str, dict[str, Any]]] = [
        (
            "Scatter",
            {
                "x": intensity,
                "y": np.minimum(peak, intensity * rate) / 1e12,
                "mode": "lines",
                "name": f"{name}, {rate / 1e9:.4g} GB/s",
            },
        )
        for name, rate in [
            ("memory", cluster.chip.bandwidth),
            *((tier.name, tier.bandwidth) for tier in cluster.tiers),
        ]
    ]
    for roofline in compute_communication_rooflines(config, choice.layout, cluster, constants):
        rate = next(tier.bandwidth for tier in cluster.tiers if tier.name == roofline.tier)
        roof = min(peak, roofline.intensity * rate) / 1e12
        point = {
            "x": [roofline.intensity],
            "y": [roof],
            "mode": "markers+text",
            "text": [roofline.axis],
        }
        point |= {"textposition": "top left", "name": f"{roofline.axis} over {roofline.tier}"}
        roofs.append(("Scatter", {**point, "marker": {"size": 11}}))
    predicted = {"x": [1, 1e6], "y": [choice.prediction.tflops_per_gpu] * 2, "mode": "lines"}
    roofs.append(("Scatter", {**predicted, "name": "predicted", "line": {"dash": "dot"}}))
    return Chart(
        "Roofline: work for each byte that a GPU moves",
        roofs,
        {
            "xaxis": {"type": "log", "title": "FLOP a byte"},
            "yaxis": {"type": "log", "title": "TFLOP/s a GPU"},
        },
    )


def _make_scaling_chart(choice: LayoutChoice, cluster: Cluster, constants: Constants) -> Chart:
    """Return the speed per GPU for growing numbers of GPUs: with the same batch, and with a batch
    that grows in proportion."""
    sizes = [gpus for gpus in _list_doublings(choice.layout.world) if gpus <= cluster.size]
    traces: list[tuple[str, dict[str, Any]]] = []
    for name, grows in (("the same batch", False), ("as many samples a GPU", True)):
        speeds = [_predict_speed(choice, gpus, cluster, constants, grows=grows) for gpus in sizes]
        traces.append(("Scatter", {"x": sizes, "y": speeds, "mode": "lines+markers", "name": name}))
    return Chart(
        "Scaling: the best layout at every size",
        traces,
        {
            "xaxis": {"type": "log", "title": "GPUs"},
            "yaxis": {"title": "tokens a second and GPU", "rangemode": "tozero"},
        },
    )


def _list_doublings(world: int) -> list[int]:
    """Return `world` halved and doubled repeatedly, within 8 to 100,000."""
    smallest = world
    while smallest % 2 == 0 and smallest // 2 >= 8:
        smallest //= 2
    sizes = [smallest]
    while sizes[-1] * 2 <= _MOST_GPUS:
        sizes.append(sizes[-1] * 2)
    return sizes


def _predict_speed(
    choice: LayoutChoice, gpus: int, cluster: Cluster, constants: Constants, *, grows: bool
) -> float | None:
    """Return the tokens per second and GPU of the fastest layout on `gpus` GPUs that has the
    choice's expert axes, recompute and ZeRO stage, without replicas. None if no such layout is
    valid and fits. grows: whether the batch grows with the GPUs."""
    config, world = choice.config, choice.layout.world
    batch = config.train.global_batch
    if grows:
        if batch * gpus % world:
            return None
        batch = batch * gpus // world
    batch_config = config.replace(train={"global_batch": batch, "batch_ramp": None})
    parallel = config.parallel
    fixed = {
        "recompute": config.train.recompute,
        "zero": parallel.zero,
        "expert": parallel.expert,
        "expert_tensor": parallel.expert_tensor,
        "data_replicate": 1,
    }
    fastest = find_fastest(SearchSpace(batch_config, gpus, cluster, fixed), constants)
    return None if fastest is None else batch * config.train.seq / fastest[2] / gpus
