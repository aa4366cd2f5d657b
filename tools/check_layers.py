"""Check that the layers of a config are what their descriptions say: parameters, bytes kept for the
backward pass, FLOPs and traffic, exactly, on one rank and on two; and that two ranks compute what
one does. For layers of an extension that its author has just written, above all.

Sizes of layers are those of the config, so take a small one; samples are short. Status 1 means that
a description lies or a layout changes the answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from megaframe.errors import UserError, report_errors
from megaframe.extensions import load_extensions, load_with_extensions
from megaframe.io.closed_output import allow_closed_output
from megaframe.training.layer_check import (
    Lie,
    find_lies,
    is_measured,
    list_described_parts,
    measure_layers,
)
from megaframe.training.layer_check.layouts import CheckedLayout, SmallRun
from megaframe.training.layer_check.parity import PROMISE, find_largest_difference, train_two_steps
from megaframe.training.rank_pool import RankFailure, RankPool

_EPILOG = """example:
  python tools/check_layers.py --config configs/demo.yaml \\
      "run.extensions=[examples/norm.py]" model.norm=dynamic_tanh
"""
_LINES = 6
"""Lines of a traceback that are shown."""
_TIMEOUT = 300.0
"""Seconds that ranks may take for one layout."""


def main() -> None:
    """Print what was compared, and what is not so."""
    arguments = parse_arguments()
    with report_errors():
        config = load_with_extensions(arguments.config, arguments.overrides)
        if config.model.emulate is not None:
            raise UserError("model.emulate has no layers to check; leave it out")
        load_on_rank = partial(load_extensions, arguments.config, arguments.overrides)
        pool = RankPool(2, load_on_rank, _TIMEOUT)
        try:
            small = SmallRun(config.model, config.optim, config.run)
            lies = check_descriptions(small.list_measured_layouts(), pool)
            failures = check_parity(small.list_parity_layouts(), pool)
        finally:
            pool.close()
    for line in (*lies, *failures):
        print(line)
    count = len(lies) + len(failures)
    verb = "is" if count == 1 else "are"
    print(f"{count} of the above {verb} wrong" if count else "all of it is so")
    sys.exit(1 if count else 0)


def check_descriptions(layouts: Sequence[CheckedLayout], pool: RankPool) -> list[str]:
    """Measure the layers under layouts, print a table of them, and return what is wrong."""
    lies: dict[str, None] = {}
    lies_by_part: dict[str, int] = {}
    run_names: list[str] = []
    for layout in layouts:
        found, failure = _measure(layout, pool)
        if failure:
            lies[failure] = None
        elif not layout.refusal:
            run_names.append(layout.name)
        for lie in found:
            name = lie.layer.partition(" ")[0]
            lies_by_part[name] = lies_by_part.get(name, 0) + 1
            lies[f"X {layout.name}: {lie}"] = None
    table = Table("layer", "description", "parameters", "", box=None, pad_edge=False)
    for part in list_described_parts(layouts[0].config.model, layouts[0].config.train):
        size = sum(spec.size for spec in part.specs)
        wrong = lies_by_part.get(part.name, 0)
        right = "measured" if is_measured(part.description) else "exact"
        verdict = f"{wrong} {'lie' if wrong == 1 else 'lies'}" if wrong else right
        table.add_row(part.name, type(part.description).__name__, f"{size:,}", verdict)
    Console(highlight=False, width=120).print(table)
    print("compared: parameters, kept bytes, FLOPs, traffic")
    for name in run_names:
        print(f"  {name}")
    for refusal in dict.fromkeys(_list_refusals(layouts)):
        print(f"  {refusal}")
    return list(lies)


def _measure(layout: CheckedLayout, pool: RankPool) -> tuple[list[Lie], str]:
    """Return the lies under a layout, and the failure if it fails."""
    if layout.refusal:
        return [], ""
    try:
        return find_lies(layout.config, pool.run(layout.ranks, measure_layers, layout.config)), ""
    except RankFailure as error:
        return [], _describe_failure(layout, error)


def check_parity(layouts: Sequence[CheckedLayout], pool: RankPool) -> list[str]:
    """Compare layouts with the first of them, print how far they are, and return what is wrong."""
    first, *others = layouts
    if first.refusal:
        return [f"X {first.name}: {first.refusal}"]
    try:
        (expected,) = pool.run(1, train_two_steps, first.config)
    except RankFailure as error:
        return [_describe_failure(first, error)]
    print("two steps in fp64, compared with one rank")
    failures = []
    for layout in others:
        if layout.refusal:
            print(f"  {next(_list_refusals([layout]))}")
            continue
        try:
            results = pool.run(layout.ranks, train_two_steps, layout.config)
        except RankFailure as error:
            failures.append(_describe_failure(layout, error))
            continue
        difference, name = find_largest_difference(results, expected)
        text = f"{layout.name}: largest difference {difference:.1e}"
        print(f"  {text}")
        if not difference <= PROMISE:
            failures.append(
                f"X {text} in {name}; {PROMISE:g} is allowed. Is a gradient summed over all ranks "
                "that have a part of it?"
            )
    return failures


def _describe_failure(layout: CheckedLayout, error: RankFailure) -> str:
    lines = [f"X {layout.name}: a rank fails"]
    for text in error.failures.values():
        lines += text.splitlines()[-_LINES:]
    return "\n    ".join(lines)


def _list_refusals(layouts: Sequence[CheckedLayout]) -> Iterator[str]:
    for layout in layouts:
        if layout.refusal:
            yield f"{layout.name.partition(' train.')[0]}: cannot be: {layout.refusal}"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. argv: its words; None for those of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file, or the name of a shipped config: demo"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with allow_closed_output():
        main()
