"""Kernels: which functions of the kernel library a run uses; plain torch code does the rest.

On a GPU the library `megaframe_kernels` is asked for every kernel. On a CPU it is asked only for
implementations that the config names; without any it is not even imported. Code that has a faster
kernel calls `find`, and its plain form follows right after the call. The plain form is the
reference, and is what runs on a CPU.

Nothing falls back without a word: `report` says which implementation each kernel uses and why not
a faster one, a kernel that refuses arguments is named when it first does, and a GPU without the
library is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megaframe.config import ModelConfig, RunConfig, TrainConfig
from megaframe.config.blocks import GatedDeltaNetConfig, Mamba2Config
from megaframe.config.parts import ActivationPart, NormPart
from megaframe.config.registry import list_parts
from megaframe.config.schema import KernelsConfig
from megaframe.errors import UserError

if TYPE_CHECKING:
    from megaframe_kernels.selection import KernelChoice

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "elementwise": ("norm", "activation", "rotary", "qkv_rotary"),
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
    "recurrent": ("delta_rule", "ssd"),
    "sparse_attention": ("sparse_attention", "attention_shares"),
    "codes": ("decode_blocks",),
}
"""The kernels of the library that each key of the config section `kernels` selects. A kernel that
lacks the named implementation is chosen as under `auto`."""
_FAMILY = {name: family for family, names in FAMILIES.items() for name in names}
AUTO, PLAIN_CODE = "auto", "reference"
_COMPILED_FAMILY = "elementwise"


class Kernels:
    """The kernels of one run."""

    def __init__(
        self,
        choices: Mapping[str, KernelChoice] | None = None,
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        plain: Mapping[str, str] | None = None,
        note: Callable[[str], None] = print,
        without: Mapping[str, str] | None = None,
    ) -> None:
        """Take over the choices.

        Args:
            choices: The chosen implementations, by name of the kernel.
            compiler: Compiles a function of plain code; None to run plain code as it is.
            plain: Why plain code runs, for each key of `FAMILIES` that the run uses without any
                choice.
            note: Called with a line to show, when an implementation first refuses arguments.
            without: Why there is no kernel for parts of this run's model, by part.
        """
        self._without = without or {}
        self._choices = {
            # A copy of the choice, which reports refusals to this run.
            name: replace(choice, on_refusal=partial(self._report_refusal, name))
            for name, choice in (choices or {}).items()
        }
        self._error: tuple[type[Exception], ...] = ()
        if self._choices:
            # Not at the top: without choices the library is not imported.
            from megaframe_kernels.kernel import KernelError

            self._error = (KernelError,)
        self._plain, self._note = plain or {}, note
        self._reported: set[tuple[str, str]] = set()
        self._compiler = compiler
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def _report_refusal(self, name: str, implementation: str, reason: str, instead: str) -> None:
        """Say once that an implementation does not take arguments, and what is tried instead."""
        if (name, implementation) not in self._reported:
            self._reported.add((name, implementation))
            slow = "warning: " if instead == PLAIN_CODE else ""
            self._note(
                f"{slow}kernel {name}: {instead} in place of {implementation}, which does not take "
                f"some of this run's inputs: {reason}"
            )

    def report(self) -> Iterator[str]:
        """Yield lines for the start of the log: which implementation each kernel uses, by key of
        `FAMILIES`, and why not a faster one."""
        if self._plain and not self._choices and len(set(self._plain.values())) == 1:
            yield f"kernels: plain code, because {next(iter(self._plain.values()))}"
            return
        yield "kernels, and why not faster ones:"
        for key, names in FAMILIES.items():
            choices = [self._choices[name] for name in names if name in self._choices]
            names_by_choice: dict[str, list[str]] = {}
            for choice in choices:
                names_by_choice.setdefault(_describe_choice(choice), []).append(choice.kernel.name)
            lines = [f"{', '.join(names)} {how}" for how, names in names_by_choice.items()]
            if key in self._plain:
                lines.append(f"plain code, because {self._plain[key]}")
            if lines:
                yield f"  {key}: {'; '.join(lines)}"
        for part, reason in self._without.items():
            yield f"  {part}: plain code, because {reason}"

    def record(self) -> dict[str, Any]:
        """Return what `report` says for JSON: for each kernel the implementation that is used, and
        the faster ones that are not with the reason."""
        chosen = {
            name: {"uses": choice.active, "not": dict(choice.absent)}
            for name, choice in self._choices.items()
        }
        reasons = {**self._plain, **self._without}
        plain = {key: {"uses": PLAIN_CODE, "why": why} for key, why in reasons.items()}
        return {**chosen, **plain}

    def has(self, name: str) -> bool:
        """Return whether there is a choice for this kernel; `find` may still refuse arguments."""
        return name in self._choices

    def list_active(self) -> dict[str, str]:
        """Return the implementation that runs for each kernel unless it refuses the arguments."""
        return {name: choice.active for name, choice in self._choices.items()}

    def explain_refusal(self, name: str, *arguments: Any, **options: Any) -> str | None:
        """Return why plain code computes a kernel for these arguments, or None if it does not.

        Args:
            name: Of the kernel.
            *arguments: With which it would be called.
            **options: With which it would be called.
        """
        choice = self._choices.get(name)
        if choice is None:
            return f"{name} has no implementation but the reference here"
        return choice.explain_fallback(*arguments, **options)

    @property
    def fuses(self) -> bool:
        """Whether to compute a sum and its norm together, because something here can fuse them."""
        return self._compiler is not None or self.has("norm")

    def find(self, name: str, *arguments: Any, **options: Any) -> Callable[..., Any] | None:
        """Return the function that computes a kernel for these arguments.

        Args:
            name: The kernel's name.
            arguments: The positional arguments of a call.
            options: The keyword arguments of a call.

        Returns:
            The function, or None if the plain code should compute it.

        Raises:
            UserError: If a named implementation does not support the arguments.
        """
        choice = self._choices.get(name)
        if choice is None:
            return None
        try:
            run = choice.find(*arguments, **options)
        except self._error as error:
            raise UserError(f"kernels.{_FAMILY[name]}: {error}; use another, or {AUTO}") from None
        # The caller's plain code is the reference, so it runs that instead.
        return None if run is choice.kernel.reference else run

    def maybe_compile(
        self, function: Callable[..., Any], for_compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return a piece of plain code between products and transfers, compiled if the run has a
        compiler.

        Args:
            function: The piece.
            for_compiler: The same computation without the manual optimisations that speed up eager
                code; this is what is compiled. None for `function` itself.
        """
        if self._compiler is None:
            return function
        for_compiler = for_compiler or function
        if for_compiler not in self._compiled:
            self._compiled[for_compiler] = self._compiler(for_compiler)
        return self._compiled[for_compiler]


