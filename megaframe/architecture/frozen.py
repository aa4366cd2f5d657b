"""Which parameters `optim.frozen` leaves untrained, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern in which `*` matches anything."""
    return re.compile(".*".join(map(re.escape, pattern.split("*"))))


def is_frozen(patterns: Sequence[str], name: str) -> bool:
    """Return whether any of the patterns is one of the parameter's name. One that begins with `!`
    is one of all names that the rest of it does not match."""
    return any(
        (compile_pattern(pattern.removeprefix("!")).fullmatch(name) is None)
        == pattern.startswith("!")
        for pattern in patterns
    )
