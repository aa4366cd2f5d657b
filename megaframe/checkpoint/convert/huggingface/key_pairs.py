"""Keys of `config.json` as pairs that serve both directions: each reads keys of theirs into facts
(`model_facts.py`), and writes them from facts.

What a pair writes need not be checked: an export reads back what it has written and compares.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.key_types import (
    TYPES_OF_FACTS,
    Count,
    Flag,
    Size,
    Texts,
)
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.errors import UserError

Keys = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
"""The values of `layer_types`."""
_FIRST_FULL = "max_window_layers"
"""How many first layers do not slide, in configs without `layer_types`."""
DENSE, SPARSE = "dense", "sparse"
"""The values of `mlp_layer_types`."""


class Key(ABC):
    """One or several keys of theirs that are read and written together."""

    @property
    @abstractmethod
    def types(self) -> Mapping[str, Any]:
        """The keys, each with the type that its value must have."""

    @property
    def required(self) -> Sequence[str]:
        """Keys that must have a value."""
        return ()

    @property
    def present(self) -> Sequence[str]:
        """Keys that must be there and may be null, because transformers' own default is another."""
        return ()

    @abstractmethod
    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set facts from the keys."""

    @abstractmethod
    def write(self, facts: Facts) -> Keys:
        """Return the keys for facts."""


def _keep(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Pair(Key):
    """A key that has one fact's value, or that of several alike.

    Attributes:
        name: The key.
        paths: Of the facts.
        need: `value` if it must have one, `present` if it may be null but must be there, or
            nothing.
        default: Value of a key that is missing or null.
        to_fact: Turns a value into the fact.
        to_key: Does the opposite.
        type: Of a value; that of the fact by default.
        otherwise: A fact that is written if the first one does not exist.
        absent: What is written if there is no fact.
    """

    name: str
    paths: str | tuple[str, ...]
    need: str = ""
    default: Any = None
    to_fact: Callable[[Any], Any] = _keep
    to_key: Callable[[Any], Any] = _keep
    type: Any = None
    otherwise: str = ""
    absent: Any = None

    @property
    def _paths(self) -> tuple[str, ...]:
        return (self.paths,) if isinstance(self.paths, str) else self.paths

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {self.name: self.type or TYPES_OF_FACTS[self._paths[0]]}

    @property
    def required(self) -> Sequence[str]:
        """The key, if it is."""
        return (self.name,) if self.need == "value" else ()

    @property
    def present(self) -> Sequence[str]:
        """The key, if it must be."""
        return (self.name,) if self.need == "present" else ()

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the facts."""
        value = config.get(self.name)
        value = self.default if value is None else value
        for path in self._paths:
            facts.set(path, None if value is None else self.to_fact(value))

    def write(self, facts: Facts) -> Keys:
        """Return the key."""
        value = facts.get(self._paths[0])
        if value is None and self.otherwise:
            value = facts.get(self.otherwise)
        return {self.name: self.absent if value is None else self.to_key(value)}


