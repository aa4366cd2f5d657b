"""Decides what `[ ... ]` and `[[ ... ]]` of a shell say, where that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_TEXTS: dict[str, Callable[[str, str], bool]] = {
    "=": lambda left, right: left == right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
}
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
}


def decide_test(words: Sequence[str], mark: str) -> bool | None:
    """Return whether a test holds; None if only the shell knows.

    Args:
        words: Those between the brackets.
        mark: What words contain that are unknown.
    """
    for operator, decisive in (("||", True), ("&&", False)):
        if operator in words:
            place = len(words) - 1 - [*reversed(words)].index(operator)
            sides = [decide_test(part, mark) for part in (words[:place], words[place + 1 :])]
            if decisive in sides:
                return decisive
            return None if None in sides else not decisive
    return _decide_one(words, mark)


def _decide_one(words: Sequence[str], mark: str) -> bool | None:
    if words and words[0] == "!":
        holds = _decide_one(words[1:], mark)
        return None if holds is None else not holds
    if any(mark in word for word in words):
        return None
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[0] == "-z") == (not words[1])
    if len(words) != 3:
        return None
    left, operator, right = words
    if operator in _TEXTS and not ("*" in right or "?" in right):
        return _TEXTS[operator](left, right)
    if operator in _NUMBERS and left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal():
        return _NUMBERS[operator](int(left[:19]), int(right[:19]))
    return None
