"""Make training data from the sources of Python's standard library, which every machine has.

The same Python installation always gives the same data. Tests are left out, because much of them is
code of no meaning and some systems do not ship them. Kinds:

sources    each file is a document, in the order of paths
prose      each module's docstrings are a document, and each topic of the language's help
dialogues  questions about functions and their answers, from docstrings, for preprocess_chat.py
questions  questions of several choices whose answers are in no dialogue, for evaluate.tasks
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaframe.errors import UserError, explain_failed_write, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.regular_file import replace_file

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TOPICS = "pydoc_data/topics.py"
_FEWEST, _MOST = 20, 200
"""Characters of a description, and at most of a call."""
_CHOICES = 4
_HELD_OUT = 0.1
"""Share of the descriptions that are asked for in questions and not learnt."""

_GREETINGS = (
    ("Hello.", "Hello. Ask me about a function of Python's standard library."),
    ("Who are you?", "I am a small language model. I describe functions of Python's library."),
    ("What can you do?", "I can say what a function of Python's standard library does."),
    ("Thank you.", "You are welcome."),
)
_ASKED = ("What does {name} do?", "What is {name} for?", "Explain {name}.", "Describe {name}.")
_ASKED_CALL = ("How is it called?", "Which parameters does it have?", "How do I call it?")
_ASKED_MODULE = ("Where is it?", "In which module is it?", "What do I import for it?")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, metavar="FILE.jsonl")
    parser.add_argument("--kind", choices=tuple(_KINDS), default="sources", help="default: sources")
    parser.add_argument("--megabytes", type=float, default=8.0, help="at most (default: 8)")
    options = parser.parse_args()
    library = Path(sysconfig.get_path("stdlib"))
    rows = _KINDS[options.kind](library)
    count, size = write(rows, Path(options.output), int(options.megabytes * 1e6))
    print(f"{options.output}: {count:,} documents of {library}, {size / 1e6:.1f} MB")


def write(rows: Iterable[dict[str, Any]], output: Path, limit: int) -> tuple[int, int]:
    """Write rows as lines of JSON, completely or not at all.

    Args:
        rows: The rows.
        output: The file.
        limit: Bytes of text at most; the first row beyond it ends the file.

    Returns:
        The number of rows and of bytes.

    Raises:
        UserError: If no row is below the limit, or the file cannot be written.
    """
    count = size = 0
    with explain_failed_write(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(output) as file:
            for row in rows:
                line = json.dumps(row)
                length = len(str(row.get("text", line)).encode())
                if size + length > limit:
                    break
                size += length
                file.write(f"{line}\n".encode())
                count += 1
            if not count:
                raise UserError(f"no row under {limit} bytes for {output}")
    return count, size


def read_sources(library: Path) -> Iterator[dict[str, Any]]:
    """Yield each source that is UTF-8 and not empty."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if _LEFT_OUT & set(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield {"path": name.as_posix(), "text": text}


def read_prose(library: Path) -> Iterator[dict[str, Any]]:
    """Yield the docstrings of each module, and each topic of the language's help."""
    for row in read_sources(library):
        if row["path"] == _TOPICS:
            topics = ast.literal_eval(ast.parse(row["text"]).body[-1].value)
            for name, text in topics.items():
                yield {"path": f"{_TOPICS}:{name}", "text": text}
        elif text := read_docstrings(**row):
            yield {"path": row["path"], "text": text}


def read_described_items(library: Path) -> Iterator[Described]:
    """Yield what all modules describe."""
    for row in read_sources(library):
        yield from read_described(**row)


