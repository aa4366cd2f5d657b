"""The trials of a sweep: the values that they try, from ranges and lists of config keys.

Nothing is kept of what has been tried: the values that a trial draws, and the name of its folder,
are functions of what is swept over. So the same sweep finds its own trials again, and a larger one
those of a smaller one.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import yaml

from megaframe.errors import UserError

_LONGEST_NAME = 100
"""Characters of a folder's name, without its digest."""
_RANGE = re.compile(r"(uniform|log):([^:]+):([^:]+)")


@dataclass(frozen=True)
class Range:
    """A range of numbers to draw from, uniformly, or uniformly in the logarithm."""

    low: float
    high: float
    log: bool

    def draw(self, name: str) -> float:
        """Return a number in the range, which `name` determines."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = random.Random(name).uniform(low, high)
        rounded = float(f"{math.exp(value) if self.log else value:.6g}")
        return min(max(rounded, self.low), self.high)


Space = Mapping[str, "Range | list[str]"]
"""What is tried for each key: a range, or a list of values in the format of a command line."""


@dataclass(frozen=True)
class Trial:
    """A run of a sweep.

    Attributes:
        keys: Its values, in the format of a command line.
    """

    keys: dict[str, str]

    @property
    def name(self) -> str:
        """Name of its folder: its values, by the last words of their keys. Where these cannot be
        told apart, or do not fit into a name, a digest of all of them is added."""
        words = [key.rsplit(".", 1)[-1] for key in self.keys]
        brief = len(set(words)) == len(words)
        text = ",".join(
            f"{key.rsplit('.', 1)[-1] if brief else key}={value}"
            for key, value in sorted(self.keys.items())
        )
        name = re.sub("[^A-Za-z0-9_.=,+-]+", "_", text)[:_LONGEST_NAME]
        if name == text:
            return name
        return f"{name}-{hashlib.blake2b(str(self).encode(), digest_size=5).hexdigest()}"

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in sorted(self.keys.items()))


def parse_space(texts: Sequence[str]) -> Space:
    """Parse KEY=[A, B], KEY=uniform:LOW:HIGH and KEY=log:LOW:HIGH into what is swept over. Raises
    `UserError` for other forms, for a repeated key, and if there is nothing to sweep over."""
    space: dict[str, Range | list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        range_match = _RANGE.fullmatch(values)
        if key in space:
            raise UserError(f"--sweep {key} is given twice; put all values into one list")
        if key in ("run.dir", "checkpoint.folder"):
            raise UserError(
                f"--sweep {key}: every trial has its own folder in run.dir; leave it out"
            )
        space[key] = _parse_range(text, range_match) if range_match else _parse_values(text, values)
    if not space:
        raise UserError(
            "there is nothing to sweep over; give --sweep 'optim.lr=[1e-3, 3e-3]', for example"
        )
    return space


def _parse_range(text: str, match: re.Match[str]) -> Range:
    """Return a range. text: for messages. match: match of `_RANGE`. Raises `UserError` if the range
    is empty or its bounds are not numbers."""
    try:
        low, high = float(match[2]), float(match[3])
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf or (match[1] == "log" and low <= 0):
        raise UserError(
            f"--sweep {text}: LOW and HIGH are numbers, LOW < HIGH, and above 0 for log"
        )
    return Range(low, high, match[1] == "log")


def _parse_values(text: str, listed: str) -> list[str]:
    """Return the values of a list, each in the format of a command line. Raises `UserError` if it
    is not a list, or is empty."""
    try:
        values = yaml.safe_load(listed)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, list) or not values:
        raise UserError(
            f"--sweep {text} is not KEY=[A, B], KEY=uniform:LOW:HIGH or KEY=log:LOW:HIGH"
        )
    return [json.dumps(value) if not isinstance(value, str) else value for value in values]


def make_trials(space: Space, times: int, seed: int) -> list[Trial]:
    """Return every combination of the lists' values, `times` times, each time with new numbers from
    the ranges.

    Args:
        space: Values of each key, a list or a range.
        times: Number of times.
        seed: Of the numbers from the ranges.

    Raises:
        UserError: This would repeat trials.
    """
    if times < 1:
        raise UserError(f"--trials {times} is too few; use 1 or more")
    ranges = {key: values for key, values in space.items() if isinstance(values, Range)}
    lists = {key: values for key, values in space.items() if not isinstance(values, Range)}
    if times > 1 and not ranges:
        raise UserError(
            f"--trials {times} would repeat the same runs, because no key has a range; sweep over "
            f"run.seed={list(range(times))} instead"
        )
    trials = {}
    for number, combination in product(range(times), product(*lists.values())):
        keys = dict(zip(lists, combination, strict=True))
        name = f"{seed} {number} {Trial(keys)}"
        numbers = {key: f"{values.draw(f'{name} {key}')}" for key, values in ranges.items()}
        trial = Trial({key: {**keys, **numbers}[key] for key in space})
        trials[trial.name] = trial
    return list(trials.values())
