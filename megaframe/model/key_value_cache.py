"""Keys and values of the tokens so far, or the states that they leave, so that generation computes
each token once.

The first pass has the whole prompt and fills the cache, each later one has the next token. A cache
serves a model all of whose mixers fill it, which `advance` says after the first pass.

Shape legend: B samples, S new tokens, T tokens so far, G key/value heads, D and V their widths.
"""

from __future__ import annotations

from torch import Tensor

from megaframe.parameters.parameter import Module


class LayerCache:
    """The keys and values of one layer.

    Attributes:
        length: Tokens so far.
    """

    def __init__(self, capacity: int, window: int | None) -> None:
        self.length = 0
        self._capacity, self._window = capacity, window
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, key_BSGD: Tensor, value_BSGV: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens.

        Args:
            key_BSGD: The keys, rotated.
            value_BSGV: The values.

        Returns:
            Those of all tokens that the last one sees, [B, T, G, D] and [B, T, G, V].
        """
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                x.new_empty(x.shape[0], self._capacity, *x.shape[2:])
                for x in (key_BSGD, value_BSGV)
            )
        end = self.length + key_BSGD.shape[1]
        self._keys[:, self.length : end] = key_BSGD
        self._values[:, self.length : end] = value_BSGV
        self.length = end
        seen = slice(0 if self._window is None else max(0, end - self._window), end)
        return self._keys[:, seen], self._values[:, seen]


class StateCache:
    """What the tokens so far leave in a layer that passes a state from token to token.

    Attributes:
        length: Tokens so far.
        tensors: The state, by whatever names the layer gives; empty before the first token.
    """

    def __init__(self) -> None:
        self.length = 0
        self.tensors: dict[str, Tensor] = {}

    def replace(self, tokens: int, **tensors: Tensor) -> None:
        """Set the state after so many new tokens."""
        self.length += tokens
        self.tensors = tensors


class KeyValueCache:
    """The caches of all layers of a model.

    Attributes:
        length: Tokens so far.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        """Make an empty cache.

        Args:
            layers: Number of mixers of the model.
            capacity: Number of tokens, at most.
        """
        self.length = 0
        self._layers, self._capacity = layers, capacity
        self._caches: dict[Module, LayerCache] = {}
        self._states: dict[Module, StateCache] = {}

    def get(self, layer: Module, window: int | None) -> LayerCache:
        """Return that of a layer, whose tokens see this many, with themselves; None for all."""
        return self._caches.setdefault(layer, LayerCache(self._capacity, window))

    def get_state(self, layer: Module) -> StateCache:
        """Return that of a layer that passes a state from token to token."""
        return self._states.setdefault(layer, StateCache())

    def advance(self, tokens: int) -> bool:
        """End a pass of so many new tokens, and return whether every layer has added them. If not,
        a layer keeps nothing of the past, and the cache cannot be used."""
        self.length += tokens
        lengths = [cache.length for cache in self._caches.values()]
        lengths += [state.length for state in self._states.values()]
        return lengths == [self.length] * self._layers
