"""What a source tree consists of: the length of its files and functions, their names, comments, and
the imports between its rooms. `measure_tree.py` is the command that measures trees and shows them.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEFT_OUT = {"experiments", "test", "tests", "unit_tests", "__pycache__"}
"""Folders that are not measured, in any tree."""
LONG, SHORT = 60, 5
"""Lines from which a function is long, and up to which it is short."""
_VERBS = """
abort accept accumulate acquire act activate add adjust admit advance advise align allgather alloc
allocate allreduce annotate answer append apply approve arrange assemble assert assign assume attach
attend await backward balance barrier begin bind block break bring broadcast build bump cache
calculate call cancel capture cast catch change charge check choose chunk clamp classify clean clear
clip clone close collect combine commit communicate compact compare compile complete compose
compress compute concatenate condense configure connect construct consume continue convert copy
correct count cover create cut deal debug decide declare decode decompress defer define delete
deliver dequantize deregister derive describe deserialize destroy detach detect determine detokenize
disable discard dispatch distribute divide do download draft drain draw drop dump emit enable encode
end enqueue ensure enter enumerate estimate eval evaluate evict exchange execute exit expand expect
explain export extend extract fail fetch fill filter finalize find finish fit flatten flush fold
follow forget fork format forward free freeze fuse gather generate get give go group guard guess
handle hash hide hold import include increment index infer init initialise initialize inject insert
inspect install interleave intersect invalidate invert isolate iterate join judge keep kill label
launch lay leave limit link list load locate lock log look lower make map mark mask match
materialise materialize measure merge migrate mix modify move multiply name normalise normalize note
notify offload open order overlap override overwrite pack pad parallelise parallelize park parse
partition pass patch pause peek permute pick place plan plot poll pop postprocess predict prefer
prefetch prep prepare preprocess pretrain print process profile project prune publish pull push put
quantise quantize raise rank read rebuild receive recompute reconstruct record recover recv
redistribute reduce refresh refuse register reject release reload remember remove rename render
reorder repeat replace report request require reserve reset reshape reshard reshuffle resize resolve
restart restore resume retarget retry return reverse rewind rewrite roll rotate round route run
sample sanitise sanitize save scale scan scatter schedule score search seed select send serialize
serve set settle setup shard share shift show shuffle shut shutdown sign signal simulate skip slice
solve sort spawn split spread stack stamp start step stop store stream strip submit subtract suggest
sum summarise summarize supply suspend swap switch sync synchronise synchronize tag take teardown
tell test tie tile time tokenize touch trace track train transfer translate transpose traverse trim
truncate try tune turn undo unflatten unfreeze unload unpack unpad unpause unpermute unregister
unset unshard unwrap update upload use validate verify visit visualize wait walk warmup warn watch
weigh widen wipe wrap write yield zero
"""
VERBS = frozenset(_VERBS.split())
"""First words of good names of functions."""
_PREFIXES = (
    "is has have can may must should will are was needs requires supports to from as on with maybe"
)
PREFIXES = frozenset(_PREFIXES.split())
"""First words that also make a good name: of a question, a conversion, an event."""
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all")
DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|pylint|mypy|ruff|isort|!|-\*-)", re.IGNORECASE)


@dataclass
class TreeCounts:
    """What is counted over the files of a tree."""

    file_lines: list[int] = field(default_factory=list)
    room_lines: Counter[str] = field(default_factory=Counter)
    function_lines: list[int] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    classes: Counter[str] = field(default_factory=Counter)
    code_lines: int = 0
    comment_lines: int = 0
    imports: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def list_source_files(package: Path) -> list[Path]:
    """Return the Python files of a package, without those of tests and experiments."""
    files = (path for path in package.rglob("*.py"))
    return sorted(f for f in files if not LEFT_OUT & set(f.relative_to(package).parts[:-1]))


def measure_tree(package: Path) -> dict[str, Any]:
    """Return the measures of a package by name, as plain numbers."""
    counts = TreeCounts()
    for path in list_source_files(package):
        count_file(counts, package, path)
    functions = counts.function_lines
    share = 100 / max(len(functions), 1)
    rooms = {path.relative_to(package).parts[0] for path in list_source_files(package)}
    loose = {room for room in rooms if room.endswith(".py")} - {"__init__.py"}
    depth, cyclic = measure_imports(counts.imports)
    return {
        "files": len(counts.file_lines),
        "lines": sum(counts.file_lines),
        "room_lines": dict(counts.room_lines.most_common()),
        "file_median": round(statistics.median(counts.file_lines or [0])),
        "file_max": max(counts.file_lines, default=0),
        "functions": len(functions),
        "function_median": round(statistics.median(functions or [0])),
        "function_p90": compute_percentile(functions, 0.9),
        "function_max": max(functions, default=0),
        "long_functions": share * sum(lines > LONG for lines in functions),
        "short_functions": share * sum(lines <= SHORT for lines in functions),
        "not_verbs": share * sum(not begins_with_verb(name) for name in counts.functions),
        "classes": len(counts.classes),
        "repeated_classes": sum(number > 1 for number in counts.classes.values()),
        "comments": 100 * counts.comment_lines / max(counts.code_lines, 1),
        "rooms": len(rooms) - len(loose) - ("__init__.py" in rooms),
        "loose_modules": len(loose),
        "import_depth": depth,
        "rooms_in_cycles": cyclic,
    }


def compute_percentile(values: Sequence[int], share: float) -> int:
    """Return the least value that is at least as large as this share of the values; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0


