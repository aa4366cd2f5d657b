"""Renders a chat template, as a program of its own: `python -I render_chat.py`, JSON in and out.

A template is a program, and may come from elsewhere. So it runs in jinja2's sandbox, as in
transformers, and in a process whose time, memory and output are limited, because the sandbox bounds
neither loops nor the size of texts.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY, MOST_TEXT = 1 << 30, 1 << 22
"""Limits of the bytes of address space, and of the characters of the text."""


class _Generation(Extension):
    """`{% generation %}`, which marks what an assistant says, and changes nothing in it. With
    `environment.mark`, that text stands before and after it."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Any) -> Any:
        """Return the statements inside."""
        next(parser.stream)
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        mark = getattr(self.environment, "mark", "")
        if not mark:
            return inside
        ends = [nodes.Output([nodes.TemplateData(mark)]) for _ in range(2)]
        return [ends[0], *inside, ends[1]]


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **keys: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **keys)


def render(template: str, variables: dict[str, Any], mark: str = "") -> str:
    """Return the text of a template, without limits.

    Args:
        template: Its source.
        variables: What it sees: messages, special tokens, whether an answer is to follow.
        mark: Stands before and after what `{% generation %}` marks.

    Raises:
        jinja2.TemplateError: It is wrong, does what the sandbox refuses, or raises an error itself.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.extend(mark=mark)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    pieces, length = [], 0
    for piece in environment.from_string(template).generate(**variables):
        length += len(piece)
        if length > MOST_TEXT:
            raise jinja2.TemplateError(f"it makes more than {MOST_TEXT:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def _main() -> None:
    """Read {"template", "variables", "seconds", "mark"}, where there are variables for each text,
    and write {"texts"} or {"error"}. More seconds of processor time end the process."""
    given = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    answer: dict[str, Any]
    try:
        template, mark = given["template"], given["mark"]
        answer = {"texts": [render(template, each, mark) for each in given["variables"]]}
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY >> 20:,} MiB of memory"}
    except Exception as error:  # a template can raise any
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
