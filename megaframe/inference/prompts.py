"""Files of prompts: one a line, or in a `.jsonl` file, an object with a `prompt` a line."""

from __future__ import annotations

import reprlib

from megaframe.errors import UserError
from megaframe.io.untrusted import parse_json, read_file

_LARGEST_FILE = 1 << 28
_KEY = "prompt"


def read_prompts(path: str) -> list[str]:
    """Return the prompts in a file, without empty lines.

    Args:
        path: A text file, or one that ends in `.jsonl`, whose prompts may have several lines.

    Raises:
        UserError: The file cannot be read, or has none.
    """
    try:
        text = read_file(path, _LARGEST_FILE).decode()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}") from None
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if not lines:
        raise UserError(f"{path} has no prompt; write one on each line")
    if not path.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_read_object(line, f"{path}:{number}") for number, line in lines]


def _read_object(line: str, place: str) -> str:
    """Return the prompt of a line of a `.jsonl` file."""
    try:
        value = parse_json(line.encode())
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    prompt = value.get(_KEY) if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise UserError(f'{place}: {reprlib.repr(value)} is no {{"{_KEY}": TEXT}}')
    return prompt
