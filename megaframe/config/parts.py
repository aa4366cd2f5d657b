"""Parts that extensions bring: their config sections, and the registry that knows their names.

An extension is a Python file or package that `run.extensions` names. Its function `register` gives
each part to the registry. A part is a config section, so its keys are typed, documented and checked
like our own, with methods that describe it or make its torch code. Nothing here imports torch.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import InitErrorDetails, core_schema

from megaframe.config.section import Section
from megaframe.errors import UserError, join_or


class Part(Section, ABC):
    """Base of all sections of extensions. Each has a key `kind: Literal["NAME"] = "NAME"`, whose
    docstring says what the part is."""

    @classmethod
    def get_name(cls) -> str:
        """Return the name by which a config asks for the part; empty if it has none."""
        kind = cls.model_fields.get("kind")
        name = None if kind is None else kind.default
        return name if isinstance(name, str) else ""

    @property
    def name(self) -> str:
        """The name by which a config asks for the part."""
        return self.get_name()


class OptimizerPart(Part):
    """An optimizer that changes each element on its own, from its gradient and its moments; so it
    is the same under every layout and ZeRO stage."""

    @abstractmethod
    def count_moments(self) -> int:
        """Return how many numbers are remembered for each element. The plan counts them."""

    @abstractmethod
    def make_transforms(self, optim: Any, rates: Any, storage: Any) -> list[Any]:
        """Return what updates a group of parameters: `UpdateTransform`s of
        `megaframe.optim.elementwise`.

        Args:
            optim: The section `optim`.
            rates: Rates of the parameter group (`GroupRates`).
            storage: How moments are stored (`MomentStorage`): `signed` and `square` are the codecs
                for moments of either sign, and for those that are not negative.
        """


class SchedulePart(Part):
    """A learning-rate schedule after the warm-up."""

    @abstractmethod
    def compute_share(self, update: int, warmup: int, steps: int) -> float:
        """Return where the rate is between `optim.min_lr` (0) and `optim.lr` (1).

        Args:
            update: Number of the update, from 0; at least `warmup`.
            warmup: Updates of the warm-up.
            steps: Updates of the whole run.
        """


@dataclass(frozen=True)
class Role:
    """What a part can be.

    Attributes:
        base: The class that its section is derived from.
        key: Where a config names it.
        ours: The names that are taken.
    """

    base: type[Part]
    key: str
    ours: tuple[str, ...] = ()


ROLES: dict[str, Role] = {
    "optimizer": Role(OptimizerPart, "optim.name", ("adamw", "muon", "lion", "sgd")),
    "schedule": Role(
        SchedulePart, "optim.schedule", ("constant", "cosine", "linear", "wsd", "inverse_sqrt")
    ),
}
"""By name."""


@dataclass(frozen=True)
class Extension:
    """An extension that was loaded.

    Attributes:
        name: As `run.extensions` has it.
        digest: SHA-256 of its source.
    """

    name: str
    digest: str


@dataclass
class Registry:
    """The parts that the extensions of a run have registered.

    Attributes:
        parts: By role and name.
        places: Where each was registered: `FILE:LINE`.
        extensions: Those that were loaded, in order.
    """

    parts: dict[tuple[str, str], type[Part]] = field(default_factory=dict)
    places: dict[tuple[str, str], str] = field(default_factory=dict)
    extensions: list[Extension] = field(default_factory=list)

    def register(self, section: type[Part]) -> None:
        """Add a part.

        Args:
            section: A subclass of one of the bases in `megaframe.extensions`.

        Raises:
            UserError: It is no part, its name is missing, or something else has this name.
        """
        caller = traceback.extract_stack(limit=2)[0]
        place = f"{caller.filename}:{caller.lineno}"
        is_class = isinstance(section, type)
        roles = [r for r, role in ROLES.items() if is_class and issubclass(section, role.base)]
        if not roles:
            bases = join_or(role.base.__name__ for role in ROLES.values())
            raise UserError(f"{place}: registers {section!r}, which is no subclass of {bases}")
        (role,) = roles
        name = section.get_name()
        if not name or any(character in name for character in " .[]{}:,="):
            raise UserError(
                f"{place}: {section.__name__} has no name; give it a key such as "
                f'kind: Literal["my_{role}"] = "my_{role}"'
            )
        missing = sorted(getattr(section, "__abstractmethods__", ()))
        if missing:
            raise UserError(f"{place}: {section.__name__} lacks {', '.join(missing)}")
        if name in ROLES[role].ours:
            raise UserError(
                f"{place}: registers the {role} {name}, which is a name of megaframe's own "
                f"({ROLES[role].key}); choose another one"
            )
        if (role, name) in self.parts:
            raise UserError(
                f"{place}: registers the {role} {name}, which {self.places[role, name]} has "
                "registered already; rename one of them"
            )
        self.parts[role, name] = section
        self.places[role, name] = place

    def find(self, role: str, name: object) -> type[Part] | None:
        """Return the section of a part, or None."""
        return self.parts.get((role, name)) if isinstance(name, str) else None

    def list_names(self, role: str) -> list[str]:
        """Return the names of a role's parts."""
        return [name for part_role, name in self.parts if part_role == role]


