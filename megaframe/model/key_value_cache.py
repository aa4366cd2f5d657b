"""Keys and values of the tokens so far, or the states that they leave, so that generation computes
each token once.

The first pass has a whole prompt and fills the cache, each later one has the next token of every
sample. Caches of prompts that were read apart are joined: samples end at the same place and begin
at their own, so that a new token is added at one place, and what is before a sample is hidden. A
cache serves a model all of whose mixers fill it, which `advance` says after the first pass.

Shape legend: B samples, S new tokens, T places so far, G key/value heads, D and V their widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.window import Chunk, Window
from megaframe.parameters.parameter import Module


@dataclass
class CachedSamples:
    """Where the samples of a cache are.

    Attributes:
        starts: The place at which each begins.
        sights: What the tokens of one pass see through each window (`find_sight`).
    """

    starts: list[int] = field(default_factory=list)
    sights: dict[Window, tuple[int, Tensor | None]] = field(default_factory=dict)

    def find_sight(
        self, window: Window, end: int, device: torch.device
    ) -> tuple[int, Tensor | None]:
        """Return the first place that the token before `end` sees in any sample, and which of the
        places from there on it sees in each, bool [B, 1, 1, T]; None if all."""
        if window not in self.sights:
            firsts = [_find_first(window, start, end) for start in self.starts or [0]]
            first, mask = min(firsts), None
            if max(firsts) > first:
                firsts_B = torch.tensor(firsts, device=device)
                places_T = torch.arange(first, end, device=device)
                mask = (places_T >= firsts_B[:, None])[:, None, None]
            self.sights[window] = first, mask
        return self.sights[window]


def _find_first(window: Window, start: int, end: int) -> int:
    """Return the first place that the last token sees of a sample from `start` to `end`."""
    if isinstance(window, Chunk):
        return start + (end - 1 - start) // window.size * window.size
    return start if window is None else max(start, end - window)


class LayerCache:
    """The keys and values of one layer, and what else it keeps of each token.

    Attributes:
        length: Places so far.
    """

    def __init__(self, samples: CachedSamples, window: Window) -> None:
        self.length = 0
        self._samples, self._window = samples, window
        self._memory: list[Tensor] = []

    def extend(self, *new: Tensor) -> None:
        """Add what is kept of new tokens, [B, S, ...] each: first the rotated keys, and then the
        values."""
        memory: Sequence[Tensor | None] = self._memory or [None] * len(new)
        self._memory = [
            _write(old, self.length, more) for old, more in zip(memory, new, strict=True)
        ]
        self.length += new[0].shape[1]

    def see(self) -> tuple[list[Tensor], Tensor | None]:
        """Return what is kept of all places that the last token may see, the keys [B, T, G, D] and
        values [B, T, G, V] first; and which of them it sees in each sample, bool [B, 1, 1, T]; None
        if all."""
        kept = self.read()
        first, mask = self._samples.find_sight(self._window, self.length, kept[0].device)
        return [x_BT[:, first:] for x_BT in kept], mask

    def count_tokens(self, batch: int, device: torch.device) -> Tensor:
        """Return how many tokens each sample has so far, int64 [B]."""
        starts = torch.tensor(self._samples.starts or [0] * batch, device=device)
        return self.length - starts

    def read(self) -> list[Tensor]:
        """Return what is kept of all places."""
        assert self._memory, "the first pass fills it"
        return [x_BT[:, : self.length] for x_BT in self._memory]

    def fill(self, samples: CachedSamples, memory: list[Tensor]) -> LayerCache:
        """Return a cache of the same layer with what is kept of other places."""
        other = LayerCache(samples, self._window)
        other._memory, other.length = memory, memory[0].shape[1]
        return other


def _write(memory: Tensor | None, start: int, new: Tensor) -> Tensor:
    """Return memory with new places from `start` on. It is half as long again when it has to grow,
    so that a sample is copied a few times in all."""
    end = start + new.shape[1]
    if memory is None or memory.shape[1] < end:
        larger = new.new_empty(new.shape[0], end + end // 2, *new.shape[2:])
        if memory is not None:
            larger[:, :start] = memory[:, :start]
        memory = larger
    memory[:, start:end] = new
    return memory


class StateCache:
    """What the tokens so far leave in a layer that passes a state from token to token.

    Attributes:
        length: Places so far.
        tensors: The state of each sample, by whatever names the layer gives; empty before the first
            token.
    """

    def __init__(self, length: int = 0, tensors: dict[str, Tensor] | None = None) -> None:
        self.length = length
        self.tensors: dict[str, Tensor] = tensors or {}

    def replace(self, tokens: int, **tensors: Tensor) -> None:
        """Set the state after so many new tokens."""
        self.length += tokens
        self.tensors = tensors


class KeyValueCache:
    """The caches of all layers of a model.

    Attributes:
        length: Places so far, of the longest sample.
    """

    def __init__(self, layers: int) -> None:
        """Make an empty cache.

        Args:
            layers: Number of mixers of the model.
        """
        self.length = 0
        self._layers = layers
        self._samples = CachedSamples()
        self._caches: dict[object, LayerCache] = {}
        self._states: dict[Module, StateCache] = {}

    def get(self, layer: object, window: Window) -> LayerCache:
        """Return that of a layer, or of keys and values of this name, of which each token sees this
        much before itself."""
        if layer not in self._caches:
            self._caches[layer] = LayerCache(self._samples, window)
        return self._caches[layer]

    def get_state(self, layer: Module) -> StateCache:
        """Return that of a layer that passes a state from token to token."""
        return self._states.setdefault(layer, StateCache())

    def advance(self, tokens: int) -> bool:
        """End a pass of so many new tokens, and return whether every layer has added them. If not,
        a layer keeps nothing of the past, and the cache cannot be used."""
        self.length += tokens
        self._samples.sights.clear()
        lengths = [cache.length for cache in self._caches.values()]
        lengths += [state.length for state in self._states.values()]
        return lengths == [self.length] * self._layers

    def _get_size(self, sample: int) -> int:
        """Return the number of tokens of a sample."""
        starts = self._samples.starts
        return self.length - (starts[sample] if starts else 0)


def join_caches(parts: Sequence[tuple[KeyValueCache, Sequence[int]]]) -> KeyValueCache:
    """Return one cache of samples of several caches of a model.

    Args:
        parts: Caches, and the samples that are taken of each, one after another; one may come
            several times.
    """
    sizes = [cache._get_size(sample) for cache, samples in parts for sample in samples]
    first, _ = parts[0]
    joined = KeyValueCache(first._layers)
    joined.length = max(sizes)
    joined._samples.starts = [joined.length - size for size in sizes]
    for layer, cache in first._caches.items():
        of_parts = [
            [_align(kept, samples, joined.length) for kept in part._caches[layer].read()]
            for part, samples in parts
        ]
        memory = [torch.cat(same) for same in zip(*of_parts, strict=True)]
        joined._caches[layer] = cache.fill(joined._samples, memory)
    for layer, state in first._states.items():
        tensors = {
            name: torch.cat(
                [part._states[layer].tensors[name][list(samples)] for part, samples in parts]
            )
            for name in state.tensors
        }
        joined._states[layer] = StateCache(joined.length, tensors)
    return joined


def _align(x_BT: Tensor, samples: Sequence[int], length: int) -> Tensor:
    """Return the last places of samples, so many; zeros come before the first place."""
    x_BT = x_BT[list(samples), max(0, x_BT.shape[1] - length) :]
    missing = length - x_BT.shape[1]
    return F.pad(x_BT, (0, 0) * (x_BT.dim() - 2) + (missing, 0)) if missing else x_BT