@dataclass(frozen=True)
class Described:
    """A function, class or method with a docstring.

    Attributes:
        module: Dotted name of its module.
        name: Its name, after that of its class if it is a method.
        call: It with its parameters.
        description: First paragraph of its docstring, on one line.
    """

    module: str
    name: str
    call: str
    description: str

    @property
    def path(self) -> str:
        """Its name after that of its module."""
        return f"{self.module}.{self.name}"

    @property
    def is_held_out(self) -> bool:
        """Whether nothing is learnt of it."""
        return self.draw("split", 1 << 16) < _HELD_OUT * (1 << 16)

    def choose(self, texts: Sequence[str], purpose: str) -> str:
        """Return one of several texts, always the same one."""
        return texts[self.draw(purpose, len(texts))]

    def draw(self, purpose: str, below: int) -> int:
        """Return a number from 0 to below - 1, always the same one for a purpose."""
        digest = hashlib.sha256(f"{purpose}:{self.description}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % below


def read_described(path: str, text: str) -> Iterator[Described]:
    """Yield what a module describes: public functions, classes, and methods of classes.

    Args:
        path: The file below the library, such as `email/message.py`.
        text: Its source.
    """
    module = _name_module(path)
    if any(part.startswith("_") for part in module.split(".")):
        return
    for name, node in _list_public(_parse(text)):
        description = read_first_paragraph(node)
        call = _format_call(name, node)
        if _FEWEST <= len(description) <= _MOST and len(call) <= _MOST:
            yield Described(module, name, call, description)


def read_docstrings(path: str, text: str) -> str:
    """Return the docstrings of a module, each of a function or class after its call."""
    tree = _parse(text)
    parts = [ast.get_docstring(tree) or ""]
    for name, node in _list_public(tree):
        if docstring := ast.get_docstring(node):
            parts.append(f"{_name_module(path)}.{_format_call(name, node)}\n\n{docstring}")
    return "\n\n".join(part for part in parts if part)


def _name_module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _parse(text: str) -> ast.Module:
    """Return a source's tree, which is empty if it has none: some files are templates."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def read_first_paragraph(node: Definition) -> str:
    """Return the first paragraph of a docstring on one line; empty if there is none."""
    paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def _list_public(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, Definition) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def _format_call(name: str, node: Definition) -> str:
    """Return a call with the names and defaults of all parameters but the object's own."""
    if isinstance(node, ast.ClassDef):
        made_by = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not made_by:
            return f"{name}()"
        node = made_by[0]
    text = ast.unparse(node.args)
    for own in ("self", "cls"):
        text = text.removeprefix(own).removeprefix(", ")
    return f"{name}({text})"


def make_dialogues(items: Iterable[Described]) -> Iterator[dict[str, Any]]:
    """Yield a dialogue for each description that is not held out, and greetings after every
    hundredth, as `preprocess_chat.py` reads them.

    What is asked, and in which words, follows from a hash of the description alone, so one that
    several functions share is either learnt or held out.
    """
    for number, item in enumerate(item for item in items if not item.is_held_out):
        turns = [(item.choose(_ASKED, "asked").format(name=item.path), item.description)]
        follow_up = item.choose(("call", "module", "both", "none"), "follow-up")
        if follow_up in ("call", "both"):
            turns.append((item.choose(_ASKED_CALL, "call"), item.call))
        if follow_up in ("module", "both"):
            turns.append((item.choose(_ASKED_MODULE, "module"), f"It is in {item.module}."))
        if item.choose(("ask", *["describe"] * 9), "greeting") == "ask":
            turns.insert(0, _GREETINGS[item.draw("which", len(_GREETINGS) - 1)])
        yield _as_messages(turns)
        if number % 100 == 0:
            for greeting in _GREETINGS:
                yield _as_messages([greeting])


def make_questions(items: Iterable[Described]) -> Iterator[dict[str, Any]]:
    """Yield a question for each description that is held out, with this description among others,
    as a task of lm-evaluation-harness reads them."""
    held_out = {item.description: item for item in items if item.is_held_out}
    rows = sorted(
        held_out.values(), key=lambda item: (item.draw("order", 1 << 32), item.description)
    )
    for place, item in enumerate(rows):
        choices = [rows[(place + step) % len(rows)].description for step in range(_CHOICES)]
        answer = item.draw("answer", _CHOICES)
        choices[0], choices[answer] = choices[answer], choices[0]
        question = _ASKED[0].format(name=item.path)
        yield {"question": question, "choices": choices, "answer": answer}


def _as_messages(turns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    messages = []
    for asked, answer in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


_KINDS = {
    "sources": read_sources,
    "prose": read_prose,
    "dialogues": lambda library: make_dialogues(read_described_items(library)),
    "questions": lambda library: make_questions(read_described_items(library)),
}


if __name__ == "__main__":
    with allow_closed_output(), report_errors():
        main()
