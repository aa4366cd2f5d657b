"""The named schedules: each function returns the list of compute actions of one rank.

p ranks, m microbatches, v chunks; F, B and W are the times of a rank's whole share, of which a
chunk takes 1/v. "Bubble" is the idle time of a rank between its first and last action, at its
maximum over the ranks. This is how the papers measure it; ranks need not end at the same time.
"Live" counts activations in units of a rank's share. Closed forms hold without communication time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.building_blocks import (
    alternate,
    divide_into_turns,
    drop_missing_microbatches,
    get_stage_of_chunk,
    list_passes,
    split_backwards,
)
from megaframe.schedule.schedule import Schedule


def build_named_schedule(
    name: str, ranks: int, chunks: int, microbatches: int, group: int | None = None
) -> Schedule:
    """Return the schedule `name`, whose limits the caller has checked (`find_name_mistakes`).

    Args:
        name: A key of `GENERATORS`.
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        microbatches: Microbatches per step.
        group: Microbatches per turn of a chunk, for `interleaved` only; default `ranks`.
    """
    size = (ranks, chunks, microbatches)
    if name == "interleaved":
        lists = [order_interleaved(rank, *size, group) for rank in range(ranks)]
    else:
        lists = [GENERATORS[name](rank, *size) for rank in range(ranks)]
    return Schedule(tuple(map(tuple, lists)))


def count_min_live_activations(name: str, ranks: int, chunks: int, microbatches: int) -> Fraction:
    """Return a lower bound on the live activations of a named schedule, without making it.

    Args:
        name: A key of `GENERATORS`.
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        microbatches: Microbatches per step.

    Returns:
        The bound in units of a rank's share of the layers.
    """
    bounds = {
        "gpipe": Fraction(microbatches),
        "breadth-first": Fraction(microbatches),
        "zb-h2": Fraction(2 * ranks - 1),
        "interleaved": Fraction(
            2 * ranks - 1 + (chunks - 1) * max(divide_into_turns(microbatches, ranks)), chunks
        ),
    }
    return min(bounds.get(name, Fraction(1)), Fraction(microbatches))


def order_gpipe(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019). Bubble (p-1)(F+B+W); live m.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Not used; there is one stage per rank.
        microbatches: Microbatches per step (m).
    """
    return order_breadth_first(rank, ranks, 1, microbatches)


