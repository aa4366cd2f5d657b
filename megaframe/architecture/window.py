"""Windows of attention, and chunks in their place: which layer has which, and how many keys a
query sees through one."""

from __future__ import annotations

from dataclasses import dataclass

from megaframe.config.model import ModelConfig


@dataclass(frozen=True)
class Chunk:
    """Chunks of a sample, in place of a window: a token sees those before it in its own chunk
    (Llama 4, 2025).

    Attributes:
        size: Tokens of a chunk.
    """

    size: int


Window = int | Chunk | None
"""What a token sees: so many tokens with itself, its chunk, or all before it."""


def list_windows(model: ModelConfig) -> tuple[int | None, ...]:
    """Return the pattern of windows that repeats over the layers from the first one.

    It is `model.window`, where a single number is a pattern of one. A window is in tokens; None
    means everything before the token.
    """
    return model.window if isinstance(model.window, tuple) else (model.window,)


def get_window(model: ModelConfig, layer: int) -> int | None:
    """Return the window of a layer. Predictors' blocks are numbered after the last layer."""
    pattern = list_windows(model)
    return pattern[layer % len(pattern)]


def compute_mean_keys(seq: int, window: Window) -> float:
    """Return the mean number of keys that a query attends to, causally and at most `window`.

    It is the mean of min(position, window) as a continuous function: seq / 2 without a window, and
    close to `window` for a much longer sequence. Counting whole keys (a query sees itself) would
    give at most half a key more. In a chunk it is half of its tokens.
    """
    if isinstance(window, Chunk):
        chunks, rest = divmod(seq, min(window.size, seq))
        return (chunks * min(window.size, seq) ** 2 + rest**2) / (2 * seq)
    reach = min(window or seq, seq)
    return reach - reach * reach / (2 * seq)
