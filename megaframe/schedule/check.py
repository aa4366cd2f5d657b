"""Check: proves that a schedule runs to its end and computes each gradient once, or says why not.

It accepts compute-only and lowered schedules. It proves that there is no deadlock by simulating the
partial order itself, in which a send needs no posted receive. The proof also holds for the
executor, where a transfer does need one: both ends of an edge use the same order, and a receive
comes before its consumer. When a rank reaches a consumer, its receive and all earlier ones of the
edge are therefore posted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from megaframe.errors import UserError
from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.event_simulation import (
    EncodedSchedule,
    EventTimes,
    encode_schedule,
    find_deadlock_cycle,
    simulate_events,
)
from megaframe.schedule.schedule import Schedule

_ORDER = (
    (ActionKind.RECV_F, ActionKind.F),
    (ActionKind.F, ActionKind.SEND_F),
    (ActionKind.F, ActionKind.B),
    (ActionKind.RECV_B, ActionKind.B),
    (ActionKind.B, ActionKind.SEND_B),
    (ActionKind.B, ActionKind.W),
)
"""For one stage and microbatch, the first kind must come before the second."""

_PEERS = {ActionKind.SEND_F: 1, ActionKind.RECV_F: -1, ActionKind.SEND_B: -1, ActionKind.RECV_B: 1}
"""Stage at the other end of a transfer, relative to the stage of the action."""

_Positions = dict[Action, tuple[int, int]]
"""(rank, position in its list) of every action but UPDATE."""


def check(schedule: Schedule) -> None:
    """Check that a schedule has every necessary action once, on the right rank, and in an order
    that can be executed.

    Raises:
        UserError: With what is wrong and its position in a grid, or the cycle of a deadlock.
    """
    _check_stages(schedule)
    positions = _find_positions(schedule)
    lowered = any(not action.kind.is_compute for actions in schedule.ranks for action in actions)
    needed = [
        _list_required_kinds(schedule, stage, lowered) for stage in range(len(schedule.rank_of))
    ]
    _check_complete(schedule, positions, needed)
    _check_order(schedule, positions)
    if lowered:
        _check_reductions(schedule, positions)
        _check_updates(schedule)
        _check_edges(schedule)
    encoded = encode_schedule(schedule)
    events = simulate_events(encoded, [0] * len(encoded.list_links()) * encoded.microbatches, 0)
    if events.stuck:
        raise explain_deadlock(encoded, events)


def explain_deadlock(encoded: EncodedSchedule, events: EventTimes) -> UserError:
    """Return the error that says which ranks wait for which in a simulation that got stuck."""
    cycle = find_deadlock_cycle(encoded, events.stuck)
    waits = "; ".join(
        f"rank {rank} waits with {encoded.decode_action(code)} for {encoded.decode_action(maker)}"
        for rank, code, maker in cycle
    )
    rows = [[str(encoded.decode_action(code)) for code in steps] for steps in encoded.steps]
    centres = [events.stuck.get(rank, len(row)) for rank, row in enumerate(rows)]
    grid = draw_marked_grid(rows, centres, {rank for rank, _, _ in cycle})
    return UserError(
        f"schedule: deadlock of {len(events.stuck)} of {len(rows)} ranks: {waits}\n{grid}"
    )


def draw_marked_grid(
    rows: Sequence[Sequence[str]], centres: Sequence[int], marked: Iterable[int], reach: int = 5
) -> str:
    """Return a text grid of the cells around `centres`, with only the `marked` rows and those near
    them. The centre of a marked row is shown as `>cell<`.

    Args:
        rows: Cells of each rank; rows may differ in length.
        centres: Centre column of each row.
        marked: Numbers of the rows to mark.
        reach: Number of columns shown before the centre, and from the centre on.
    """
    marked = set(marked)
    shown_ranks = [r for r in range(len(rows)) if any(abs(r - m) <= 2 for m in sorted(marked)[:8])]
    lines = []
    for rank in shown_ranks:
        row, centre = rows[rank], centres[rank]
        cells = [row[i] if 0 <= i < len(row) else "" for i in range(centre - reach, centre + reach)]
        if rank in marked:
            cells[reach] = f">{cells[reach]}<"
        edges = ("…" if centre > reach else "", "…" if len(row) > centre + reach else "")
        lines.append([f"rank {rank}", edges[0], *cells, edges[1]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([c.center(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  " + " ".join(cells).rstrip() for cells in padded)


def _make_cell_error(
    schedule: Schedule, rank: int, position: int, problem: str, missing: Action | None = None
) -> UserError:
    """Return the error for one cell. A `missing` action is shown where it should be."""
    rows = [list(map(str, actions)) for actions in schedule.ranks]
    if missing is not None:
        rows[rank].insert(position, f"{missing}?")
    grid = draw_marked_grid(rows, [position] * len(rows), {rank})
    return UserError(f"schedule: {problem} (rank {rank}, action {position})\n{grid}")


def _check_stages(schedule: Schedule) -> None:
    """Check that every rank has a stage, that no stage number is left out, and that every stage is
    on one rank. The right rank of a stage is the one with most of its actions."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for rank, actions in enumerate(schedule.ranks):
        stages = [action.stage for action in actions if action.stage is not None]
        if not stages:
            raise UserError(f"schedule: rank {rank} of {len(schedule.ranks)} has no stage")
        for stage in stages:
            counts[stage][rank] += 1
    if not counts:
        raise UserError("schedule: it has 0 ranks; it needs 1 or more")
    highest = max(counts)
    hole = next(stage for stage in range(len(counts) + 1) if stage not in counts)
    owner = {stage: ranks.most_common(1)[0][0] for stage, ranks in counts.items()}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.stage is None:
                continue
            home = owner[action.stage]
            if home != rank:
                problem = f"{action} is on rank {rank}, but stage {action.stage} is on rank {home}"
                raise _make_cell_error(schedule, rank, position, problem)
            if hole < action.stage == highest:
                problem = f"stage {highest} is there, but stage {hole} has no action"
                raise _make_cell_error(schedule, rank, position, problem)


