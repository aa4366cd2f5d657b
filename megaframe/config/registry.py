"""The registry of parts that extensions bring, and the fields of a config that take them."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Union, get_args

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import InitErrorDetails, core_schema

from megaframe.config.parts import ROLES, Part
from megaframe.config.section import Section
from megaframe.errors import UserError, join_or


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
        families: Families of Hugging Face models, by `model_type`: rows of
            `megaframe.checkpoint.convert.huggingface.family`.
        extensions: Those that were loaded, in order.
    """

    parts: dict[tuple[str, str], type[Part]] = field(default_factory=dict)
    places: dict[tuple[str, str], str] = field(default_factory=dict)
    families: dict[str, Any] = field(default_factory=dict)
    extensions: list[Extension] = field(default_factory=list)

    def copy(self) -> Registry:
        """Return another registry of the same parts."""
        return Registry({**self.parts}, {**self.places}, {**self.families}, [*self.extensions])

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

    def register_family(self, family: Any) -> None:
        """Add a family of Hugging Face models to those that are imported and exported.

        Args:
            family: A `Family` of `megaframe.checkpoint.convert.huggingface.family`.

        Raises:
            UserError: Another extension has registered one of this name.
        """
        if family.name in self.families:
            raise UserError(f"the family {family.name} is registered twice; rename one of them")
        self.families[family.name] = family

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
        # Parts are looked up when a value is validated; pydantic sees the other types only.
        if is_part(source):
            inner: core_schema.CoreSchema = core_schema.is_instance_schema(source)
        else:
            other_types = tuple(kind for kind in get_args(source) if not is_part(kind))
            inner = handler.generate_schema(Union[other_types])  # noqa: UP007
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


def list_parts(value: object) -> list[Part]:
    """Return the parts of extensions in a section, or in a list of sections, in order."""
    if isinstance(value, Part):
        return [value]
    items: Iterable[object] = ()
    if isinstance(value, Section):
        items = vars(value).values()
    elif isinstance(value, tuple):
        items = value
    return [part for item in items for part in list_parts(item)]


def get_part_name(value: object) -> str:
    """Return the name of an option that may be a part."""
    return value.name if isinstance(value, Part) else str(value)
