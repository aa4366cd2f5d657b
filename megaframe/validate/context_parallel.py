"""Checks of context parallelism: context ranks that can share a layer's heads."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.config.model import ModelConfig
from megaframe.config.schema import RunConfig
from megaframe.errors import join_or, list_divisors
from megaframe.validate.blocks import check_each_block


def find_context_mistakes(config: RunConfig) -> Iterator[str]:
    """Yield a message for each mistake in parallel.context_kind and parallel.context_heads."""
    parallel = config.parallel
    context, kind, neighbours = parallel.context, parallel.context_kind, parallel.context_heads
    if kind != "nested":
        if neighbours is not None:
            yield (
                f"parallel.context_heads={neighbours} has no effect with "
                f"parallel.context_kind={kind}; "
                "leave it out, or use parallel.context_kind=nested"
            )
    elif neighbours is None or context % neighbours or not 1 < neighbours < context:
        yield _describe_nesting_mistake(config)
        return
    ranks = count_exchanging_ranks(parallel)
    if ranks > 1:
        yield from check_each_block(
            config.model,
            lambda model: _find_sharing_mistakes(config.model_copy(update={"model": model}), ranks),
        )


def _describe_nesting_mistake(config: RunConfig) -> str:
    context, neighbours = config.parallel.context, config.parallel.context_heads
    inner = [d for d in list_divisors(context)[1:-1] if _can_share(config, d)]
    value = "left out" if neighbours is None else str(neighbours)
    alternatives = "parallel.context_kind=ring"
    if _can_share(config, context):
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


def _find_sharing_mistakes(config: RunConfig, ranks: int) -> Iterator[str]:
    parallel, model = config.parallel, config.model
    if _can_share(config, ranks):
        return
    nested = parallel.context_kind == "nested"
    name = "parallel.context_heads" if nested else "parallel.context"
    setting = f"{name}={ranks}" if nested else f"{name}={ranks} of parallel.context_kind=all_to_all"
    of_a_rank = "" if parallel.tensor == 1 else f" on each of parallel.tensor={parallel.tensor}"
    fits = [d for d in range(2, ranks * 2) if _can_share_heads(model, parallel.tensor, d)]
    if nested:
        fits = [d for d in fits if parallel.context % d == 0 and d < parallel.context]
    near = [d for d in fits if d < ranks][-1:] + [d for d in fits if d > ranks][:1]
    mend = "use " + (f"{join_or(near)}, or " if near else "") + "parallel.context_kind=ring"
    yield (
        f"{setting} can neither divide nor evenly share model.kv_heads={model.kv_heads} with "
        f"model.heads={model.heads}{of_a_rank}; {mend}"
    )


def _can_share(config: RunConfig, ranks: int) -> bool:
    return _can_share_heads(config.model, config.parallel.tensor, ranks)


def _can_share_heads(model: ModelConfig, tensor: int, ranks: int) -> bool:
    """Return whether `ranks` ranks can have equally many of one tensor rank's query heads, with the
    key and value heads that belong to them. A `tensor` that does not divide the heads is reported
    elsewhere; here its quotient is rounded down, to at least one head."""
    heads = max(1, model.heads // tensor)
    groups = max(1, model.kv_heads // tensor)
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)
