"""What the names in a source tree show: how many files one more of a kind touches, which functions
take the whole config, and how many types a word stands for. `measure_tree.py` shows them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tree_counts import list_source_files


@dataclass(frozen=True)
class Kind:
    """A kind of thing that people add, and one of it that trees have.

    Attributes:
        heading: The kind, with the name of the one that is looked for.
        pattern: Finds the identifiers, module names and texts that name it.
        outside: Finds those of one that an example brings from outside; empty without an example.
    """

    heading: str
    pattern: str
    outside: str = ""


KINDS = (
    Kind("an attention: MLA", r"(?i:mla|multi_?latent)|^latent$", r"(?i:differential)"),
    Kind("an optimizer: Lion", r"(?<![a-z])[Ll]ion(?![a-z])", r"(?i:adabelief)"),
    Kind("an optimizer that needs whole matrices: Muon", r"(?i:muon)"),
    Kind("a pipeline schedule: DualPipeV", r"(?i:dualpipe_?-?v)", r"EagerConfig"),
    Kind("a Hugging Face family: Qwen3", r"(?i:qwen_?3)(?![_.]?\d)"),
    Kind("a sink: TensorBoard", r"(?i:tensorboard|summary_?writer)", r"CsvSink"),
    Kind("a key: label smoothing", r"(?i:label_smoothing)", r"^belief_eps$"),
)
WHOLE_CONFIGS = {"megaframe": "RunConfig", "core": "TransformerConfig"}
"""The class of the whole config by the folder of a package; Megatron-core's is that of a model."""
WORDS = ("bucket", "chunk", "context", "layout", "mesh", "microbatch", "number", "run", "stage")
"""Words whose types are counted."""


def measure_names(package: Path) -> dict[str, Any]:
    """Return the measures of the names of a package: files that name one of each kind, functions
    that take the whole config with their files, and the types of the words."""
    texts = read_texts(package)
    trees = [ast.parse(text) for text in texts.values()]
    measures: dict[str, Any] = {
        "touched": {
            kind.heading: [
                path.relative_to(package).as_posix()
                for path in find_naming_files(texts, kind.pattern)
            ]
            for kind in KINDS
        },
        "word_types": count_word_types(trees, WORDS),
    }
    if whole := WHOLE_CONFIGS.get(package.name):
        taking = [sum(1 for _ in find_takers(tree, whole)) for tree in trees]
        measures |= {
            "config_functions": sum(taking),
            "config_files": sum(number > 0 for number in taking),
        }
    return measures


def measure_outside(checkout: Path) -> dict[str, int]:
    """Return how many files of a checkout's package and examples name what an example brings, for
    each kind of which one does."""
    texts = {**read_texts(checkout / "megaframe"), **read_texts(checkout / "examples")}
    counts = {
        kind.heading: len(find_naming_files(texts, kind.outside)) for kind in KINDS if kind.outside
    }
    return {heading: count for heading, count in counts.items() if count}


def read_texts(folder: Path) -> dict[Path, str]:
    """Return the Python files of a folder; none if it does not exist."""
    files = list_source_files(folder) if folder.is_dir() else []
    return {path: path.read_text(encoding="utf-8") for path in files}


def find_naming_files(texts: Mapping[Path, str], pattern: str) -> list[Path]:
    """Return the files of which a name matches a pattern. Parsing takes long, so only files are
    parsed in which a name may stand."""
    search = re.compile(pattern).search
    may_match = re.compile(pattern.replace("^", "").replace("$", "")).search
    return [
        path
        for path, text in texts.items()
        if search(path.stem) or (may_match(text) and any(map(search, list_names(ast.parse(text)))))
    ]


def list_names(tree: ast.Module) -> Iterator[str]:
    """Yield identifiers, imported modules, and texts that are no docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for attribute in ("id", "attr", "arg", "name", "module"):
            name = getattr(node, attribute, None)
            if isinstance(name, str):
                yield name
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def find_takers(tree: ast.Module, config: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of which a parameter is annotated as this class, or as it or None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(config in find_types(argument.annotation) for argument in arguments):
                yield node


def count_word_types(trees: Iterable[ast.Module], words: Iterable[str]) -> dict[str, int]:
    """Return with how many types parameters and fields are annotated that are called by a word
    alone. Optional types count as those without None; what has no annotation does not count."""
    types: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                types[node.arg] |= find_types(node.annotation)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                types[node.target.id] |= find_types(node.annotation)
    return {word: len(types[word]) for word in words}


def find_types(annotation: ast.expr | None) -> set[str]:
    """Return the types that an annotation allows besides None."""
    if annotation is None:
        return set()
    text = ast.unparse(annotation).strip("\"'")
    text = re.sub(r"^(?:typing\.)?Optional\[(.*)\]$", r"\1", text)
    return {part.strip() for part in re.split(r"\|(?![^\[]*\])", text)} - {"None", "Any"}
