"""Reads which arguments a shell script gives to a program, without running anything.

Assignments, arrays, expansions, `if` and `case` mean what they mean to the shell. Where only the
shell knows a condition, what is assigned within it becomes unknown. Loops are not followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megaframe.errors import UserError
from megaframe.migration.shell_script import MARK, ScriptCommand, ShellScript, mark_unknown
from megaframe.migration.shell_tests import decide_test
from megaframe.migration.shell_words import MAX_DEPTH, Piece, Token, split_script

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)(\+?)=")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")

Mode = Literal["run", "maybe", "skip"]
"""Whether commands are run, perhaps run (nobody knows the condition), or not run."""


def read_script(text: str, given: Mapping[str, str]) -> ShellScript:
    """Read a script.

    Args:
        text: The script.
        given: Values of variables, which replace what the script says.

    Raises:
        UserError: For what no shell would take, or what is nested or grows beyond all bounds.
    """
    script = ShellScript(given)
    _read_text(script, text, 1, 0)
    return script


def _read_text(script: ShellScript, text: str, line: int, depth: int) -> None:
    """Read a script, or a text within it that is one."""
    if depth > MAX_DEPTH:
        raise UserError(f"line {line}: scripts within scripts are nested too deep")
    outer = dict(script.variables), script.ended
    try:
        _Reader(script, split_script(text, line), depth).read_list((), "run")
    except UserError as error:
        if not depth:
            raise
        script.notes.append((line, f"the text that begins here is no script: {error}"))
    if depth:  # what a shell within a shell sets ends with it
        script.variables, script.ended = outer


@dataclass
class _Reader:
    """Walks over the tokens of one text."""

    script: ShellScript
    tokens: list[Token]
    depth: int
    place: int = 0
    nesting: int = 0

    def peek(self) -> Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def read_list(self, stops: tuple[str, ...], mode: Mode) -> str:
        """Read commands up to one of the words in `stops`, which is taken and returned."""
        self.nesting += 1
        if self.nesting > MAX_DEPTH:
            raise UserError(f"line {self.tokens[self.place - 1].line}: nested too deep")
        known: bool | None = True
        operator = "\n"
        stop = ""
        while token := self.peek():
            if token.operator in stops or (token.plain and token.plain in stops):
                self.place += 1
                stop = token.operator or token.plain
                break
            if token.operator and token.operator not in ("(", "(("):
                self.place += 1
                self._read_body(token, mode)
                operator = token.operator
                continue
            taken = _combine(mode, known, operator)
            succeeds = self._read_command(taken)
            known = known if taken == "skip" else succeeds
            operator = ""
        self.nesting -= 1
        if stops and not stop:
            raise UserError(f"the last line: {' or '.join(stops)} is missing")
        return stop

    def _read_body(self, token: Token, mode: Mode) -> None:
        if token.body and mode == "run" and not self.script.ended:
            _read_text(self.script, token.body, token.line, self.depth + 1)

    def _read_command(self, mode: Mode) -> bool | None:
        """Read a command; return whether it succeeds, None if that is unknown."""
        if self.script.ended:
            mode = "skip"
        token = self.tokens[self.place]
        word = token.operator or token.plain
        readers = {"if": self._read_if, "case": self._read_case}
        if word in readers:
            self.place += 1
            readers[word](mode)
        elif word in ("for", "while", "until", "select"):
            self.place += 1
            self.read_list(("do",), "skip")
            self.read_list(("done",), "maybe" if mode == "run" else mode)
        elif word in ("{", "("):
            self.place += 1
            self.read_list(("}" if word == "{" else ")",), mode)
        elif word == "((":
            self.place += 1
            self.read_list(("))",), "skip")
            return None
        elif word == "function" or self._begins_function():
            # Its body follows, and is read where it stands, as if it were called once.
            while (after := self.peek()) and after.plain != "{" and after.operator != "\n":
                self.place += 1
        else:
            return self._read_simple(mode)
        return True

    def _begins_function(self) -> bool:
        after = [token.operator for token in self.tokens[self.place + 1 : self.place + 3]]
        return after == ["(", ")"]

    def _read_if(self, mode: Mode) -> None:
        decided: bool | None = False  # whether an earlier branch is taken
        stop = "elif"
        while stop in ("elif", "else"):
            holds: bool | None = True
            if stop == "elif":
                holds = self._read_condition(mode)
            taken: Mode = mode
            if mode == "run" and (decided or holds is False):
                taken = "skip"
            elif mode == "run" and (holds is None or decided is None):
                taken = "maybe"
            stop = self.read_list(("elif", "else", "fi"), taken)
            decided = True if decided or holds else None if holds is None else decided

    def _read_condition(self, mode: Mode) -> bool | None:
        """Read what is between `if` and `then`."""
        begin = self.place
        results: list[bool | None] = []
        operators: list[str] = []
        while (token := self.peek()) and token.plain != "then":
            if token.operator and token.operator != "((":
                operators.append(token.operator)
                self.place += 1
            else:
                results.append(self._read_command("run" if mode == "run" else "skip"))
        if self.place == len(self.tokens):
            raise UserError(f"line {self.tokens[begin - 1].line}: an `if` has no `then`")
        self.place += 1
        joined = {*operators} - {";", "\n"}
        if len(results) == 1:
            return results[0]
        if joined == {"&&"}:
            return False if False in results else None if None in results else True
        if joined == {"||"}:
            return True if True in results else None if None in results else False
        return None

    def _read_case(self, mode: Mode) -> None:
        subject = self.script.join(self.tokens[self.place].pieces) if self.peek() else ""
        self.place += 2  # and `in`
        decided: bool | None = False
        unknown = MARK in subject
        while (word := self.peek()) and word.plain != "esac":
            if word.operator in ("\n", "(", ";;"):
                self.place += 1
                continue
            patterns = []
            while (word := self.peek()) and word.operator != ")":
                patterns.append(self.script.join(word.pieces))
                self.place += 1
            self.place += 1
            matches = "*" in patterns or subject in patterns
            taken: Mode = mode
            if mode == "run":
                taken = "maybe" if unknown else "run" if matches and not decided else "skip"
            decided = decided or matches
            if self.read_list((";;", "esac"), taken) == "esac":
                return
        self.place += 1

    def _read_simple(self, mode: Mode) -> bool | None:
        """Read assignments, and a command with its words."""
        line = self.tokens[self.place].line
        words: list[str] = []
        within_test = self.tokens[self.place].plain == "[["
        while token := self.peek():
            if token.operator and not (within_test and token.operator in ("&&", "||", "(", ")")):
                break
            self.place += 1
            if token.operator:
                words.append(token.operator)
                continue
            assigns = not words or words[0] in _DECLARING
            if assigns and self._assign(token, mode):
                continue
            if mode == "skip":
                words.append(token.plain)
                continue
            words += self.script.expand(token)
            within_test = within_test and words[-1:] != ["]]"]
        return self._judge(ScriptCommand(line, tuple(words)), mode) if words else True

    def _judge(self, command: ScriptCommand, mode: Mode) -> bool | None:
        name, *rest = command.words
        if mode == "skip" or not name:
            return None
        if name in ("[", "[[", "test"):
            return decide_test([word for word in rest if word not in ("]", "]]")], MARK)
        if name in ("exit", "return") and mode == "run":
            self.script.ended = self.script.ended or name == "exit"
        if name in ("source", "."):
            self._note(command.line, f"{' '.join(rest)} is not read; what it sets is unknown")
        if name == "unset":
            self.script.variables |= {word: ("",) for word in rest if word not in self.script.given}
        elif name not in _DECLARING:
            self.script.commands.append(command)
            for word in rest:
                if ".py" in word and " --" in word and name not in ("echo", "printf"):
                    _read_text(
                        self.script, word, command.line, self.depth + 1
                    )  # as of bash -c "..."
        return None if name not in ("true", ":") else True

    def _assign(self, token: Token, mode: Mode) -> bool:
        """Make an assignment; return whether the word is one."""
        first = token.pieces[0]
        match = _ASSIGNMENT.match(first.text) if first.kind == "text" and not first.quoted else None
        if match is None:
            return False
        name, adds = match[1], bool(match[2])
        if mode == "skip" or name in self.script.given:
            return True
        if mode == "maybe":
            if adds:
                self._note(token.line, f"what {name}+= adds is left out: only the shell knows if")
            else:
                self.script.variables[name] = (mark_unknown(f"${name}"),)
            return True
        before = self.script.variables.get(name, ()) if adds else ()
        if token.items is not None:
            words = [word for item in token.items for word in self.script.expand(item)]
            self.script.count(before)
            self.script.variables[name] = (*before, *words)
        else:
            rest = (Piece("text", first.text[match.end() :], False), *token.pieces[1:])
            value = self.script.join(rest)
            if value.count(MARK) == 2 and value[0] == value[-1] == MARK:
                value = mark_unknown(f"${name}")  # by the name that the script's reader looks for
            self.script.variables[name] = (" ".join(before) + value,)
        return True

    def _note(self, line: int, text: str) -> None:
        if (line, text) not in self.script.notes:
            self.script.notes.append((line, text))


def _combine(mode: Mode, known: bool | None, operator: str) -> Mode:
    """Return whether a command is run after another one and this operator."""
    if mode != "run" or operator not in ("&&", "||"):
        return mode
    if known is None:
        return "maybe"
    return "run" if known == (operator == "&&") else "skip"


@dataclass(frozen=True)
class Invocation:
    """How a script starts the training program: the line, the words before the program, such as
    torchrun's, and its arguments."""

    line: int
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]


def find_invocation(script: ShellScript) -> Invocation:
    """Return how a script starts a training program: the command of a Python file with the most
    options. A script without one may only list options, or set variables that hold them.

    Raises:
        UserError: If there are no options.
    """
    invocations = [
        Invocation(command.line, command.words[:place], command.words[place + 1 :])
        for command in script.commands
        for place, word in enumerate(command.words)
        if word.endswith(".py") and not re.search(r"\s", word)
    ]
    best = max(invocations, key=lambda one: _count_options(one.arguments), default=None)
    if best is not None and _count_options(best.arguments):
        return best
    listed = [command for command in script.commands if command.words[0].startswith("--")]
    texts = [word for command in listed for word in command.words]
    if not listed:
        values = [
            [part for text in words for part in text.split()] for words in script.variables.values()
        ]
        texts = [word for words in values if _count_options(words) for word in words]
    if not texts:
        raise UserError(
            "it has no command with options such as --num-layers 12, and no variable with them"
        )
    return Invocation(listed[0].line if listed else 1, (), tuple(texts))


def _count_options(words: Sequence[str]) -> int:
    return sum(word.startswith("--") for word in words)
