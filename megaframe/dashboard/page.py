"""The page: one self-contained HTML file, which loads nothing from other servers.

It contains the data of runs once, as JSON in which `<` cannot occur, so no data can close the
element that contains it. The script inserts data into the document as text only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from megaframe.errors import UserError, explain_failed_write
from megaframe.io.http import CONTENT_SECURITY_POLICY
from megaframe.io.regular_file import write_file

PAGE_FILE = "dashboard.html"
_SCRIPTS = "page_charts.js", "page_texts.js", "page.js"
_PAGE = """<!doctype html>
<html lang="en"{token}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>megaframe</title>
<style>{css}</style>
</head>
<body>
<a class="skip" href="#summary">to the summary</a>
<header>
<h1></h1>
<div class="controls">
<fieldset><legend>x axis</legend>
<label><input type="radio" name="x" value="step" checked><span>steps</span></label>
<label><input type="radio" name="x" value="tokens"><span>tokens</span></label>
<label><input type="radio" name="x" value="hours"><span>time</span></label></fieldset>
<label><span>smoothing</span><input type="range" id="smoothing" min="0" max="0.99" step="0.01" \
value="0"><output>0.00</output></label>
<label><input type="checkbox" id="band" checked><span>minimum and maximum</span></label>
<button id="theme" type="button">light or dark</button>
<span id="live" class="unit" role="status">{status}</span>
<fieldset id="runs"><legend>runs</legend>
<span id="filter"><input type="search" placeholder="filter" aria-label="filter runs">
<button type="button" class="all">all</button>
<button type="button" class="none">none</button></span>
<div class="list"></div></fieldset>
</div>
<ul class="notes" aria-label="notes"></ul>
</header>
<main></main>
<footer></footer>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
<script>{plotly}</script>
<script>drawAll();</script>
</body>
</html>
"""


def render_page(data: Mapping[str, Any], token: str = "") -> str:
    """Return the HTML of the page.

    Args:
        data: What the page shows; is embedded as JSON.
        token: Of the server that a live page polls for new data; empty for a saved page.
    """
    return _PAGE.format(
        token=f' data-token="{escape(token)}"' if token else "",
        policy=CONTENT_SECURITY_POLICY,
        css=_read_asset("page.css"),
        status="live" if token else "",
        data=embed_json(data),
        plotly=_load_plotly(),
        script="\n".join(map(_read_asset, _SCRIPTS)),
    )


def embed_json(data: Any) -> str:
    """Return data as JSON that is safe inside an HTML element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_atomically(path: Path, text: str, inside: Path | None = None) -> None:
    """Write a file so that nobody sees a part of it.

    Args:
        path: The file.
        text: Its content.
        inside: The run folder, if the file is in one: no link in it is followed.

    Raises:
        UserError: The file cannot be written.
    """
    with explain_failed_write(path):
        write_file(path, text, inside=inside)


def _read_asset(name: str) -> str:
    return (files("megaframe.dashboard") / name).read_text(encoding="utf-8")


def _load_plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(
            "the dashboard needs the extra 'dashboard': pip install 'megaframe[dashboard]'"
        ) from None
    text = get_plotlyjs().replace("</script", "<\\/script")
    head, begin, body = text.partition("this, () => {")
    body, end, tail = body.rpartition("}));")
    # In parentheses, a browser compiles the library's one function immediately. Otherwise it first
    # scans the whole function just to find its end, which is a fifth of the loading time.
    return f"{head}this, (() => {{{body}}})));{tail}" if begin and end else text
