"""Kernels: which functions of the kernel library a run uses; plain torch code does the rest.

On a GPU the library `megaframe_kernels` is asked for every kernel. On a CPU it is asked only for
implementations that the config names; without any it is not even imported. Code that has a faster
kernel calls `find`, and its plain form follows right after the call. The plain form is the
reference, and is what runs on a CPU.
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
"""The kernels of the library that each key of the config section `kernels` selects. A kernel that
lacks the named implementation is chosen as under `auto`."""
_FAMILY = {name: family for family, names in FAMILIES.items() for name in names}
AUTO, PLAIN_CODE = "auto", "reference"
_FUSED_BY_A_COMPILER = "elementwise"


class Kernels:
    """The kernels of one run.

    choices: the chosen implementations, by name of the kernel.
    compiler: compiles a function of plain code; None to run plain code as it is.
    """

    def __init__(
        self,
        choices: Mapping[str, Choice] | None = None,
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self._choices = choices or {}
        self._compiler = compiler
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def has(self, name: str) -> bool:
        """Return whether there is a choice for this kernel; `find` may still refuse arguments."""
        return name in self._choices

    def active(self) -> dict[str, str]:
        """Return the implementation that runs for each kernel unless it refuses the arguments."""
        return {name: choice.active for name, choice in self._choices.items()}

    @property
    def fuses(self) -> bool:
        """Whether to compute a sum and its norm together, because something here can fuse them."""
        return self._compiler is not None or self.has("norm")

    def find(self, name: str, *arguments: Any, **options: Any) -> Callable[..., Any] | None:
        """Return the function that computes a kernel for these arguments, or None if the plain code
        should. Raises `UserError` if a named implementation does not support the arguments."""
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
        """Return `function`, a piece of plain code between products and transfers, or, with a
        compiler, the compiled form of `simply`: the same computation without the manual
        optimisations that speed up eager code. Without `simply`, `function` itself is compiled."""
        if self._compiler is None:
            return function
        simply = simply or function
        if simply not in self._compiled:
            self._compiled[simply] = self._compiler(simply)
        return self._compiled[simply]


NO_KERNELS = Kernels()
"""A run without kernels and compiler."""


def make_kernels(
    config: RunConfig,
    device: torch.device,
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Kernels:
    """Return the kernels of a run on a device. With a compiler, elementwise kernels are left to it
    unless the config names an implementation.

    Raises `UserError` for a named implementation that this machine does not have, and for
    `train.fp8` without the library, which also contains the plain code of 8-bit products.
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
