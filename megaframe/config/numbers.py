"""Nearest valid values, and whether axis sizes form a layout: the arithmetic behind error messages.

Both `validate/run.py` and `Layout` use it, so that a config is refused before anything is built,
with the same message that `Layout` itself would raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, isqrt

from megaframe.config.schema import Parallel

TIMES = " \N{MULTIPLICATION SIGN} "


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending; above 10^12 some may be missing."""
    # Bounded, so that a message about an absurd size does not take minutes.
    small = [d for d in range(1, min(isqrt(number), 10**6) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def nearest_divisors(number: int, wanted: int) -> str:
    """Return the divisors of `number` closest to `wanted` on each side, for a message: `4 or 8`."""
    valid = divisors(number)
    below = [d for d in valid if d <= wanted][-1:]
    above = [d for d in valid if d > wanted][:1]
    return either(below + above)


def nearest_multiples(number: int, wanted: int) -> str:
    """Return the positive multiples of `number` closest to `wanted`, for a message: `6 or 12`."""
    below = wanted // number * number
    valid = [below] if below == wanted else [below, below + number]
    return either(n for n in valid if n > 0)


def either(values: Iterable[object]) -> str:
    """Join values as `a, b or c`."""
    *first, last = [str(value) for value in values]
    return f"{', '.join(first)} or {last}" if first else last


def layout_mistakes(sizes: Mapping[str, int]) -> list[str]:
    """Return why `sizes`, one per axis and `data_replicate`, cannot be a layout; empty if valid."""
    mistakes = [
        f"parallel.{axis}={size} must be a whole number >= 1"
        for axis, size in sizes.items()
        if type(size) is not int or size < 1
    ]
    if mistakes:
        return mistakes
    data, replicas = sizes["data"], sizes["data_replicate"]
    if data % replicas:
        mistakes.append(
            f"parallel.data_replicate={replicas} does not divide parallel.data={data}; "
            f"use {nearest_divisors(data, replicas)}"
        )
    stage = sizes["tensor"] * sizes["context"] * data
    of_a_stage = f"the {stage} ranks of a stage ({TIMES.join(('tensor', 'context', 'data'))})"
    expert, expert_tensor = sizes["expert"], sizes["expert_tensor"]
    if stage % expert_tensor:
        mistakes.append(
            f"parallel.expert_tensor={expert_tensor} does not divide {of_a_stage}; "
            f"use {nearest_divisors(stage, expert_tensor)}"
        )
    elif stage % (expert * expert_tensor):
        mistakes.append(
            f"parallel.expert={expert}{TIMES}parallel.expert_tensor={expert_tensor} does not "
            f"divide {of_a_stage}; "
            f"use parallel.expert={nearest_divisors(stage // expert_tensor, expert)}"
        )
    elif data % replicas == 0 and stage // replicas % (expert * expert_tensor):
        mistakes.append(
            f"parallel.expert={expert}{TIMES}parallel.expert_tensor={expert_tensor} does not "
            f"divide the {stage // replicas} ranks of a stage that hold one of "
            f"parallel.data_replicate={replicas} copies; use parallel.data_replicate="
            f"{nearest_divisors(gcd(stage // (expert * expert_tensor), data), replicas)}"
        )
    return mistakes


def fewest_ranks(parallel: Parallel) -> int:
    """Return the smallest world that the axes can be a layout of."""
    stage, experts = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    fewest = parallel.data_replicate * (experts // gcd(experts, stage))
    return stage * parallel.pipeline * (parallel.data or fewest)


def axis_sizes(parallel: Parallel, world: int) -> tuple[dict[str, int], list[str]]:
    """Return the axis sizes of `parallel` for `world` ranks, and everything that is wrong with
    them.

    If `parallel.data` is not given, it is the world divided by the other axes, rounded down, and at
    least 1.
    """
    rest = parallel.tensor * parallel.context * parallel.pipeline
    data = parallel.data or max(1, world // rest)
    sizes = {
        "tensor": parallel.tensor,
        "context": parallel.context,
        "data": data,
        "pipeline": parallel.pipeline,
        "expert": parallel.expert,
        "expert_tensor": parallel.expert_tensor,
        "data_replicate": parallel.data_replicate,
    }
    mistakes = layout_mistakes(sizes)
    if rest * data != world:
        mistakes.append(_world_mistake(parallel, data, rest, world))
    return sizes, mistakes


def _world_mistake(parallel: Parallel, data: int, rest: int, world: int) -> str:
    """Return the message if `data` × `rest` (the product of the other axes) is not the world."""
    axes = TIMES.join(
        f"parallel.{axis}={getattr(parallel, axis)}" for axis in ("tensor", "context", "pipeline")
    )
    if world % rest:
        return (
            f"{axes} = {rest} does not divide the world of {world} ranks; start "
            f"{nearest_multiples(rest, world)} ranks or make the product "
            f"{nearest_divisors(world, rest)}"
        )
    return (
        f"parallel.data={data}{TIMES}{axes} = {data * rest} is not the world of {world} ranks; "
        f"use parallel.data={world // rest} or leave it out"
    )
