"""What of a layer the ranks of an axis divide, and into how many parts it can be divided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaframe.config.parallel import ParallelConfig
from megaframe.errors import find_nearest_divisors


@dataclass(frozen=True)
class Limit:
    """Items that the ranks of an axis divide among each other.

    Attributes:
        axis: The key of the axis in `parallel`, such as `tensor`.
        items: How many items there are.
        name: What a message calls them, with their number, such as `model.heads=12`.
        even: Whether each rank needs equally many; otherwise each needs at least one.
    """

    axis: str
    items: int
    name: str
    even: bool = True

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message if the ranks cannot divide the items."""
        ranks = getattr(parallel, self.axis)
        if self.even and self.items % ranks:
            yield (
                f"parallel.{self.axis}={ranks} does not divide {self.name}; "
                f"use {find_nearest_divisors(self.items, ranks)}"
            )
        elif self.items < ranks:
            yield (
                f"parallel.{self.axis}={ranks} ranks are more than {self.name}; "
                f"use {self.items} or fewer"
            )
