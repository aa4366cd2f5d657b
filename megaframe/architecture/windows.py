"""Windows: how many tokens each layer's attention sees, and checks of `model.window`."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.model import ModelConfig


def windows(model: ModelConfig) -> tuple[int | None, ...]:
    """Return the pattern of windows that repeats over the layers from the first one. It is
    `model.window`, where a single number is a pattern of one. A window is in tokens; None means
    everything before the token."""
    return model.window if isinstance(model.window, tuple) else (model.window,)


def window_of(model: ModelConfig, layer: int) -> int | None:
    """Return the window of a layer. Predictors' blocks are numbered after the last layer."""
    pattern = windows(model)
    return pattern[layer % len(pattern)]


def mean_keys(seq: int, window: int | None) -> float:
    """Return the mean number of keys that a query attends to, causally and at most `window`.

    It is the mean of min(position, window) as a continuous function: seq / 2 without a window, and
    close to `window` for a much longer sequence. Counting whole keys (a query sees itself) would
    give at most half a key more.
    """
    reach = min(window or seq, seq)
    return reach - reach * reach / (2 * seq)


def window_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message if `model.window` is not a pattern for the layers."""
    pattern = windows(model)
    if not pattern:
        yield (
            "model.window=[] has 0 entries to repeat over model.layers="
            f"{model.layers}; use null for no window, or 1 to {model.layers} entries"
        )
    elif len(pattern) > model.layers:
        yield (
            f"model.window has {len(pattern)} entries for model.layers={model.layers}; use 1 to "
            f"{model.layers} of them, which are repeated from the first layer on"
        )
