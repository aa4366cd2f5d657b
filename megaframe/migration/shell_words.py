"""Splits a shell script into words and operators. Nothing is expanded here.

A word keeps its pieces apart (text, and what the shell would replace), each with whether it is
quoted, because that decides whether the result of an expansion is split again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megaframe.errors import UserError

MAX_DEPTH = 16
"""Deepest nesting of expansions, of compound commands, and of scripts in texts."""
_OPERATORS = ("&&", "||", ";;", "((", "))", ";", "&", "|", "(", ")", "\n")
_REDIRECTION = re.compile(r"[0-9]*(?:<<<|<<-?|<&|>>|>&|>\||&>>|&>|<|>)")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[0-9@*#?$!-]")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z_0-9]*\+?=")
_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)*(?:#[^\n]*)?")
_TEXT = re.compile(r"""[^'"\\$`\s;&|()<>]+|.""", re.DOTALL)
_QUOTED_TEXT = re.compile(r"""[^"\\$`]+|.""", re.DOTALL)

Kind = Literal["text", "parameter", "arithmetic", "command"]


@dataclass(frozen=True)
class Piece:
    """A part of a word: its text, or what is inside `${...}`, `$((...))` or `$(...)`."""

    kind: Kind
    text: str
    quoted: bool


@dataclass(frozen=True)
class Token:
    """A word, or an operator.

    Attributes:
        line: Its line, counted from 1.
        pieces: Those of a word.
        items: The words in `NAME=(...)`, whose `pieces` are `NAME=`; None for all else.
        operator: The operator; empty for a word.
        body: The text of a here-document that begins here.
    """

    line: int
    pieces: tuple[Piece, ...] = ()
    items: tuple[Token, ...] | None = None
    operator: str = ""
    body: str = ""

    @property
    def plain(self) -> str:
        """Its text if it is a word without quotes and expansions, as reserved words are."""
        if len(self.pieces) != 1 or self.pieces[0].quoted or self.pieces[0].kind != "text":
            return ""
        return self.pieces[0].text


def split_script(text: str, line: int = 1) -> list[Token]:
    """Return the words and operators of a script.

    Args:
        text: The script.
        line: Number of its first line.

    Raises:
        UserError: If a quote or an expansion is not closed, or nested too deep.
    """
    return [*_Splitter(text, line).split()]


def split_word(text: str) -> tuple[Piece, ...]:
    """Return the pieces of a text in which blanks do not end a word, as that after `:-`."""
    return _Splitter(text, 1).read_word(ends="")


class _Splitter:
    def __init__(self, text: str, line: int) -> None:
        self.text, self.place, self.first_line = text, 0, line
        self.here_documents: list[str] = []
        self.depth = 0
        self._counted = (0, line)

    @property
    def line(self) -> int:
        place, line = self._counted
        self._counted = self.place, line + self.text.count("\n", place, self.place)
        return self._counted[1]

    def split(self, end: str = "") -> Iterator[Token]:
        """Yield tokens up to the operator `end`, which is taken; by default up to the end."""
        while self._skip_blanks():
            redirection = _REDIRECTION.match(self.text, self.place)
            if redirection:
                self.place = redirection.end()
                self._take_redirection(redirection[0].lstrip("0123456789"))
                continue
            operator = next((o for o in _OPERATORS if self.text.startswith(o, self.place)), "")
            if not operator:
                yield self._read_token()
                continue
            line = self.line
            self.place += len(operator)
            if end and operator == end:
                return
            yield Token(line, operator=operator)
            if operator == "\n":
                yield from self._read_here_documents()
        if end:
            raise UserError(f"line {self.line}: a ( is not closed by a )")

    def _skip_blanks(self) -> bool:
        """Move to the next token; return whether there is one."""
        blank = _BLANK.match(self.text, self.place)
        self.place = blank.end() if blank else self.place
        return self.place < len(self.text)

    def _take_redirection(self, operator: str) -> None:
        if not self._skip_blanks():
            return
        target = "".join(piece.text for piece in self.read_word())
        if operator in ("<<", "<<-"):
            self.here_documents.append(target)

    def _read_here_documents(self) -> Iterator[Token]:
        for mark in self.here_documents:
            line, begin = self.line, self.place
            end = begin
            while self.place < len(self.text):
                end = self.place
                newline = self.text.find("\n", end)
                self.place = len(self.text) if newline < 0 else newline + 1
                if self.text[end : self.place].strip() == mark:
                    break
                end = self.place
            yield Token(line, operator="\n", body=self.text[begin:end])
        self.here_documents = []

    def _read_token(self) -> Token:
        line, begin = self.line, self.place
        assignment = _ASSIGNMENT.match(self.text, begin)
        if assignment and self.text.startswith("(", assignment.end()):
            self.place = assignment.end() + 1
            with_depth = self._enter()
            items = tuple(token for token in self.split(")") if not token.operator)
            self.depth = with_depth
            return Token(line, (Piece("text", assignment[0], False),), items)
        return Token(line, self.read_word())

    def _enter(self) -> int:
        """Count one more level of nesting; return the number of those around it."""
        before, self.depth = self.depth, self.depth + 1
        if self.depth > MAX_DEPTH:
            raise UserError(f"line {self.line}: nested more than {MAX_DEPTH} deep")
        return before

    def read_word(self, ends: str = " \t\r\n;&|()<>") -> tuple[Piece, ...]:
        """Return the pieces of the word that begins here, up to one of `ends`."""
        pieces: list[Piece] = []
        while self.place < len(self.text) and self.text[self.place] not in ends:
            character = self.text[self.place]
            if character == "'":
                pieces.append(Piece("text", self._take_until("'", 1), True))
            elif character == '"':
                pieces += self._read_quoted()
            elif character == "\\":
                escaped = self.text[self.place + 1 : self.place + 2]
                pieces.append(Piece("text", "" if escaped == "\n" else escaped, True))
                self.place += 2
            elif character in "$`":
                pieces.append(self._read_expansion(quoted=False))
            else:
                run = _TEXT.match(self.text, self.place)
                text = run[0] if run else ""
                self.place += len(text)
                pieces.append(Piece("text", text, False))
        return tuple(pieces) or (Piece("text", "", False),)

    def _take_until(self, mark: str, skip: int) -> str:
        """Return the text after `skip` characters up to a mark, which is taken too."""
        begin = self.place + skip
        end = self.text.find(mark, begin)
        if end < 0:
            raise UserError(f"line {self.line}: a {self.text[self.place]} is not closed")
        self.place = end + len(mark)
        return self.text[begin:end]

    def _read_quoted(self) -> list[Piece]:
        line = self.line
        self.place += 1
        pieces = [Piece("text", "", True)]
        while self.place < len(self.text):
            character = self.text[self.place]
            if character == '"':
                self.place += 1
                return pieces
            if character == "\\" and self.text[self.place + 1 : self.place + 2] in '"\\$`\n':
                escaped = self.text[self.place + 1 : self.place + 2]
                pieces.append(Piece("text", escaped.strip("\n"), True))
                self.place += 2
            elif character in "$`":
                pieces.append(self._read_expansion(quoted=True))
            else:
                run = _QUOTED_TEXT.match(self.text, self.place)
                text = run[0] if run else ""
                self.place += len(text)
                pieces.append(Piece("text", text, True))
        raise UserError(f'line {line}: a " is not closed')

    def _read_expansion(self, quoted: bool) -> Piece:
        """Return what begins with a $ or a backtick."""
        begin = self.place
        if self.text[begin] == "`":
            return Piece("command", self._take_until("`", 1), quoted)
        if self.text.startswith("$((", begin):
            return Piece("arithmetic", self._take_nested("((", "))", quoted), quoted)
        if self.text.startswith("$(", begin):
            return Piece("command", self._take_nested("(", ")", quoted), quoted)
        if self.text.startswith("${", begin):
            return Piece("parameter", self._take_nested("{", "}", quoted), quoted)
        if self.text.startswith("$'", begin) and not quoted:
            return Piece("text", self._take_until("'", 2), True)
        name = _PARAMETER.match(self.text, begin + 1)
        self.place = name.end() if name else begin + 1
        return Piece("parameter", name[0], quoted) if name else Piece("text", "$", quoted)

    def _take_nested(self, opening: str, closing: str, quoted: bool) -> str:
        """Return what is between `$` with an opening and its closing, nested ones included."""
        first, last = opening[0], closing[0]
        quotes = "" if quoted else "|'[^']*'"  # within double quotes they are text
        marks = re.compile(rf"""\\.{quotes}|{re.escape(first)}|{re.escape(last)}""", re.DOTALL)
        begin, depth = self.place + 1 + len(opening), 0
        for match in marks.finditer(self.text, self.place + 1):
            depth += {first: 1, last: -1}.get(match[0], 0)
            if depth > MAX_DEPTH:
                break
            if depth == 0 and match[0] == last:
                self.place = match.end()
                return self.text[begin : match.end() - len(closing)]
        raise UserError(f"line {self.line}: a ${opening} is not closed, or holds too many others")
