"""Random valid schedules, and their times by a slow method: longest paths in the whole graph."""

from fractions import Fraction
from graphlib import TopologicalSorter

from hypothesis import strategies as st

from megaframe.schedule import Action, ActionKind, Schedule, parse_action

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W


def schedule_of(text):
    """Return a schedule from its text form, in which any kind of action is allowed."""
    return Schedule(
        tuple(tuple(map(parse_action, line.split())) for line in text.strip().splitlines())
    )


def list_inputs(schedule, action):
    """Return the compute actions whose results a compute action needs."""
    last = len(schedule.rank_of) - 1
    kind, stage, number = action.kind, action.stage, action.microbatch
    if kind is W:
        return [Action(B, stage, number)]
    if kind is F:
        return [Action(F, stage - 1, number)] if stage else []
    return [Action(F, stage, number)] + [Action(B, stage + 1, number)] * (stage < last)


@st.composite
def draw_schedules(draw, most_stages=5, most_microbatches=4):
    """Draw a schedule with any placement of stages, any executable order, any split backwards."""
    stages = draw(st.integers(1, most_stages))
    ranks = draw(st.integers(1, stages))
    microbatches = draw(st.integers(1, most_microbatches))
    places = [*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=stages))]
    rank_of = draw(st.permutations(places[:stages] + [0] * (stages - len(places))))
    cells = [(stage, number) for stage in range(stages) for number in range(microbatches)]
    split = [cell for cell in cells if draw(st.booleans())]
    left = [Action(kind, *cell) for kind in (F, B) for cell in cells]
    left += [Action(W, *cell) for cell in split]
    shape = Schedule(tuple(tuple(a for a in left if rank_of[a.stage] == r) for r in range(ranks)))
    lists, done = [[] for _ in range(ranks)], set()
    while left:
        able = [action for action in left if done.issuperset(list_inputs(shape, action))]
        action = draw(st.sampled_from(able))
        lists[rank_of[action.stage]].append(action)
        done.add(action)
        left.remove(action)
    return Schedule(tuple(map(tuple, lists)))


def is_executable(schedule):
    """Return whether the graph of order and inputs has no cycle. No action may be missing."""
    graph = TopologicalSorter()
    for actions in schedule.ranks:
        for before, action in zip((None, *actions), actions, strict=False):
            graph.add(action, *list_inputs(schedule, action), *([before] if before else []))
    try:
        graph.prepare()
    except ValueError:
        return False
    return True


def compute_ends(schedule, durations, comm):
    """Return when each action ends, by the longest path to it. durations: seconds by action."""
    rank_of, known = schedule.rank_of, {}
    before, sent_before = {}, {}
    for rank, actions in enumerate(schedule.ranks):
        before |= zip(actions, (None, *actions), strict=False)
        edges = {}
        for action in actions:
            to = find_target(schedule, action)
            if to is not None and rank_of[to] != rank:
                sent_before[action] = edges.get(rank_of[to])
                edges[rank_of[to]] = action

    def end(action):
        if action not in known:
            waits = [arrival(predecessor, action) for predecessor in list_inputs(schedule, action)]
            waits += [end(before[action])] if before[action] else []
            known[action] = durations[action] + max(waits, default=0)
        return known[action]

    def arrival(producer, consumer):
        if rank_of[producer.stage] == rank_of[consumer.stage]:
            return end(producer)
        return transferred(producer)

    def transferred(producer):
        earlier = sent_before[producer]
        return comm + max(end(producer), transferred(earlier) if earlier else 0)

    return {action: end(action) for actions in schedule.ranks for action in actions}


def find_target(schedule, action):
    """Return the stage that takes the result of an action, or None."""
    to = action.stage + {F: 1, B: -1, W: -1 - action.stage}[action.kind]
    return to if 0 <= to < len(schedule.rank_of) else None


def list_durations(schedule, forward, backward, weight):
    """Return the seconds of each action, from the seconds of each stage."""
    times = {F: forward, B: backward, W: weight}
    return {
        action: times[action.kind][action.stage]
        + (
            weight[action.stage]
            if action.kind is B
            and (action.stage, action.microbatch) not in schedule.split_backwards
            else 0
        )
        for actions in schedule.ranks
        for action in actions
    }


def seconds():
    """Return a strategy for exact times."""
    return st.builds(Fraction, st.integers(0, 12), st.sampled_from((1, 2, 3)))