NO_KERNELS = Kernels()
"""A run without kernels and compiler."""


def _describe_choice(choice: KernelChoice) -> str:
    """Return an implementation, and in parentheses why it is not a faster one."""
    absent = "; ".join(f"not {name}: {reason}" for name, reason in choice.absent.items())
    return f"{choice.active} ({absent})" if absent else choice.active


def _list_used_families(model: ModelConfig, train: TrainConfig) -> tuple[str, ...]:
    """Return the keys of `FAMILIES` whose kernels a step of this run calls."""
    mixers = [mixer for block in model.blocks or () for mixer in (block.mixer, block.second_mixer)]
    unused = {
        "experts": model.moe is None,
        "fp8": train.fp8 == "none",
        "recurrent": not any(isinstance(m, GatedDeltaNetConfig | Mamba2Config) for m in mixers),
        "sparse_attention": model.indexer is None or model.indexer.absorb is not True,
        "codes": model.adapters is None or model.adapters.quantize_base is None,
    }
    return tuple(key for key in FAMILIES if not unused.get(key, False))


def make_kernels(
    config: RunConfig,
    device: torch.device,
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    note: Callable[[str], None] = print,
) -> Kernels:
    """Return the kernels of a run on a device. With a compiler, elementwise kernels are left to it
    unless the config names an implementation.

    Args:
        config: The run.
        device: What it runs on.
        compiler: As for `Kernels`.
        note: As for `Kernels`.

    Raises:
        UserError: A named implementation that this machine does not have; no library on a GPU,
            unless the config asks for plain code; or `train.fp8` without the library, which also
            contains the plain code of 8-bit products.
    """
    requested = {key: getattr(config.kernels, key) for key in FAMILIES}
    named = {key: name for key, name in requested.items() if name not in (AUTO, PLAIN_CODE)}
    plain = {
        key: _explain_plain(config.kernels, config.train, device, compiler is not None, key)
        for key in FAMILIES
    }
    used_families = _list_used_families(config.model, config.train)
    selected = [
        key for key in FAMILIES if plain[key] is None and (key in used_families or key in named)
    ]
    reasons = {key: why for key in used_families if (why := plain[key]) is not None}
    needing = {f"kernels.{key}={name}": f"kernels.{key}={AUTO}" for key, name in named.items()}
    if config.train.fp8 != "none":
        needing[f"train.fp8={config.train.fp8}"] = "train.fp8=none"
    without = _explain_parts_without_kernels(config.model)
    if not (selected or needing):
        return Kernels({}, compiler, reasons, note, without)
    try:
        from megaframe_kernels.kernel import KernelError
        from megaframe_kernels.registry import KERNELS
        from megaframe_kernels.selection import select
    except (ImportError, AttributeError, OSError) as error:  # AttributeError: of an old Triton
        if needing:
            setting, instead = next(iter(needing.items()))
            raise UserError(
                f"{setting} needs the library of kernels, which needs Triton: {error}; use "
                f"{instead}"
            ) from None
        raise UserError(
            f"the library of kernels cannot be imported: {error}; without it this GPU would run "
            "plain code, which is several times slower. Install Triton (`pip install triton`, on "
            "Windows triton-windows; torch for ROCm brings its own) and megaframe with its kernels "
            f"(`pip install .`), or ask for plain code: "
            f"{' '.join(f'kernels.{key}={PLAIN_CODE}' for key in selected)}"
        ) from None
    choices: dict[str, KernelChoice] = {}
    for key in selected:
        kernels_of_key = {kernel: KERNELS[kernel] for kernel in FAMILIES[key]}
        overrides = {
            kernel: named[key]
            for kernel in kernels_of_key
            if key in named and named[key] in KERNELS[kernel].implementations
        }
        try:
            choices |= select(kernels_of_key, overrides)
        except KernelError as error:
            raise UserError(f"kernels.{key}: {error}; use another, or {AUTO}") from None
    return Kernels(choices, compiler, reasons, note, without)


