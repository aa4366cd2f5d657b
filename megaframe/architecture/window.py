"""Windows of attention: which layer has which, and how many keys a query sees through one."""

from __future__ import annotations

from megaframe.config.model import ModelConfig


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


def compute_mean_keys(seq: int, window: int | None) -> float:
    """Return the mean number of keys that a query attends to, causally and at most `window`.

    It is the mean of min(position, window) as a continuous function: seq / 2 without a window, and
    close to `window` for a much longer sequence. Counting whole keys (a query sees itself) would
    give at most half a key more.
    """
    reach = min(window or seq, seq)
    return reach - reach * reach / (2 * seq)
