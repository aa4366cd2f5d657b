"""Windows: how many tokens each layer's attention sees, and what of `model.window` is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.model import Model


def windows(model: Model) -> tuple[int | None, ...]:
    """What is repeated over the layers, from the first one on: `model.window`, one number for all
    as a pattern of one. A window is in tokens, None where a layer sees all that is before it."""
    return model.window if isinstance(model.window, tuple) else (model.window,)


def window_of(model: Model, layer: int) -> int | None:
    """The window of a layer; predictors' blocks count on behind the last one."""
    pattern = windows(model)
    return pattern[layer % len(pattern)]


def mean_keys(seq: int, window: int | None) -> float:
    """Mean number of keys that a query attends to, causal and with at most `window` of them.

    The area under min(position, window): seq / 2 without a window, and towards `window` when the
    sequence is much longer. Counting whole keys (a query sees itself in full) gives at most half a
    key more.
    """
    reach = min(window or seq, seq)
    return reach - reach * reach / (2 * seq)


def window_mistakes(model: Model) -> Iterator[str]:
    """Why `model.window` is no pattern of the layers."""
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