def _find_positions(schedule: Schedule) -> _Positions:
    positions: _Positions = {}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.kind is ActionKind.UPDATE:
                continue
            first = positions.setdefault(action, (rank, position))
            if first != (rank, position):
                problem = f"{action} is repeated; it stands at {first[1]} already"
                raise _make_cell_error(schedule, rank, position, problem)
    return positions


def _list_required_kinds(schedule: Schedule, stage: int, lowered: bool) -> tuple[ActionKind, ...]:
    """Return the kinds that a stage must have once for each microbatch."""
    ranks = schedule.rank_of
    kinds = [ActionKind.F, ActionKind.B]
    for kind, step in _PEERS.items():
        peer = stage + step
        if lowered and 0 <= peer < len(ranks) and ranks[peer] != ranks[stage]:
            kinds.append(kind)
    return tuple(kinds)


def _check_complete(
    schedule: Schedule, positions: _Positions, needed: Sequence[tuple[ActionKind, ...]]
) -> None:
    for action, (rank, position) in positions.items():
        kind, stage = action.kind, action.stage
        assert stage is not None
        if kind in _PEERS and kind not in needed[stage]:
            peer = stage + _PEERS[kind]
            other = f"stage {peer} is on rank {rank} too" if 0 <= peer < len(needed) else "none"
            problem = f"{action} has no other rank at its other end ({other})"
            raise _make_cell_error(schedule, rank, position, problem)
    for stage, kinds in enumerate(needed):
        for microbatch in range(schedule.microbatches):
            for kind in kinds:
                if Action(kind, stage, microbatch) not in positions:
                    raise _make_missing_error(schedule, positions, Action(kind, stage, microbatch))


def _make_missing_error(schedule: Schedule, positions: _Positions, action: Action) -> UserError:
    stage, kind = action.stage, action.kind
    assert stage is not None
    rank = schedule.rank_of[stage]
    kinds_after = [b for a, b in _ORDER if a is kind]
    kinds_before = [a for a, b in _ORDER if b is kind]
    after = [positions.get(Action(k, stage, action.microbatch)) for k in kinds_after]
    before = [positions.get(Action(k, stage, action.microbatch)) for k in kinds_before]
    position = min(
        (place[1] for place in after if place),
        default=max((place[1] + 1 for place in before if place), default=len(schedule.ranks[rank])),
    )
    count = sum(a.kind is kind and a.stage == stage for a in schedule.ranks[rank])
    problem = f"{action} is missing: {count} {kind.value} for {schedule.microbatches} microbatches"
    return _make_cell_error(schedule, rank, position, problem, missing=action)