def count_file(counts: TreeCounts, package: Path, path: Path) -> None:
    """Add a file to the counts.

    Args:
        counts: To which the file is added.
        package: The package.
        path: A file of it.
    """
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    counts.file_lines.append(len(text.splitlines()))
    code, comments = count_comments(text, tree)
    counts.code_lines += code
    counts.comment_lines += comments
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            counts.classes[node.name] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            counts.function_lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
            if not is_property(node):
                counts.functions.append(node.name)
    room = path.relative_to(package).parts[0]
    counts.room_lines[room] += len(text.splitlines())
    if room != "__init__.py":
        counts.imports[room.removesuffix(".py")] |= set(find_imported_rooms(tree, package, path))


def count_comments(text: str, tree: ast.Module) -> tuple[int, int]:
    """Return the lines of code and the lines with a comment.

    Code is what is neither blank, nor only a comment, nor a text that stands alone, such as a
    docstring. A comment may stand on a line of code. Instructions to tools (`noqa`) are none, and
    neither is what comes before the first statement, such as a licence.
    """
    strings = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            strings |= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    first = tree.body[0].lineno if tree.body else 0
    code, comments = set(), set()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] >= first and not DIRECTIVE.match(token.string):
                comments.add(token.start[0])
        elif token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - strings), len(comments)


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read as an attribute, whose name should be a noun."""
    names = (ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list)
    return any(name in ("property", "cached_property", "setter") for name in names)


def begins_with_verb(name: str) -> bool:
    """Return whether a function's name begins with a verb.

    This looks the first word up in `VERBS` and `PREFIXES`; the name of a special method, of a
    collective, of `main`, or without a word is as it has to be.
    """
    words = name.strip("_").lower()
    if name.startswith("__") or words in ("", "main") or words.startswith(COLLECTIVES):
        return True
    first = words.partition("_")[0]
    return first in VERBS or first in PREFIXES


def find_imported_rooms(tree: ast.Module, package: Path, path: Path) -> Iterator[str]:
    """Yield the folders and modules directly under the package that a file imports from others of
    them, also within functions.

    Args:
        tree: The parsed file.
        package: The package.
        path: Of the file.
    """
    parts = path.relative_to(package).parts
    own_room, folder = parts[0].removesuffix(".py"), list(parts[:-1])
    prefix = find_import_name(package)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = folder[: len(folder) - node.level + 1]
                base = ".".join([prefix, *above, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            room = name.removeprefix(f"{prefix}.").partition(".")[0]
            is_room = (package / room).is_dir() or (package / f"{room}.py").exists()
            if name.startswith(f"{prefix}.") and is_room and room != own_room:
                yield room


def find_import_name(package: Path) -> str:
    """Return the name under which a package is imported."""
    names, folder = [package.name], package.parent
    while (folder / "__init__.py").exists() or folder.name in ("megatron",):  # a namespace package
        names.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(names))


def measure_imports(imports: Mapping[str, Iterable[str]]) -> tuple[int, int]:
    """Return the length of the longest chain of imports between rooms, where rooms that import each
    other count as one, and how many rooms import each other."""
    reached = {room: find_reachable_rooms(imports, room) for room in imports}
    cycle = {room: frozenset({room, *(o for o in reached[room] if room in reached.get(o, ()))})
             for room in imports}  # fmt: skip
    depths: dict[frozenset[str], int] = {}

    def count_layers(rooms: frozenset[str]) -> int:
        if rooms not in depths:
            below = {cycle[o] for r in rooms for o in imports[r] if o in cycle and o not in rooms}
            depths[rooms] = 1 + max((count_layers(other) for other in below), default=0)
        return depths[rooms]

    longest = max((count_layers(rooms) for rooms in set(cycle.values())), default=0)
    return longest, sum(len(rooms) > 1 for rooms in cycle.values())


def find_reachable_rooms(imports: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Return the rooms that one imports, also through others."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for room in imports.get(waiting.pop(), ()):
            if room not in reached:
                reached.add(room)
                waiting.append(room)
    return reached
