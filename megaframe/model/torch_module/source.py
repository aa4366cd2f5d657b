"""A module from outside: how it is made, what it is made of, and what its parameters begin as.

Whoever brings it gives a function that makes it. It is called on the meta device to read its
parameters, with a seed to draw their initial values, and once on the device for what is no
parameter, such as tables.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megaframe.architecture.spec import DrawnByLayer, ParamSpec, Role
from megaframe.config.part_calls import call_part, describe_method
from megaframe.config.parts import Part
from megaframe.errors import UserError

_META, _CPU = torch.device("meta"), torch.device("cpu")
_TOKENS = 4
"""Tokens with which a module is tried."""


@dataclass(frozen=True)
class ModuleSource:
    """What makes a module.

    Attributes:
        part: The section of the config, with a method `make_module`.
        arguments: Those of the method.
    """

    part: Part
    arguments: tuple[Any, ...]

    def make(self, device: torch.device) -> nn.Module:
        """Return a new module with its tensors on a device.

        Raises:
            UserError: It cannot be made.
        """
        with torch.device(device):
            return call_part(self.part, "make_module", nn.Module, *self.arguments)

    @property
    def facts(self) -> ModuleFacts:
        """What the module is made of.

        Raises:
            UserError: It cannot be made, or has something that no layer can have.
        """
        return _find_facts(self)

    @property
    def place(self) -> str:
        """Part, method, file and line for a message."""
        return describe_method(self.part, "make_module")

    def select_inputs(self, positions: Tensor, documents: Tensor | None) -> dict[str, Any]:
        """Return those of the arguments `positions` and `documents` that the module's forward
        has."""
        given = {"positions": positions, "documents": documents}
        return {name: given[name] for name in given.keys() & self.facts.arguments}

    def declare_parameters(self, name: str, role: Role | None = None) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters, in the order of the module.

        Args:
            name: Of the layer in the model.
            role: Of all of them; by default `matrix` for those of two or more dims.
        """
        for key, shape in self.facts.shapes:
            matrix = role is None and len(shape) > 1
            vector: Role = "bias" if key.endswith("bias") else "gain"
            yield ParamSpec(
                f"{name}.{key}",
                shape or (1,),
                InitialValues(self, name, key),
                role=role or ("matrix" if matrix else vector),
                decay=call_part(self.part, "decays", bool, key, shape),
                # As a convolution is a matrix of outputs and all that each of them sums.
                inputs=max(1, len(shape) - 1),
            )


@dataclass(frozen=True)
class ModuleFacts:
    """What a module is made of.

    Attributes:
        kind: Name of its class.
        shapes: Name and shape of each parameter.
        arguments: Names of the arguments of its `forward`.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    arguments: frozenset[str]


@lru_cache(maxsize=64)
def _find_facts(source: ModuleSource) -> ModuleFacts:
    module = source.make(_META)
    for problem in _find_problems(module, source.make(_META)):
        raise UserError(f"{source.place} returns {type(module).__name__}, {problem}")
    return ModuleFacts(
        type(module).__name__,
        tuple((name, tuple(p.shape)) for name, p in module.named_parameters()),
        frozenset(inspect.signature(module.forward).parameters),
    )


def _find_problems(module: nn.Module, again: nn.Module) -> Iterator[str]:
    """Yield why a module can be no layer.

    Args:
        module: The module, made on the meta device.
        again: What the same call returns a second time.
    """
    parameters = dict(module.named_parameters())
    if not parameters:
        yield (
            "which has no parameters; write it as an activation, or give it a parameter that is "
            "trained"
        )
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield (
                f"whose parameter {name} is lazy: it gets its shape when it is first called; give "
                "the shape where the module is made"
            )
        elif not parameter.is_meta:
            yield (
                f"whose parameter {name} is on the device {parameter.device} although the module "
                "is made on another; leave `device` out where the module is made"
            )
        elif parameter.dtype != torch.get_default_dtype():
            yield (
                f"whose parameter {name} is {parameter.dtype}, and parameters are made in "
                f"{torch.get_default_dtype()}; leave `dtype` out: it computes in train.precision, "
                "with master weights beside it"
            )
        elif not parameter.requires_grad:
            yield (
                f"whose parameter {name} has requires_grad=False; make it a buffer with "
                "persistent=False, or let optim.frozen name it"
            )
    saved = module.state_dict(keep_vars=True)
    for name, _ in module.named_buffers():
        if name in saved:
            yield (
                f"whose buffer {name} is persistent: it would be state that no checkpoint of a run "
                "has; register it with persistent=False if it is a constant, or make it a parameter"
            )
    known = {id(parameter) for parameter in parameters.values()}
    for name, parameter in again.named_parameters():
        if id(parameter) in known:
            yield (
                f"whose parameter {name} is that of another module, which it returned before; "
                "make new parameters in each call"
            )


@dataclass(frozen=True)
class InitialValues(DrawnByLayer):
    """The initial values of one parameter: those that the module draws when it is made.

    Attributes:
        source: Makes the module.
        layer: Name of the layer in the model; with the seed it fixes the values.
        key: Name of the parameter in the module.
    """

    source: ModuleSource
    layer: str
    key: str

    def draw(self, seed: int) -> Tensor:
        """Return the whole parameter, on the CPU."""
        return _draw(self.source, self.layer, seed)[self.key]


@lru_cache(maxsize=1)
def _draw(source: ModuleSource, layer: str, seed: int) -> dict[str, Tensor]:
    """Return the initial values of all parameters of a layer. Only the last layer's are kept, as a
    bucket asks for one parameter after the other."""
    _check_values(source)
    digest = hashlib.sha256(f"{seed}/{layer}".encode()).digest()
    module = _make_with_seed(source, int.from_bytes(digest[:8], "little") >> 1)
    return {name: p.detach().view(p.shape or (1,)) for name, p in module.named_parameters()}


def _make_with_seed(source: ModuleSource, seed: int) -> nn.Module:
    """Return the module as it is on a CPU, whatever the device of the run: others would draw other
    numbers. The state of torch's generator stays."""
    with torch.random.fork_rng(devices=[]), _MarkForgottenMemory():
        torch.default_generator.manual_seed(seed)
        return source.make(_CPU)


