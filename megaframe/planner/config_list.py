"""The list of shipped configs, with the size of each model: what `--list-configs` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from megaframe.config.describe import WIDTH
from megaframe.config.load import load
from megaframe.config.shipped import list_shipped_configs
from megaframe.planner.parameter_counts import count_model_parameters


def describe_configs() -> str:
    """Return a line for each shipped config: name, parameters, machine, and what it is."""
    rows = [
        (
            config.name,
            _format_count(count_config_parameters(config.name)),
            config.machine,
            config.text,
        )
        for config in list_shipped_configs()
    ]
    return "\n".join(
        [*_format_rows(rows), "", "--config NAME takes one, and so does `extends: NAME`."]
    )


def _format_rows(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, count, machine, text in rows:
        head = f"{name:{widths[0]}}  {count:>{widths[1]}}  {machine:{widths[2]}}  "
        yield head + textwrap.shorten(text, WIDTH - len(head), placeholder=" ...")


def count_config_parameters(name: str) -> int:
    """Return the parameters of the model of a config, as they are quoted: without the blocks that
    predict more tokens in training."""
    config = load(name, ["model.mtp_depth=0"])
    return count_model_parameters(config.model, config.train).total


def _format_count(count: int) -> str:
    """Return a number of parameters as `8.03B`."""
    size, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{size:.3g}{unit}"