@dataclass(frozen=True)
class Derived(Key):
    """A key whose value follows from others. Transformers does not read it; vLLM or SGLang does.

    Attributes:
        name: The key.
        type: Of its value.
        compute: Returns the value; None if there is none, and the key is left out.
    """

    name: str
    type: Any
    compute: Callable[[Facts], Any]

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {self.name: self.type}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Raise `UserError` if it contradicts the facts, which other keys have set before."""
        value, expected = config.get(self.name), self.compute(facts)
        if value is not None and value != expected:
            raise UserError(
                f"{self.name}={reprlib.repr(value)} contradicts other keys, by which it is "
                f"{reprlib.repr(expected)}; transformers computes what those say"
            )

    def write(self, facts: Facts) -> Keys:
        """Return the key."""
        value = self.compute(facts)
        return {} if value is None else {self.name: value}


def count_dense_first(has_experts: Sequence[bool]) -> int | None:
    """Return how many first layers are dense; None if a later one is dense, too."""
    number = [*has_experts, True].index(True)
    return number if all(has_experts[number:]) else None


def list_experts(facts: Facts) -> list[bool]:
    """Return for each layer whether it has experts."""
    return [kind == "moe" for kind in facts.list_values("feed_forward.kind")]


def choose(name: str, path: str, values: Mapping[Any, Any], **options: Any) -> Pair:
    """Return a key with a few known values.

    Args:
        name: The key.
        path: Of the fact.
        values: The fact for each value; of several for one fact the first one is written.
        options: Of the pair.
    """

    def read(value: Any) -> Any:
        if value not in values:
            known = ", ".join(map(repr, values))
            raise UserError(f"{name}={reprlib.repr(value)} is not supported, only {known}")
        return values[value]

    def write(fact: Any) -> Any:
        return next((value for value, own in values.items() if own == fact), next(iter(values)))

    return Pair(name, path, to_fact=read, to_key=write, **{"type": str | None, **options})


@dataclass(frozen=True)
class UniformWindow(Key):
    """A sliding window that code gives to all layers, whatever `layer_types` says.

    Attributes:
        need: As that of a pair.
        switch: A key without which the window is not used; empty if there is none.
    """

    need: str = ""
    switch: str = ""

    @property
    def types(self) -> Mapping[str, Any]:
        """The window and the types of layers."""
        switch = {self.switch: Flag} if self.switch else {}
        return {"sliding_window": Size, "layer_types": Texts, **switch}

    @property
    def present(self) -> Sequence[str]:
        """The window, if it must be."""
        return ("sliding_window",) if self.need == "present" else ()

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the window of all layers."""
        window, kinds = read_window(config, self.switch), config.get("layer_types")
        if kinds and window is not None and set(kinds) != {SLIDING}:
            raise UserError(
                f"layer_types has {FULL} in {kinds.count(FULL)} of {len(kinds)} layers, and its "
                f"code gives sliding_window={window} to all; ministral and qwen3 heed both"
            )
        facts.set("mixer.window", window)

    def write(self, facts: Facts) -> Keys:
        """Return the window of the first layer that has one."""
        window = find_window(facts)
        return {
            "sliding_window": window,
            **({self.switch: window is not None} if self.switch else {}),
        }


