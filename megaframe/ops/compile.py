"""Compiled: a piece of plain code between matrix products and transfers, under torch.compile.

A piece is compiled for each set of shapes that it gets. A run has few of them. If new ones keep
coming, compiling would take longer than it saves, so they run the plain code, and one line says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_KINDS = 8
"""Kinds of arguments (shapes, strides, types) that one function is compiled for at most."""
_RECOMPILE_LIMIT = 1024
"""Limit on torch's count of compilations of one function in a process."""


class Compiled:
    """A function that is compiled for the first `MAX_KINDS` kinds of arguments that it gets."""

    def __init__(
        self, function: Callable[..., Any], backend: str, note: Callable[[str], None]
    ) -> None:
        """Prepare to compile; the first call does.

        Args:
            function: Takes tensors and plain values.
            backend: A backend of torch.compile.
            note: Called with a line to show.
        """
        self._plain, self._note = function, note
        # Static shapes: each kind of arguments has code of its own, which is why kinds are limited.
        self._fast = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
        self._met: set[tuple[Any, ...]] = set()
        self._warned = False

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, compiled unless its limit of kinds is reached."""
        # Torch compiles anew when any of these changes.
        kind = (torch.is_grad_enabled(), *map(_get_kind, arguments))
        if kind not in self._met:
            if len(self._met) == MAX_KINDS:
                self._warn_once()
                return self._plain(*arguments)
            self._met.add(kind)
            # Torch counts the compilations of a function over the whole process, thus all runs.
            with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
                return self._fast(*arguments)
        return self._fast(*arguments)

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            name = self._plain.__name__.strip("_")
            self._note(
                f"train.compile: {name} has met {MAX_KINDS} kinds of shapes; of others it runs "
                "as it is"
            )


def _get_kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.requires_grad
    return argument