def _explain_parts_without_kernels(model: ModelConfig) -> dict[str, str]:
    """Return which parts of a model have no kernel although others of their kind have one, and
    why."""
    parts = {
        f"{role} {part.name}": f"kernels exist only for our own {role}s"
        for part in list_parts(model)
        for role, base in (("norm", NormPart), ("activation", ActivationPart))
        if isinstance(part, base)
    }
    mixers = [m for block in model.blocks or () for m in (block.mixer, block.second_mixer)]
    values = [model.qk_norm, *(getattr(mixer, "qk_norm", None) for mixer in mixers)]
    if "whole" in values:
        parts["norms of whole queries and keys"] = "tensor ranks sum their squares"
    feed_forwards = [block.feed_forward for block in model.blocks or ()]
    if "xielu" in [model.activation, *(getattr(f, "activation", None) for f in feed_forwards)]:
        parts["activation xielu"] = "its slopes are trained"
    if "layernorm_per_head" in values:
        parts["norms of queries and keys"] = "each head has gains of its own"
    if "l2" in values:
        parts["norms of queries and keys"] = "they have no gains"
    return parts


def _explain_plain(
    kernels: KernelsConfig, train: TrainConfig, device: torch.device, compiled: bool, key: str
) -> str | None:
    """Return why no kernels of this key of `FAMILIES` are chosen, or None if some are."""
    requested = getattr(kernels, key)
    if requested == PLAIN_CODE:
        return f"kernels.{key}={PLAIN_CODE}"
    if requested != AUTO:
        return None
    if device.type != "cuda":
        return f"the device is a {device.type} (a kernel runs there if kernels.KEY names it)"
    if compiled and key == _COMPILED_FAMILY:
        return f"train.compile={train.compile} compiles it"
    return None
