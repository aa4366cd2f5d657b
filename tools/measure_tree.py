"""Measure source trees: the length of files and functions, imports between rooms, names, comments,
and for megaframe what a step of one microbatch calls (`trace_step.py`).

    python tools/measure_tree.py rooms=../rooms now=. nanochat=../nanochat/nanochat --write

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
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from trace_step import STEPS, trace_step
from tree_counts import LONG, PREFIXES, SHORT, VERBS, measure_tree
from tree_names import KINDS, WORDS, measure_names, measure_outside

from megaframe.io.closed_output import allow_closed_output

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/tree.json"
PAGE = ROOT / "docs/reference/tree.md"
BESIDE = ("kernels", "tools", "benchmarks", "examples", "tests")
"""Folders beside megaframe's package of which only the lines are counted."""


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
    measures |= measure_names(package.resolve())
    if is_megaframe:
        measures |= {
            "contract_layers": count_contract_layers(path),
            "outside": measure_outside(path),
            "beside_lines": {name: count_lines(path / name) for name in BESIDE},
            **trace_step(path),
        }
    return measures


def count_lines(folder: Path) -> int:
    """Return the lines of all Python files of a folder, with its tests."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


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
    (
        "functions that take the whole config / files",
        "config_functions",
        "{config_functions} / {config_files}",
    ),
)
"""Rows of the table: heading, a measure that it needs, and how it is shown."""


def format_table(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the measures as a Markdown table with a column for each tree."""
    rows = (
        (
            heading,
            [form.format_map(tree) if needed in tree and tree[needed] is not None else ""
             for tree in trees.values()],
        )
        for heading, needed, form in ROWS
    )  # fmt: skip
    return align_rows(trees, rows)


def align_rows(columns: Iterable[str], rows: Iterable[tuple[str, Iterable[object]]]) -> str:
    """Return a Markdown table of these columns and rows, each with its heading and cells."""
    columns = list(columns)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += (f"| {heading} | {' | '.join(map(str, cells))} |" for heading, cells in rows)
    return "\n".join(lines)


def format_touched(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how many files name one of each kind, in the tree, and as an example brings it."""
    rows: list[tuple[str, list[object]]] = []
    for kind in KINDS:
        rows.append(
            (kind.heading, [len(tree["touched"][kind.heading]) or "" for tree in trees.values()])
        )
        if kind.outside:
            outside = [tree.get("outside", {}).get(kind.heading) or "" for tree in trees.values()]
            rows.append(("- from outside", outside))
    return align_rows(trees, rows)


def format_words(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Return with how many types each word is annotated."""
    rows = ((f"`{word}`", [tree["word_types"][word] or "" for tree in trees.values()])
            for word in WORDS)  # fmt: skip
    return align_rows(trees, rows)


def format_rooms(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the lines of each room of megaframe's trees, and of the folders beside the package."""
    ours = {name: tree for name, tree in trees.items() if "beside_lines" in tree}
    lines = {
        name: {**fold_loose_modules(tree["room_lines"]),
               **{f"({folder})": size for folder, size in tree["beside_lines"].items()}}
        for name, tree in ours.items()
    }  # fmt: skip
    last = lines[next(reversed(lines))]
    rooms = sorted(
        {*chain(*lines.values())}, key=lambda room: (room[0] == "(", -last.get(room, 0), room)
    )
    rows = ((room, [f"{lines[name][room]:,}" if room in lines[name] else "" for name in ours])
            for room in rooms)  # fmt: skip
    return align_rows(ours, rows)


def fold_loose_modules(room_lines: Mapping[str, int]) -> dict[str, int]:
    """Return the lines of rooms, those of modules that lie beside them as one."""
    folded: Counter[str] = Counter()
    for room, size in room_lines.items():
        folded["modules beside rooms" if room.endswith(".py") else room] += size
    return dict(folded)


def format_peers(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rooms of the other trees with their lines."""
    return "\n".join(
        f"- {name}: "
        + ", ".join(
            f"{room} {size:,}" for room, size in fold_loose_modules(tree["room_lines"]).items()
        )
        for name, tree in trees.items()
        if "beside_lines" not in tree
    )


PAGE_TEXT = """\
# The tree, measured

How megaframe's source is cut and named: before it was laid out in rooms by concept (`modules`), \
before layers were measured instead of described by formulas (`rooms`), and now, beside four other \
trainers.

{table}

Made by

```sh
.venv/bin/python tools/measure_tree.py now=.
```

which measures this checkout and prints its column. `NAME=PATH` of other folders of Python files \
add columns, and `--write` keeps all of them in `benchmarks/results/tree.json` and makes this \
page: `python tools/measure_tree.py modules=../modules rooms=../rooms now=. \
torchtitan=../torchtitan/torchtitan OLMo-core=../OLMo-core/src/olmo_core \
nanochat=../nanochat/nanochat Megatron-core=../Megatron-LM/megatron/core --write`.

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
- **Functions that take the whole config** have a parameter annotated as `RunConfig`, in \
Megatron-core as `TransformerConfig`. In the other trees functions take the config of their part.
- **What one more touches**: identifiers, names of modules and texts are searched, without \
docstrings and comments, by the patterns in `tools/tree_names.py`. A cell is empty where a tree \
has none of the kind, or no example brings one.
- **Trainer to block**: the calls on the stack, in the package, when the first block is called, \
from the first that is not in `trainer.py` to the block, and the files that they are in. **Step of \
one microbatch**: all calls of the package's functions, and their files, within the outermost of \
these calls: a forward and a backward pass, and the update. The run has one rank, one layer and \
{steps} steps, on a CPU; the last step is counted, by `sys.setprofile`.

## What one more touches

Files whose code names one of a kind: about those that another of its kind would touch. *From \
outside* are the files of `megaframe/` and `examples/` that name one which an example brings.

{touched}

Of `now`:

{touched_files}

## Words

With how many types a tree annotates parameters and fields that are called by one of these words \
alone. A word with one type has one meaning to look up; several types can be several meanings.

{words}

## Lines by room

In parentheses: folders beside the package.

{rooms}

Of the others, by the folders directly below the package:

{peers}

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
        touched=format_touched(trees),
        touched_files="\n".join(
            f"- {kind}: {', '.join(f'`{file}`' for file in files)}"
            for kind, files in trees["now"]["touched"].items()
        ),
        words=format_words(trees),
        rooms=format_rooms(trees),
        peers=format_peers(trees),
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
