"""Kernels: which fast functions a run computes with; where it has none, plain torch code stands.

On a GPU the library `megaframe_kernels` is asked for everything; on a CPU for what the config names
and nothing else, so that a run there does not even import it. Code that has a fast form asks `find`
at the place of its plain form, which stays right behind it: the truth, and what runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaframe.config import RunConfig
from megaframe.errors import UserError

if TYPE_CHECKING:
    from megaframe_kernels.selection import Choice

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "elementwise": ("norm", "activation", "rotary"),
    "attention": ("attention", "attention_backward"),
    "loss": ("loss",),
    "update": ("adamw", "square_sum"),
    "experts": (
        "router",
        "expert_order",
        "permute",
        "unpermute",
        "grouped_product",
        "grouped_gradient",
    ),
    "fp8": (
        "quantise",
        "scaled_product",
        "quantise_experts",
        "quantise_columns",
        "grouped_scaled_product",
        "grouped_scaled_gradient",
    ),
}
"""The kernels of the library that each key of `kernels` is about. Those that lack a named
implementation are chosen as without a name."""
_FAMILY = {name: family for family, names in FAMILIES.items() for name in names}
AUTO, PLAIN_CODE = "auto", "reference"
_FUSED_BY_A_COMPILER = "elementwise"


class Kernels:
    """choices: by the name of a kernel. compiler: makes a fast function of plain code, None where
    that runs as it is."""

    def __init__(
        self,
        choices: Mapping[str, Choice] | None = None,
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self._choices = choices or {}
        self._compiler = compiler
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def has(self, name: str) -> bool:
        """Whether `find` may find something."""
        return name in self._choices

    def active(self) -> dict[str, str]:
        """What runs for each kernel where nothing is refused."""
        return {name: choice.active for name, choice in self._choices.items()}

    @property
    def fuses(self) -> bool:
        """Whether a sum is better made together with the norm of it."""
        return self._compiler is not None or self.has("norm")

    def find(self, name: str, *arguments: Any, **options: Any) -> Callable[..., Any] | None:
        """What computes a kernel of these arguments, None where the plain code does. Raises
        `UserError` where an implementation was named that does not take them."""
        choice = self._choices.get(name)
        if choice is None:
            return None
        from megaframe_kernels.kernel import KernelError

        try:
            run = choice.find(*arguments, **options)
        except KernelError as error:
            raise UserError(f"kernels.{_FAMILY[name]}: {error}; use another, or {AUTO}") from None
        return None if run is choice.kernel.reference else run

    def piece(
        self, function: Callable[..., Any], simply: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """A piece of plain code between products and transfers; where that is wanted compiled, from
        how it is said `simply`, without what makes it fast as it is."""
        if self._compiler is None:
            return function
        simply = simply or function
        if simply not in self._compiled:
            self._compiled[simply] = self._compiler(simply)
        return self._compiled[simply]


NO_KERNELS = Kernels()
"""Of a run that has none."""


def make_kernels(
    config: RunConfig,
    device: torch.device,
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Kernels:
    """Those of a run on a device. What a compiler fuses is left to it where nothing is named.

    Raises `UserError` for a named implementation that this machine does not have, and where 8 bits
    are asked for without the library, which has their plain code too.
    """
    asked = {key: getattr(config.kernels, key) for key in FAMILIES}
    named = {key: name for key, name in asked.items() if name not in (AUTO, PLAIN_CODE)}
    wanted = [key for key, name in asked.items() if name != PLAIN_CODE]
    if device.type != "cuda":
        wanted = list(named)
    elif compiler is not None:
        wanted = [key for key in wanted if key in named or key != _FUSED_BY_A_COMPILER]
    needing = {f"kernels.{key}={name}": f"kernels.{key}={AUTO}" for key, name in named.items()}
    if config.train.fp8 != "none":
        needing[f"train.fp8={config.train.fp8}"] = "train.fp8=none"
    if not (wanted or needing):
        return Kernels({}, compiler)
    try:
        from megaframe_kernels.kernel import KernelError
        from megaframe_kernels.registry import KERNELS
        from megaframe_kernels.selection import select
    except ImportError as error:
        if not needing:
            return Kernels({}, compiler)
        what, instead = next(iter(needing.items()))
        raise UserError(
            f"{what} needs the library of kernels, which needs Triton: {error}; use {instead}"
        ) from None
    choices: dict[str, Choice] = {}
    for key in wanted:
        used = {kernel: KERNELS[kernel] for kernel in FAMILIES[key]}
        overrides = {
            kernel: named[key]
            for kernel in used
            if key in named and named[key] in KERNELS[kernel].implementations
        }
        try:
            choices |= select(used, overrides)
        except KernelError as error:
            raise UserError(f"kernels.{key}: {error}; use another, or {AUTO}") from None
    return Kernels(choices, compiler)
