"""Draw a timeline as SVG: one self-contained file for light and dark backgrounds.

The colour of an action shows its kind, and the shade its chunk. Both are the same on either
background. Labels are black or white, whichever contrasts more with the colour.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from megaframe.schedule.draw_text import format_number, summarize_timeline
from megaframe.schedule.simulate import ActionInterval, Timeline

_HUES = {
    "F": (212, "forward"),
    "B": (135, "backward, input gradient"),
    "W": (32, "backward, weight gradient"),
    "BW": (175, "backward, both gradients"),
}
_LEFT, _RIGHT, _TOP, _ROW, _GAP = 64, 40, 64, 26, 4
_LETTER = 6.5
"""Width of a digit of a label in pixels."""

_Palette = dict[tuple[str, int], tuple[str, str]]
"""(fill, label) by (kind, chunk)."""

_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #222 }
text.title { font-size: 14px; font-weight: 600 }
text.label { text-anchor: middle }
.ground { fill: #fff } .track { fill: #ececec } .axis { stroke: #999 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .ground { fill: #16181c } .track { fill: #26292f } .axis { stroke: #777 }
}
"""


def draw_svg(timeline: Timeline, name: str) -> str:
    """Draw the timeline as the text of an SVG file, titled with the `name` of the schedule."""
    ranks = len(timeline.encoded.steps)
    width = min(30_000, max(860, 24 * max(map(len, timeline.compute))))
    total_width, height = _LEFT + width + _RIGHT, _TOP + ranks * _ROW + 30
    scale = width / float(timeline.time) if timeline.time else 0.0
    title = escape(f"{name}: {summarize_timeline(timeline)}")
    palette = _choose_palette(timeline)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{height}" '
        f'viewBox="0 0 {total_width} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        '<rect class="ground" width="100%" height="100%"/>',
        f'<text class="title" x="12" y="24">{title}</text>',
        *_draw_legend(palette),
    ]
    for rank, intervals in enumerate(timeline.compute):
        top = _TOP + rank * _ROW
        lines.append(f'<text x="12" y="{top + 15}">rank {rank}</text>')
        lines.append(
            f'<rect class="track" x="{_LEFT}" y="{top}" width="{width}" height="{_ROW - _GAP}"/>'
        )
        lines += [
            _draw_box(interval, rank, scale, palette[_name_kind(interval), interval.chunk])
            for interval in intervals
        ]
    lines += [*_draw_axis(float(timeline.time), scale, _TOP + ranks * _ROW), "</svg>"]
    return "\n".join(lines) + "\n"


def _name_kind(interval: ActionInterval) -> str:
    return "BW" if interval.fused else interval.action.kind.value


def _choose_palette(timeline: Timeline) -> _Palette:
    """Return the colours of fill and label for each kind and chunk that occurs. Later chunks are
    lighter."""
    shades = {
        (_name_kind(interval), interval.chunk)
        for intervals in timeline.compute
        for interval in intervals
    }
    last = max(1, *(chunk for _, chunk in shades), 1)
    order = list(_HUES)
    return {
        (kind, chunk): _choose_colours(_HUES[kind][0], 0.40 + 0.38 * chunk / last)
        for kind, chunk in sorted(shades, key=lambda shade: (order.index(shade[0]), shade[1]))
    }


def _choose_colours(hue: int, lightness: float) -> tuple[str, str]:
    parts = colorsys.hls_to_rgb(hue / 360, lightness, 0.62)
    red, green, blue = (part**2.2 for part in parts)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    fill = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
    return fill, "#000" if luminance > 0.18 else "#fff"


def _draw_box(interval: ActionInterval, rank: int, scale: float, colours: tuple[str, str]) -> str:
    action = interval.action
    left, right = _LEFT + float(interval.start) * scale, _LEFT + float(interval.end) * scale
    top, height = _TOP + rank * _ROW, _ROW - _GAP
    fill, ink = colours
    hint = (
        f"{action}: stage {action.stage}, microbatch {action.microbatch}, rank {rank}, "
        f"{format_number(interval.start)} to {format_number(interval.end)} s"
    )
    text = str(action.microbatch)
    label = ""
    if right - left > _LETTER * len(text) + 2:
        at = f'x="{(left + right) / 2:.1f}" y="{top + 15}"'
        label = f'<text class="label" style="fill:{ink}" {at}>{text}</text>'
    return (
        f'<g class="action"><title>{hint}</title><rect x="{left:.2f}" y="{top}" '
        f'width="{max(0.0, right - left - 0.6):.2f}" height="{height}" rx="2" fill="{fill}"/>'
        f"{label}</g>"
    )


def _draw_legend(palette: _Palette) -> Iterator[str]:
    """Yield the legend: the shades of each kind with its description."""
    left = 12.0
    for kind, (_, words) in _HUES.items():
        shades = [fill for (other, _), (fill, _) in palette.items() if other == kind]
        for fill in shades:
            yield f'<rect x="{left:.0f}" y="38" width="12" height="12" fill="{fill}"/>'
            left += 12
        if shades:
            yield f'<text x="{left + 5:.0f}" y="48">{words}</text>'
            left += 24 + 0.9 * _LETTER * len(words)
    chunks = 1 + max(chunk for _, chunk in palette)
    if chunks > 1:
        yield f'<text x="{left:.0f}" y="48">(chunks 0 to {chunks - 1}: dark to light)</text>'


def _draw_axis(time: float, scale: float, top: int) -> Iterator[str]:
    """Yield the time axis below the rows, with marks at round numbers."""
    rough = time / 12 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)
    for number in range(math.floor(time / step * 1.000001) + 1):
        left = _LEFT + number * step * scale
        yield f'<path class="axis" d="M{left:.1f} {top}v5"/>'
        seconds = format_number(number * step)
        yield f'<text class="label" x="{left:.1f}" y="{top + 18}">{seconds} s</text>'
