"""What a shell script has set so far, and what its words become by expansion.

What only the shell could know (the environment, `$(...)`, a file that is read in) is unknown: it
stays in the words, marked, and is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megaframe.errors import UserError
from megaframe.migration.literals import compute_integer
from megaframe.migration.shell_words import MAX_DEPTH, Piece, Token, split_word

MAX_CHARACTERS = 1_000_000
"""Characters that expansions of a script may make in all."""
MARK = "\0"
"""Stands around the name of what is unknown, in the words of a script."""
_NAME = r"[A-Za-z_][A-Za-z_0-9]*|[0-9@*#?$!-]"
_PARAMETER = re.compile(rf"({_NAME})(?:\[([^\]]*)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)


def mark_unknown(name: str) -> str:
    """Return the word for something unknown."""
    # No blank, at which it would be split; the one that stands for it is shown as one.
    return MARK + "\u00a0".join(name.split()) + MARK


@dataclass(frozen=True)
class ScriptCommand:
    """A command that the script would run: its line, and its words with all that is known."""

    line: int
    words: tuple[str, ...]


@dataclass
class ShellScript:
    """What a script sets and runs.

    Attributes:
        given: Values of variables from outside, which replace what the script says.
        variables: The words of each variable; one for all but arrays.
        commands: Those that would be run, in order, also those within texts.
        notes: What could not be read, by line.
    """

    given: Mapping[str, str]
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    commands: list[ScriptCommand] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    characters: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.variables |= {name: (value,) for name, value in self.given.items()}

    def expand(self, token: Token) -> list[str]:
        """Return the words that a word becomes."""
        words: list[str] = [""]
        present = False
        for piece in token.pieces:
            values = self._expand_piece(piece)
            if piece.quoted or piece.kind == "text":
                present = present or piece.quoted or bool(piece.text)
                parts = list(values)
            else:
                parts = [part for value in values for part in re.split(r"[ \t\n]+", value)]
            if piece.quoted and piece.kind == "parameter" and not re.search(r"\[@\]$", piece.text):
                parts = [" ".join(parts)]
            if parts:
                words[-1] += parts[0]
                words += parts[1:]
        self.count(words)
        return [word for word in words if word or present]

    def count(self, words: Sequence[str]) -> None:
        """Count what expansions have made.

        Raises:
            UserError: If it is beyond all bounds.
        """
        self.characters += sum(map(len, words)) + len(words)
        if self.characters > MAX_CHARACTERS:
            raise UserError(f"its variables grow to more than {MAX_CHARACTERS:,} characters")

    def join(self, pieces: Sequence[Piece]) -> str:
        """Return what pieces become where nothing is split, as on the right of `NAME=`."""
        text = "".join(" ".join(self._expand_piece(piece)) for piece in pieces)
        self.count([text])
        return text

    def _expand_piece(self, piece: Piece, depth: int = 0) -> tuple[str, ...]:
        if piece.kind == "text":
            return (piece.text,)
        if piece.kind == "command":
            return (mark_unknown(f"$({piece.text[:40]})"),)
        if piece.kind == "arithmetic":
            return (self.compute(piece.text),)
        return self._expand_parameter(piece.text, depth)

    def compute(self, text: str) -> str:
        """Return the value of an arithmetic expression, or the word for something unknown."""
        plain = re.sub(rf"\$\{{({_NAME})\}}|\$({_NAME})", r" \1\2 ", text)

        def look_up(name: str) -> int | None:
            value = self.variables.get(name, ("",))
            return (
                int(value[0]) if len(value) == 1 and re.fullmatch(r"-?\d{1,18}", value[0]) else None
            )

        number = compute_integer(plain, look_up)
        return mark_unknown(f"$(({text[:40]}))") if number is None else str(number)

    def _expand_parameter(self, text: str, depth: int) -> tuple[str, ...]:
        match = _PARAMETER.fullmatch(text)
        if match is None or depth > MAX_DEPTH:
            return (mark_unknown(f"${{{text[:40]}}}"),)
        name, index, operator, word = match.groups()
        value = self.variables.get(name)
        if index and index not in "@*":
            value = self._pick_item(value, index)
        # What the environment may have set has here its default, as on a machine that has not.
        is_set = value is not None and (any(value) or not (operator or "").startswith(":"))
        if operator and operator[-1] in "-=" and not is_set:
            value = (self._join_nested(word, depth),)
            if operator[-1] == "=":
                self.variables[name] = value
        elif operator and operator[-1] == "+":
            value = (self._join_nested(word, depth),) if is_set else ("",) if value else None
        return (mark_unknown(f"${name}"),) if value is None else value

    def _join_nested(self, word: str, depth: int) -> str:
        parts = [" ".join(self._expand_piece(piece, depth + 1)) for piece in split_word(word)]
        self.count(parts)
        return "".join(parts)

    def _pick_item(self, value: tuple[str, ...] | None, index: str) -> tuple[str, ...] | None:
        number = self.compute(index)
        if value is None or not number.isdigit():
            return None
        return value[int(number) : int(number) + 1] or ("",)