def _check_order(schedule: Schedule, positions: _Positions) -> None:
    sooner = {second: [a for a, b in _ORDER if b is second] for _, second in _ORDER}
    for action, (rank, position) in positions.items():
        for first in sooner.get(action.kind, ()):
            before = Action(first, action.stage, action.microbatch)
            place = positions.get(before)
            if place is not None and place[1] > position:
                problem = (
                    f"{action} stands before {before}, which it needs and which is at {place[1]}"
                )
                raise _make_cell_error(schedule, rank, position, problem)


def _check_reductions(schedule: Schedule, positions: _Positions) -> None:
    """Check that every stage has one REDUCE, followed by exactly one action that completes the
    stage's gradients of a microbatch."""
    for stage, rank in enumerate(schedule.rank_of):
        completing = [
            position
            for position, action in enumerate(schedule.ranks[rank])
            if action.stage == stage and _is_gradient_complete_after(action, schedule)
        ]
        place = positions.get(Action(ActionKind.REDUCE, stage))
        if place is None:
            reduction = Action(ActionKind.REDUCE, stage)
            problem = f"{reduction} is missing; it stands before the last gradient of its stage"
            raise _make_cell_error(schedule, rank, completing[-1], problem, reduction)
        num_later = sum(position > place[1] for position in completing)
        if num_later != 1:
            problem = (
                f"{stage}REDUCE stands before {num_later} of the stage's {len(completing)} "
                f"gradients; it stands before the last one, {schedule.ranks[rank][completing[-1]]}"
            )
            raise _make_cell_error(schedule, rank, place[1], problem)


def _is_gradient_complete_after(action: Action, schedule: Schedule) -> bool:
    """Return whether the weight gradient of the action's microbatch is complete after it."""
    if action.kind is not ActionKind.B or action.stage is None or action.microbatch is None:
        return action.kind is ActionKind.W
    return (action.stage, action.microbatch) not in schedule.split_backwards


def _check_updates(schedule: Schedule) -> None:
    update = Action(ActionKind.UPDATE)
    for rank, actions in enumerate(schedule.ranks):
        last = len(actions) - 1
        if update not in actions:
            raise _make_cell_error(schedule, rank, last + 1, "UPDATE is missing at the end", update)
        first = actions.index(update)
        if first != last:
            problem = (
                f"UPDATE stands before {last - first} other actions; it stands once, at the end"
            )
            raise _make_cell_error(schedule, rank, first, problem)


def _check_edges(schedule: Schedule) -> None:
    """Check that both ends of every directed edge between ranks name the same tensors in the same
    order."""
    sends_by_edge: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives_by_edge: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, position, action, peer in _list_transfers(schedule):
        if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            sends_by_edge[rank, peer].append(action)
        else:
            receives_by_edge[peer, rank].append((position, action))
    for (source, target), sends in sends_by_edge.items():
        for number, (send, (position, action)) in enumerate(
            zip(sends, receives_by_edge[source, target], strict=True)
        ):
            if _find_matching_receive(send) != action:
                problem = (
                    f"{action} takes tensor {number} from rank {source} to rank {target}, "
                    f"but that is of {send}"
                )
                raise _make_cell_error(schedule, target, position, problem)


def _list_transfers(schedule: Schedule) -> Iterator[tuple[int, int, Action, int]]:
    """Yield (rank, position, action, rank at the other end) of all sends and receives."""
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            if action.kind in _PEERS and action.stage is not None:
                yield rank, position, action, schedule.rank_of[action.stage + _PEERS[action.kind]]


def _find_matching_receive(send: Action) -> Action:
    kind = ActionKind.RECV_F if send.kind is ActionKind.SEND_F else ActionKind.RECV_B
    assert send.stage is not None
    return Action(kind, send.stage + _PEERS[send.kind], send.microbatch)
