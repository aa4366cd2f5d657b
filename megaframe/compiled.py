"""Compiled: a piece of plain code between products and transfers, by torch.compile.

Each is compiled for the shapes that it meets. A run has few; where there are ever new ones the
plain code runs, and one line says so, because compiling would take longer than it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 8
"""Kinds of arguments that one function is compiled for."""
_OF_A_PROCESS = 1024


class Compiled:
    """function: of tensors and plain values. backend: one of torch.compile. tell: is given a line
    to show."""

    def __init__(
        self, function: Callable[..., Any], backend: str, tell: Callable[[str], None]
    ) -> None:
        self._plain, self._tell = function, tell
        self._fast = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
        self._met: set[tuple[Any, ...]] = set()
        self._told = False

    def __call__(self, *arguments: Any) -> Any:
        """As the function."""
        kind = (torch.is_grad_enabled(), *map(_kind_of, arguments))
        if kind not in self._met:
            if len(self._met) == MOST:
                self._say()
                return self._plain(*arguments)
            self._met.add(kind)
            # Torch counts what was compiled of a function in the whole process, of all its runs.
            with torch._dynamo.config.patch(recompile_limit=_OF_A_PROCESS):
                return self._fast(*arguments)
        return self._fast(*arguments)

    def _say(self) -> None:
        if not self._told:
            self._told = True
            name = self._plain.__name__.strip("_")
            self._tell(
                f"train.compile: {name} has met {MOST} kinds of shapes; of others it runs as it is"
            )


def _kind_of(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.requires_grad
    return argument