@dataclass(frozen=True)
class LayerTypes(Key):
    """Layers that are either `sliding_attention` or `full_attention`.

    Attributes:
        default: Returns the types of a config without `layer_types`; by default all layers that
            have a window slide.
        switch: A key without which the window is not used; empty if there is none.
        full: Facts of layers that do not slide.
        sliding: Those of layers that do.
        need: As that of a pair, of the window.
        more: Other keys that the default reads, with their types.
        needs_types: Whether a config with a window must have types of layers.
        full_if_sliding: Whether the facts of layers that do not slide need a window elsewhere.
    """

    default: Callable[[Mapping[str, Any], int | None], Sequence[str]] | None = None
    switch: str = ""
    full: tuple[tuple[str, Any], ...] = ()
    sliding: tuple[tuple[str, Any], ...] = ()
    need: str = ""
    more: tuple[tuple[str, Any], ...] = ()
    needs_types: bool = False
    full_if_sliding: bool = False

    @property
    def types(self) -> Mapping[str, Any]:
        """The window, the types of layers, and what the default reads."""
        switch = {self.switch: Flag} if self.switch else {}
        return {"sliding_window": Size, "layer_types": Texts, **switch, **dict(self.more)}

    @property
    def present(self) -> Sequence[str]:
        """The window, if it must be."""
        return ("sliding_window",) if self.need == "present" else ()

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the window of each layer, and the facts of its type."""
        layers, window = len(facts.layers), read_window(config, self.switch)
        kinds = config.get("layer_types")
        if kinds is None and self.needs_types and window is not None:
            raise UserError("layer_types is missing, and sliding_window needs it")
        if kinds is None and self.default is not None:
            kinds = self.default(config, window)
        elif kinds is None:
            kinds = [FULL if window is None else SLIDING] * layers
        check_layer_types("layer_types", kinds, layers, (FULL, SLIDING))
        if window is None and SLIDING in kinds:
            raise UserError(
                f"layer_types has {SLIDING} layers, and there is no sliding_window for them"
            )
        facts.set_layers("mixer.window", [window if kind == SLIDING else None for kind in kinds])
        full = self.full if window is not None or not self.full_if_sliding else ()
        for layer, kind in zip(facts.layers, kinds, strict=True):
            layer.update(self.sliding if kind == SLIDING else full)

    def write(self, facts: Facts) -> Keys:
        """Return the window of the first layer that has one, and the type of each layer."""
        windows, window = facts.list_values("mixer.window"), find_window(facts)
        kinds = [FULL if w is None else SLIDING for w in windows]
        switch = {self.switch: window is not None} if self.switch else {}
        first = [kind == SLIDING for kind in kinds] + [True]
        more = {key: first.index(True) for key, _ in self.more if key == _FIRST_FULL}
        return {"sliding_window": window, "layer_types": kinds, **switch, **more}


def slide_except(
    name: str, every: int, *, first: bool = False
) -> Callable[[Mapping[str, Any], int | None], Sequence[str]]:
    """Return a default of `LayerTypes`: all layers slide but every n-th.

    Args:
        name: The key of n; empty if there is none.
        every: n if the key is missing.
        first: Whether the first layer of each n does not slide, rather than the last one.
    """

    def list_types(config: Mapping[str, Any], window: int | None) -> Sequence[str]:
        size = (config.get(name) if name else None) or every
        rest = 0 if first else size - 1
        return [FULL if n % size == rest else SLIDING for n in range(config["num_hidden_layers"])]

    return list_types


def read_window(config: Mapping[str, Any], switch: str = "") -> int | None:
    """Return the sliding window in tokens; None if it is not used.

    Raises:
        UserError: If it is used and missing.
    """
    if switch and not config.get(switch):
        return None
    if switch and "sliding_window" not in config:
        raise UserError("sliding_window is missing")
    window: int | None = config.get("sliding_window")
    return window


def find_window(facts: Facts) -> int | None:
    """Return the window of the first layer that has one. An export refuses models whose layers have
    several different windows."""
    windows = facts.list_values("mixer.window")
    return next((window for window in windows if window is not None), None)


def check_layer_types(key: str, kinds: Sequence[str], layers: int, known: Sequence[str]) -> None:
    """Raise `UserError` unless each layer has a known type."""
    if len(kinds) != layers:
        raise UserError(f"{key} has {len(kinds)} layers, and num_hidden_layers is {layers}")
    for kind in kinds:
        if kind not in known:
            raise UserError(f"{key}: {reprlib.repr(kind)} is none of {', '.join(known)}")


@dataclass(frozen=True)
class ExpertLayers(Key):
    """Which layers have experts.

    Attributes:
        types: The keys.
        find: Returns for each layer whether it has experts.
        state: Returns the keys for that.
        needed: Keys that must have a value.
    """

    keys: tuple[tuple[str, Any], ...]
    find: Callable[[Mapping[str, Any], int], Sequence[bool]]
    state: Callable[[Sequence[bool]], Keys]
    needed: tuple[str, ...] = ()

    @property
    def types(self) -> Mapping[str, Any]:
        """The keys."""
        return dict(self.keys)

    @property
    def required(self) -> Sequence[str]:
        """Those that are."""
        return self.needed

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what follows the mixer of each layer."""
        has_experts = self.find(config, len(facts.layers))
        facts.set_layers("feed_forward.kind", ["moe" if has else "mlp" for has in has_experts])

    def write(self, facts: Facts) -> Keys:
        """Return the keys."""
        return self.state(list_experts(facts))


def make_layer_kinds(first: int = 1, first_name: str = "") -> ExpertLayers:
    """Return `mlp_layer_types`, which says of each layer whether it is dense or has experts.

    Args:
        first: Number of first layers that are dense in a config without it.
        first_name: A key that says this number.
    """

    def find(config: Mapping[str, Any], layers: int) -> Sequence[bool]:
        kinds, dense = config.get("mlp_layer_types"), first
        if first_name and config.get(first_name) is not None:
            dense = config[first_name]
        if kinds is None:
            return [layer >= dense for layer in range(layers)]
        check_layer_types("mlp_layer_types", kinds, layers, (DENSE, SPARSE))
        return [kind == SPARSE for kind in kinds]

    def state(has_experts: Sequence[bool]) -> Keys:
        number = count_dense_first(has_experts)
        dense_first = {first_name: number} if first_name and number is not None else {}
        return {"mlp_layer_types": [SPARSE if h else DENSE for h in has_experts], **dense_first}

    first_keys = ((first_name, Count),) if first_name else ()
    return ExpertLayers((("mlp_layer_types", Texts), *first_keys), find, state)


def make_dense_first(name: str, *, need: str = "") -> ExpertLayers:
    """Return a key that says how many first layers are dense."""

    def find(config: Mapping[str, Any], layers: int) -> Sequence[bool]:
        return [layer >= (config.get(name) or 0) for layer in range(layers)]

    def state(has_experts: Sequence[bool]) -> Keys:
        return {name: [*has_experts, True].index(True)}

    return ExpertLayers(((name, Count),), find, state, (name,) if need else ())