_active = Registry()


def get_registry() -> Registry:
    """Return the registry of this process's run."""
    return _active


def activate(registry: Registry) -> None:
    """Let a registry be that of this process's run. What others registered is unknown from now
    on."""
    global _active
    _active = registry


@contextmanager
def use_registry(registry: Registry) -> Iterator[Registry]:
    """Return a context within which `registry` is active."""
    before = _active
    activate(registry)
    try:
        yield registry
    finally:
        activate(before)


@dataclass(frozen=True)
class Extensible:
    """Marks a field of a section, as metadata, that also takes parts of a role: their name, or
    their keys with `kind: NAME`."""

    role: str

    @property
    def kinds(self) -> dict[str, type[Section]]:
        """The sections of all registered parts of the role."""
        parts = get_registry().parts
        return {name: section for (role, name), section in parts.items() if role == self.role}

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        # Parts are found when a value is validated; pydantic sees the other types only.
        own = [kind for kind in get_args(source) if not is_part(kind)]
        if is_part(source):
            inner: core_schema.CoreSchema = core_schema.literal_schema([None])
        elif len(own) == 1:
            inner = handler.generate_schema(own[0])
        else:
            inner = handler(source)
        return core_schema.no_info_wrap_validator_function(
            self._validate,
            inner,
            serialization=core_schema.wrap_serializer_function_ser_schema(
                _serialize, info_arg=True, schema=inner
            ),
        )

    def _validate(self, value: Any, handler: Any) -> Any:
        if isinstance(value, Part) and isinstance(value, ROLES[self.role].base):
            return value
        kind = value.get("kind") if isinstance(value, Mapping) else value
        section = get_registry().find(self.role, kind)
        if section is None:
            return handler(value)
        keys = value if isinstance(value, Mapping) else {}
        try:
            return section.model_validate({**keys, "kind": kind})
        except ValidationError as error:
            # The kind becomes part of the place, so that a message finds the types of the keys.
            lines: list[InitErrorDetails] = [
                InitErrorDetails(
                    type=line["type"],
                    loc=(str(kind), *line["loc"]),
                    input=line["input"],
                    ctx=line.get("ctx", {}),
                )
                for line in error.errors(include_url=False)
            ]
            raise ValidationError.from_exception_data(section.__name__, lines) from None


def is_part(annotation: Any) -> bool:
    """Return whether a type is the base of parts of some role, in whose place a part is."""
    return isinstance(annotation, type) and annotation in {role.base for role in ROLES.values()}


def _serialize(value: Any, handler: Any, info: Any) -> Any:
    return value.model_dump(mode=info.mode) if isinstance(value, Part) else handler(value)


def get_part_name(value: object) -> str:
    """Return the name of an option that may be a part."""
    return value.name if isinstance(value, Part) else str(value)
