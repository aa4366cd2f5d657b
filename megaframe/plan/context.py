"""Context ranks as the config wants them, and why attention could not be divided that way."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.model import Model
from megaframe.config.numbers import divisors, either
from megaframe.config.schema import Parallel, RunConfig


def exchanging_ranks(parallel: Parallel) -> int:
    """How many neighbours on the context axis exchange heads for tokens; the groups of them form a
    ring."""
    if parallel.context_kind == "ring":
        return 1
    if parallel.context_kind == "all_to_all":
        return parallel.context
    return parallel.context_heads or 1


def context_mistakes(config: RunConfig) -> Iterator[str]:
    """What of parallel.context_kind and parallel.context_heads does not fit."""
    parallel = config.parallel
    context, kind, given = parallel.context, parallel.context_kind, parallel.context_heads
    if kind != "nested":
        if given is not None:
            yield (
                f"parallel.context_heads={given} has no effect with parallel.context_kind={kind}; "
                "leave it out, or use parallel.context_kind=nested"
            )
    elif given is None or context % given or not 1 < given < context:
        yield _no_nesting(config)
        return
    ranks = exchanging_ranks(parallel)
    if ranks > 1 and not _shares(config.model, parallel.tensor, ranks):
        yield _no_sharing(config, ranks)


def _no_nesting(config: RunConfig) -> str:
    context, given = config.parallel.context, config.parallel.context_heads
    inner = [d for d in divisors(context)[1:-1] if _fits(config, d)]
    value = "left out" if given is None else str(given)
    others = "parallel.context_kind=ring"
    if _fits(config, context):
        others += " or all_to_all"
    if inner:
        near = sorted(sorted(inner, key=lambda d: abs(d - (given or d)))[:2])
        mend = f"use parallel.context_heads={either(near)}, or {others}"
    else:
        mend = f"no number does; use {others}"
    return (
        f"parallel.context_heads={value} does not divide parallel.context={context} into a ring of "
        f"more than one group of more than one rank, as parallel.context_kind=nested needs; {mend}"
    )


def _no_sharing(config: RunConfig, ranks: int) -> str:
    parallel, model = config.parallel, config.model
    nested = parallel.context_kind == "nested"
    name = "parallel.context_heads" if nested else "parallel.context"
    what = f"{name}={ranks}" if nested else f"{name}={ranks} of parallel.context_kind=all_to_all"
    of_a_rank = "" if parallel.tensor == 1 else f" on each of parallel.tensor={parallel.tensor}"
    fits = [d for d in range(2, ranks * 2) if _shares(model, parallel.tensor, d)]
    if nested:
        fits = [d for d in fits if parallel.context % d == 0 and d < parallel.context]
    near = [d for d in fits if d < ranks][-1:] + [d for d in fits if d > ranks][:1]
    mend = "use " + (f"{either(near)}, or " if near else "") + "parallel.context_kind=ring"
    return (
        f"{what} can neither divide nor evenly share model.kv_heads={model.kv_heads} with "
        f"model.heads={model.heads}{of_a_rank}; {mend}"
    )


def _fits(config: RunConfig, ranks: int) -> bool:
    return _shares(config.model, config.parallel.tensor, ranks)


def _shares(model: Model, tensor: int, ranks: int) -> bool:
    """Whether so many ranks can have equally many query heads with the key and value heads that
    belong to them, of what one tensor rank has; where tensor ranks do not fit, that is said
    elsewhere, and the fewest heads that each could have are counted."""
    heads = max(1, model.heads // tensor)
    groups = max(1, model.kv_heads // tensor)
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)
