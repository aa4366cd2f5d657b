"""Measure source trees: the length of files and functions, imports between rooms, names, comments,
and for megaframe what a step of one microbatch calls (`trace_step.py`).

    python tools/measure_tree.py before=../before after=. nanochat=../nanochat/nanochat --write

Each argument is NAME=PATH. PATH is a folder of Python files, or a checkout of megaframe, of which
`megaframe/` is measured and a tiny run on the CPU is traced. `--write` keeps the numbers in
`benchmarks/results/tree.json`, beside those of earlier calls, and makes `docs/reference/tree.md`
from them; `--page` only makes the page.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_step import STEPS, trace_step
from tree_counts import LONG, PREFIXES, SHORT, VERBS, measure_tree

from megaframe.io.closed_output import allow_closed_output

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/tree.json"
PAGE = ROOT / "docs/reference/tree.md"


def count_contract_layers(checkout: Path) -> int | None:
    """Return the number of layers of the import contract of a checkout; None without a contract."""
    file = checkout / "pyproject.toml"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    layers = re.search(r'type = "layers".*?\nlayers = \[\n(.*?)\n\]', text, re.DOTALL)
    return len(layers[1].splitlines()) if layers else None


def measure(path: Path) -> dict[str, Any]:
    """Return everything about a package, or about a checkout of megaframe."""
    is_megaframe = (path / "pretrain_gpt.py").exists()
    package = path / "megaframe" if is_megaframe else path
    measures = {**describe_commit(package), **measure_tree(package.resolve())}
    if is_megaframe:
        measures |= {"contract_layers": count_contract_layers(path), **trace_step(path)}
    return measures


def describe_commit(package: Path) -> dict[str, str]:
    """Return the commit of a package and its date; `+` marks files that differ from it."""

    def run_git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = "+" if run_git("status", "--porcelain", "-uno", "--", ".") else ""
    commit, _, date = run_git("log", "-1", "--format=%h %cs", "--abbrev=8").partition(" ")
    return {"commit": commit + changed if commit else "unknown", "date": date}


ROWS = (
    ("commit", "commit", "{commit}"),
    ("date", "date", "{date}"),
    ("files", "files", "{files:,}"),
    ("lines", "lines", "{lines:,}"),
    ("lines of a file, median / longest", "file_median", "{file_median:,} / {file_max:,}"),
    ("functions", "functions", "{functions:,}"),
    (
        "lines of a function, median / 90% / longest",
        "function_median",
        "{function_median} / {function_p90} / {function_max:,}",
    ),
    (f"functions over {LONG} lines", "long_functions", "{long_functions:.1f}%"),
    (f"functions of at most {SHORT} lines", "short_functions", "{short_functions:.0f}%"),
    ("functions not named by a verb", "not_verbs", "{not_verbs:.0f}%"),
    ("class names / used more than once", "classes", "{classes:,} / {repeated_classes}"),
    ("comment lines per 100 lines of code", "comments", "{comments:.1f}"),
    ("rooms / modules loose beside them", "rooms", "{rooms} / {loose_modules}"),
    ("layers of the import contract", "contract_layers", "{contract_layers}"),
    ("longest chain of imports between rooms", "import_depth", "{import_depth}"),
    ("rooms that import each other", "rooms_in_cycles", "{rooms_in_cycles}"),
    ("trainer to block: calls / files", "block_calls", "{block_calls} / {block_files}"),
    ("step of one microbatch: calls / files", "step_calls", "{step_calls:,} / {step_files}"),
)
"""Rows of the table: heading, a measure that it needs, and how it is shown."""


def format_table(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the measures as a Markdown table with a column for each tree."""
    lines = [f"| | {' | '.join(trees)} |", "|---" * (1 + len(trees)) + "|"]
    for heading, needed, form in ROWS:
        cells = (
            form.format_map(tree) if tree.get(needed) is not None else "" for tree in trees.values()
        )
        lines.append(f"| {heading} | {' | '.join(cells)} |")
    return "\n".join(lines)


PAGE_TEXT = """\
# The tree, measured

How megaframe's source is cut and named, before and after it was laid out in rooms by concept, \
beside four other trainers.

{table}

Made by

```sh
.venv/bin/python tools/measure_tree.py this=.
```

which measures this checkout and prints its column. `NAME=PATH` of other folders of Python files \
add columns, and `--write` keeps all of them in `benchmarks/results/tree.json` and makes this \
page: `python tools/measure_tree.py before=../before after=. torchtitan=../torchtitan/torchtitan \
OLMo-core=../OLMo-core/src/olmo_core nanochat=../nanochat/nanochat \
Megatron-core=../Megatron-LM/megatron/core --write`.

## What is counted

- **Files**: all Python files of the package, without folders named `tests`, `test`, `unit_tests` \
or `experiments`. Lines are all lines. A function's lines are those from `def` to its end, with \
its docstring; methods and functions within functions count as well.
- **Not named by a verb**: the first word of the name is neither one of {verbs} verbs nor one of \
{prefixes} other words (`is`, `has`, `to`, `from`, ...) that `tools/tree_counts.py` lists. \
Special methods are left out, and so are properties, whose names are nouns. A list of words knows \
no grammar: `list` and `state` may be either, and the first is on it.
- **Comment lines** contain a comment that is not an instruction to a tool and does not precede \
the first statement, as licences do. **Lines of code** are the rest without blank lines and \
docstrings.
- **Rooms** are the folders directly below the package. The **longest chain of imports** between \
them takes rooms that import each other, directly or not, as one, and counts imports within \
functions.
- **Trainer to block**: the calls on the stack, in the package, when the first block is called, \
from the first that is not in `trainer.py` to the block, and the files that they are in. **Step of \
one microbatch**: all calls of the package's functions, and their files, within the outermost of \
these calls: a forward and a backward pass, and the update. The run has one rank, one layer and \
{steps} steps, on a CPU; the last step is counted, by `sys.setprofile`.

## Trainer to block

{paths}
"""


def format_page(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page as Markdown."""
    paths = [
        f"{name}: " + ", ".join(f"`{call}`" for call in tree["block_path"])
        for name, tree in trees.items()
        if "block_path" in tree
    ]
    return PAGE_TEXT.format(
        table=format_table(trees),
        verbs=len(VERBS),
        prefixes=len(PREFIXES),
        steps=STEPS,
        paths="\n\n".join(paths),
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", metavar="NAME=PATH", nargs="*")
    parser.add_argument(
        "--write", action="store_true", help="keep the numbers, make docs/reference/tree.md"
    )
    parser.add_argument("--page", action="store_true", help="only make docs/reference/tree.md")
    arguments = parser.parse_args()
    if not arguments.trees and not arguments.page:
        parser.error("nothing to measure: give NAME=PATH, or --page")
    trees = {}
    for tree in arguments.trees:
        name, _, path = tree.partition("=")
        if not (name and path and Path(path).is_dir()):
            parser.error(f"{tree}: is not NAME=PATH of a folder")
        trees[name] = measure(Path(path))
    if arguments.trees:
        print(format_table(trees))
    if arguments.write or arguments.page:
        earlier = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        trees = {**earlier, **trees}
        RESULTS.write_text(json.dumps(trees, indent=2) + "\n", encoding="utf-8")
        PAGE.write_text(format_page(trees), encoding="utf-8")
        print(f"wrote {RESULTS} and {PAGE}")


if __name__ == "__main__":
    with allow_closed_output():
        main()
