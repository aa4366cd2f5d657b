"""What to do about a split that is too small: shares that work when they are given as they are
written.

What is held out may be divided otherwise at any time, because the training share comes first in a
source. So shares under which nothing else is trained on are looked for first: these work in a new
run, when it resumes, and when it is evaluated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaframe.config.data import Split as Shares

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_MOST_DECIMALS = 16


@dataclass(frozen=True)
class SplitSetting:
    """Where the shares of a source are set.

    Attributes:
        own_path: The source, if it has a split of its own; None: `data.split`.
        is_evaluation: Whether a run that has trained is evaluated.
    """

    own_path: str | None = None
    is_evaluation: bool = False

    def advise(self, shares: Shares | None, *, keeps_training: bool) -> str:
        """Return how to set these shares.

        Args:
            shares: The shares; None: none would do.
            keeps_training: Whether the run trains on the same under them.
        """
        if self.is_evaluation and (self.own_path or not keeps_training or shares is None):
            return "evaluate other text (--text)"
        if shares is None:
            return "use more text"
        if self.is_evaluation:
            return f"use --data-split {' '.join(map(str, shares))}"
        listed = str(list(shares))
        setting = f"split: {listed} for {self.own_path} in data.sources"
        if self.own_path is None:
            setting = f'"data.split={listed}"'
        return f"use {setting}" + (", also at a resume" if keeps_training else " in a new run")


def split_range(count: int, shares: Shares, split: Split) -> tuple[int, int]:
    """Return the part [first, last) that a split has of `count` documents or tokens. Its bounds are
    the rounded cumulative shares.

    Args:
        count: Number of documents or tokens.
        shares: Of training, validation and test.
        split: Which of them.
    """
    index = SPLITS.index(split)
    first, last = (round(min(1.0, sum(shares[:n])) * count) for n in (index, index + 1))
    return first, last


def enlarge_split(shares: Shares, split: Split, ends: Sequence[int], least: int) -> Shares | None:
    """Return shares near to the given ones under which a split has at least `least` tokens; None if
    there are too few, or none would be left to train on.

    Args:
        shares: Of training, validation and test.
        split: Which of them is too small.
        ends: Number of tokens before each document or token, and of all.
        least: Tokens that it needs.
    """
    count = len(ends) - 1
    if ends[count] - ends[0] < least:
        return None
    low, high = split_range(count, shares, "validation")
    low, high = max(low, 1), max(high, 1)  # something is trained on
    if split == "train":
        low = bisect_left(ends, ends[0] + least)
        high = max(low, high)
    elif split == "validation":
        high = max(high, bisect_left(ends, ends[low] + least))
        if high > count:
            low, high = bisect_right(ends, ends[count] - least) - 1, count
    else:
        high = min(high, bisect_right(ends, ends[count] - least) - 1)
        low = min(low, high)
    return _make_shares(count, low, high, shares[0]) if low > 0 else None


def _make_shares(count: int, low: int, high: int, first: float) -> Shares | None:
    """Return shares with few decimals by which validation is the part [low, high). first: the share
    of training that is kept if it does."""
    keeps = round(first * count) == low
    for decimals in range(2, _MOST_DECIMALS):
        train = first if keeps else round(low / count, decimals)
        validation = round(max(0.0, high / count - train), decimals)
        shares = (train, validation, round(max(0.0, 1 - train - validation), decimals))
        if abs(sum(shares) - 1) < 1e-9 and split_range(count, shares, "validation") == (low, high):
            return shares
    return None