class _MarkForgottenMemory(TorchDispatchMode):
    """Fills new memory with NaN, so that initial values that nobody sets are found."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator."""
        out = func(*args, **(kwargs or {}))
        if func in _MAKERS and out.is_floating_point():
            out.fill_(torch.nan)
        return out


_ATEN = torch.ops.aten
_MAKERS = (
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
)


@lru_cache(maxsize=64)
def _check_values(source: ModuleSource) -> None:
    """Raise `UserError` if initial values are not set or are others each time, as ranks would begin
    from; or if what the module computes is."""
    module, again = _make_with_seed(source, 1), _make_with_seed(source, 1)
    name = f"{source.place} returns {type(module).__name__}"
    others = dict(again.named_parameters())
    for key, value in module.named_parameters():
        if not bool(value.isfinite().all()):
            raise UserError(
                f"{name}, whose parameter {key} begins with numbers that are not finite, or that "
                "nobody sets; set its initial values where the module is made"
            )
        if not torch.equal(value, others[key]):
            raise UserError(
                f"{name}, whose parameter {key} has other initial values each time, although "
                "torch's generator begins with the same seed; draw them by torch.nn.init"
            )
    try:
        first, second = (_run_passes(source, module) for _ in range(2))
    except Exception:
        return  # what needs the run's device is checked by its measurement alone
    for what, one, other in zip(("forward", *others), first, second, strict=True):
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            what = "forward" if what == "forward" else f"backward (the gradient of {what})"
            raise UserError(
                f"{name}, whose {what} is not repeatable: the same input gave numbers that differ "
                f"by {float((one - other).abs().max()):.1e} when it ran again; recomputed or under "
                "another layout it would not compute the same: let what it computes depend on its "
                "input and its parameters only"
            )


def _run_passes(source: ModuleSource, module: nn.Module) -> list[Tensor]:
    """Return the result of the module, and the gradient of each parameter, for a few tokens."""
    generator, width = torch.Generator().manual_seed(1), source.arguments[0].hidden
    x, gradient = torch.randn(2, 1, _TOKENS, width, generator=generator)
    out = module(x, **source.select_inputs(torch.arange(_TOKENS)[None], None))
    parameters = [*module.parameters()]
    gradients = torch.autograd.grad(out, parameters, gradient, allow_unused=True)
    zero = torch.zeros(())
    return [out.detach(), *(zero if each is None else each for each in gradients)]


_modules: dict[tuple[ModuleSource, torch.device], nn.Module] = {}


def get_module(source: ModuleSource, device: torch.device) -> nn.Module:
    """Return the module whose code all layers of this source call, with its tables on a device and
    without memory for parameters, which each layer brings."""
    if (source, device) not in _modules:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            module = source.make(device)
        # One placeholder for each parameter, so that what shares one still does.
        placeholders: dict[nn.Parameter, nn.Parameter] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    if parameter not in placeholders:
                        placeholders[parameter] = nn.Parameter(parameter.detach().to(_META))
                    part._parameters[name] = placeholders[parameter]
        _modules[source, device] = module
    return _modules[source, device]
