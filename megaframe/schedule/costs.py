"""Costs: the durations of a schedule's actions, measured or modelled.

Integers and fractions stay exact through the whole simulation, so that closed forms can be tested
for equality. Floats are allowed too, with their rounding.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from megaframe.errors import UserError

Seconds = int | float | Fraction
PerStage = Seconds | tuple[Seconds, ...]


@dataclass(frozen=True)
class ActionCosts:
    """The durations of actions.

    Attributes:
        forward, backward, weight: Seconds of F, of B (input gradient) and of W (weight gradient)
            for one microbatch on one stage: one number for all stages, or one for each. A backward
            that is not split takes B + W.
        comm: Seconds from sending a tensor to its arrival. Tensors on one directed edge between
            ranks are sent one after another.

    Raises:
        UserError: For times that are negative or not finite.
    """

    forward: PerStage = 1
    backward: PerStage = 1
    weight: PerStage = 1
    comm: Seconds = 0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "comm"):
            for value in _as_tuple(getattr(self, name)):
                if not (value >= 0 and math.isfinite(value)):
                    raise UserError(f"costs: {name} takes {value} s; use 0 or more")

    def list_by_stage(self, stages: int) -> tuple[tuple[Seconds, ...], ...]:
        """Return the seconds of F, of B and of W, each by stage.

        Raises:
            UserError: If they are given for another number of stages.
        """
        return tuple(
            _expand_to_stages(name, getattr(self, name), stages)
            for name in ("forward", "backward", "weight")
        )

    def divide_by_chunks(self, chunks: int) -> ActionCosts:
        """Return the costs of one stage, if these are those of a rank's whole share of `chunks`
        stages."""

        def divide(value: PerStage) -> PerStage:
            if isinstance(value, tuple):
                return tuple(_divide(seconds, chunks) for seconds in value)
            return _divide(value, chunks)

        return replace(
            self,
            forward=divide(self.forward),
            backward=divide(self.backward),
            weight=divide(self.weight),
        )


def _as_tuple(value: PerStage) -> tuple[Seconds, ...]:
    return value if isinstance(value, tuple) else (value,)


def _expand_to_stages(name: str, value: PerStage, stages: int) -> tuple[Seconds, ...]:
    if not isinstance(value, tuple):
        return (value,) * stages
    if len(value) != stages:
        raise UserError(f"costs: {name} is given for {len(value)} stages of a schedule of {stages}")
    return value


def _divide(value: Seconds, chunks: int) -> Seconds:
    return value / chunks if isinstance(value, float) else Fraction(value) / chunks


_FIELDS = {"F": "forward", "B": "backward", "W": "weight", "comm": "comm"}
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,12})?([eE][+-]?\d{1,2})?")


def parse_costs(text: str) -> ActionCosts:
    """Parse costs from a text such as `F=1,B=1,W=1,comm=0.1`, as exact fractions.

    Defaults are 1 for F, B and W, and 0 for comm.

    Raises:
        UserError: Naming the part that is wrong.
    """
    values: dict[str, Seconds] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _FIELDS:
            raise UserError(f"costs {text!r}: {part!r} is not one of F=, B=, W=, comm= and a time")
        if _FIELDS[name] in values:
            raise UserError(f"costs {text!r}: {name} is given twice; give it once")
        if not _NUMBER.fullmatch(number):
            raise UserError(
                f"costs {text!r}: {number!r} is not a time; use seconds such as {name}=1.5"
            )
        values[_FIELDS[name]] = Fraction(number)
    return replace(ActionCosts(), **values)