def order_1f1b(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """1F1B (Narayanan et al. 2019, PipeDream-Flush). Bubble (p-1)(F+B+W); live p - rank.

    With one rank this is gradient accumulation.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Not used; there is one stage per rank.
        microbatches: Microbatches per step (m).
    """
    return _order_one_stage(rank, microbatches, warm_up=ranks - 1 - rank)


def order_interleaved(
    rank: int, ranks: int, chunks: int, microbatches: int, group: int | None = None
) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021): chunks take turns of g microbatches.

    Bubble (p-1)(F+B+W)/v. With turns of at most g, live is (2p-1 + (v-1)g)/v, at most m; for g = p
    this is p + (p-1)/v.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Stages per rank (v).
        microbatches: Microbatches per step (m).
        group: Microbatches per turn (g >= p, default p), or a few more if m is not divisible.
    """
    turns = divide_into_turns(microbatches, ranks if group is None else group)
    forwards, backwards = _list_looped_passes(rank, ranks, chunks, turns)
    return alternate(forwards, backwards, 2 * (ranks - 1 - rank) + (chunks - 1) * max(turns))


def order_breadth_first(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """All microbatches of one chunk before the next chunk, all forwards first (Lamy-Poirier 2022).

    Bubble (p-1)(F+B+W)/v for m >= p; live m. Each stage needs its weights only twice per step.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Stages per rank (v).
        microbatches: Microbatches per step (m).
    """
    forwards, backwards = _list_looped_passes(rank, ranks, chunks, [microbatches])
    return forwards + backwards


def order_zb_h1(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """1F1B with weight gradients deferred as far as the memory of 1F1B's first rank allows
    (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). Bubble (p-1)(F+B-W) for m >= p and
    W <= F, B; live p.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Not used; there is one stage per rank.
        microbatches: Microbatches per step (m).
    """
    return split_backwards(
        _order_one_stage(rank, microbatches, ranks - 1 - rank), deferred=range(rank)
    )


def order_zb_h2(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """Like zb-h1, with enough forwards in the warm-up to fill the pipeline.

    Bubble (p-1)(F+B-2W) for m >= 2p-1 and W <= F, B with 2W <= F+B, so 0 at F=B=W; live 2p-1.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Not used; there is one stage per rank.
        microbatches: Microbatches per step (m).
    """
    return split_backwards(
        _order_one_stage(rank, microbatches, 2 * (ranks - 1 - rank)), deferred=range(2 * rank)
    )


def order_zb_v(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """Two chunks in a V (Qi et al. 2023, section 6).

    Bubble (p-1)(B-W) for m >= 2p-1 and W <= F <= B, so 0 at F=B=W; live p. At the end, weight
    gradients are deferred until after the backwards that come back through the V, except after the
    first of these backwards.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Not used; there are two stages per rank.
        microbatches: Microbatches per step (m).
    """
    order = _order_vee(rank, ranks, microbatches)
    first = 2 * microbatches - _count_trailing_backwards(order) + 1
    return split_backwards(order, deferred=range(first, first + 2 * rank))


def order_dualpipe_v(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """DualPipe (DeepSeek-AI 2024) cut in half: the order of zb-v, in which only the first p-1-rank
    and the last p backwards of a rank are split. Bubble p/2 at F=B=W=1; live p.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Not used; there are two stages per rank.
        microbatches: Microbatches per step (m).
    """
    order = _order_vee(rank, ranks, microbatches)
    tail = range(max(0, 2 * microbatches - ranks), 2 * microbatches)
    return split_backwards(
        order, chosen={*range(ranks - 1 - rank), *tail}, deferred=tail[: rank + 1]
    )


def order_v_half(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """Two chunks in a V whose activations live half as long as in 1F1B (Qi et al. 2024, "Pipeline
    Parallelism with Controllable Memory"). A block of six slots repeats. A chunk's forward and
    backward together take three slots to move on by one rank. At F=B=W=1, bubble (7p-4)/4 for even
    p and 7(p-1)/4 for odd p; live (p+2)//2.

    Args:
        rank: Rank whose actions are listed.
        ranks: Pipeline ranks (p).
        chunks: Not used; there are two stages per rank.
        microbatches: Microbatches per step (m).
    """
    apart = 3 * (1 - ranks % 2)
    slots = {
        (ActionKind.F, 0): 2 * rank,
        (ActionKind.F, 1): 3 * ranks - 2 - rank,
        (ActionKind.B, 1): 3 * ranks - 1 + apart + 2 * rank,
        (ActionKind.B, 0): 6 * ranks - 2 + apart - rank,
    }
    # A block has six slots, one for each of F, B and W of both chunks. Each W takes the first one
    # that is free after its B.
    taken_slots = {slot % 6 for slot in slots.values()}
    for chunk in (1, 0):
        slot = slots[ActionKind.B, chunk] + 1
        while slot % 6 in taken_slots:
            slot += 1
        slots[ActionKind.W, chunk] = slot
        taken_slots.add(slot % 6)
    stages = [get_stage_of_chunk(rank, chunk, ranks, "vee") for chunk in (0, 1)]
    timed = sorted(
        (slot + 6 * microbatch, kind, stages[chunk], microbatch)
        for (kind, chunk), slot in slots.items()
        for microbatch in range(microbatches)
    )
    return [Action(kind, stage, number) for _, kind, stage, number in timed]


def _list_looped_passes(
    rank: int, ranks: int, chunks: int, turns: Sequence[int]
) -> tuple[list[Action], list[Action]]:
    stages = [get_stage_of_chunk(rank, chunk, ranks, "loop") for chunk in range(chunks)]
    return list_passes(ActionKind.F, stages, turns), list_passes(ActionKind.B, stages[::-1], turns)


def _order_one_stage(rank: int, microbatches: int, warm_up: int) -> list[Action]:
    return alternate(*_list_looped_passes(rank, 1, 1, [microbatches]), warm_up)


def _order_vee(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the forwards and backwards of zb-v and dualpipe-v: 2p-1 forwards, then forwards and
    backwards in turn, then the other backwards."""
    down, up = (get_stage_of_chunk(rank, chunk, ranks, "vee") for chunk in (0, 1))
    endless = [microbatches + 2 * ranks]
    f_down, f_up, b_down, b_up = (
        list_passes(kind, [stage], endless)
        for kind in (ActionKind.F, ActionKind.B)
        for stage in (down, up)
    )
    ranks_after = ranks - rank
    ahead = 2 * ranks_after - 1
    forwards = [
        *f_down[:ahead],
        *_interleave(f_up[:rank], f_down[ahead:]),
        *f_up[rank : rank + ranks_after],
        *_interleave(f_down[ahead + rank :], f_up[rank + ranks_after :]),
    ]
    backwards = [*b_up[:ranks_after], *_interleave(b_down, b_up[ranks_after:])]
    return drop_missing_microbatches(alternate(forwards, backwards, 2 * ranks - 1), microbatches)


def _interleave(first: list[Action], second: list[Action]) -> list[Action]:
    return [action for pair in zip(first, second, strict=False) for action in pair]


def _count_trailing_backwards(order: list[Action]) -> int:
    """Number of backwards after the last forward."""
    return next(n for n, action in enumerate(reversed(order)) if action.kind is ActionKind.F)


GENERATORS: Mapping[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": order_gpipe,
    "1f1b": order_1f1b,
    "interleaved": order_interleaved,
    "breadth-first": order_breadth_first,
    "zb-h1": order_zb_h1,
    "zb-h2": order_zb_h2,
    "zb-v": order_zb_v,
    "v-half": order_v_half,
    "dualpipe-v": order_dualpipe_v,
}
"""The function for each name, from (rank, ranks, chunks, microbatches) to the list of one rank."""
