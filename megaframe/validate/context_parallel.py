"""Checks of context parallelism: how its ranks are nested."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.model_blocks import list_mixers
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.errors import join_or, list_divisors


def find_context_mistakes(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a message for each mistake in parallel.context_kind and parallel.context_heads."""
    context, kind, neighbours = parallel.context, parallel.context_kind, parallel.context_heads
    if kind != "nested":
        if neighbours is not None:
            yield (
                f"parallel.context_heads={neighbours} has no effect with "
                f"parallel.context_kind={kind}; "
                "leave it out, or use parallel.context_kind=nested"
            )
    elif neighbours is None or context % neighbours or not 1 < neighbours < context:
        yield _describe_nesting_mistake(model, parallel)


def _describe_nesting_mistake(model: ModelConfig, parallel: ParallelConfig) -> str:
    context, neighbours = parallel.context, parallel.context_heads
    inner = [d for d in list_divisors(context)[1:-1] if _can_share(model, parallel, d)]
    value = "left out" if neighbours is None else str(neighbours)
    alternatives = "parallel.context_kind=ring"
    if _can_share(model, parallel, context):
        alternatives += " or all_to_all"
    if inner:
        near = sorted(sorted(inner, key=lambda d: abs(d - (neighbours or d)))[:2])
        mend = f"use parallel.context_heads={join_or(near)}, or {alternatives}"
    else:
        mend = f"no number does; use {alternatives}"
    return (
        f"parallel.context_heads={value} does not divide parallel.context={context} into a ring of "
        f"more than one group of more than one rank, as parallel.context_kind=nested needs; {mend}"
    )


def _can_share(model: ModelConfig, parallel: ParallelConfig, ranks: int) -> bool:
    tensor = parallel.tensor
    return all(mixer.can_share(tensor, ranks) for mixer in list_mixers(model))
