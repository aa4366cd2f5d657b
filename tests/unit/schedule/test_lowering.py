"""Lowering: which actions are added to the compute actions, and where."""

from hypothesis import given
from hypothesis import strategies as st

from megaframe.schedule import NAMED_SCHEDULES, ActionKind, generate, lower
from megaframe.schedule.check import check

ORDERS = [*NAMED_SCHEDULES]


def find_nearest_size(name, ranks, chunks, additional):
    """Return a size close to the drawn one for which the schedule exists."""
    return ranks, NAMED_SCHEDULES[name].limits.find_nearest_chunks(chunks), ranks + additional


def test_reduction_is_posted_before_the_last_backward_and_the_update_is_last():
    (actions,) = lower(generate("1f1b", 1, 1, 3)).ranks
    assert " ".join(map(str, actions)) == "0F0 0B0 0F1 0B1 0F2 0REDUCE 0B2 UPDATE"


def test_two_ranks_in_full():
    assert str(lower(generate("1f1b", 2, 1, 2))) == (
        "0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0REDUCE 0B1 UPDATE\n"
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1REDUCE 1B1 1SEND_B1 UPDATE"
    )


def test_a_split_stage_is_complete_with_its_last_weight_gradient():
    lowered = lower(generate("zb-h1", 4, 1, 6))
    for rank, actions in enumerate(lowered.ranks):
        position = [action.kind for action in actions].index(ActionKind.REDUCE)
        later = [
            a
            for a in actions[position:]
            if a.kind in (ActionKind.B, ActionKind.W) and a.stage == rank
        ]
        assert [action.kind for action in later] == [ActionKind.W]


def test_nothing_is_sent_within_a_rank():
    for name, size in (("zb-v", (1, 2, 3)), ("interleaved", (1, 3, 3)), ("zb-v", (3, 2, 5))):
        sent = [
            a.stage
            for rank in lower(generate(name, *size)).ranks
            for a in rank
            if a.kind is ActionKind.SEND_F
        ]
        boundaries = [] if size[0] == 1 else [0, 1, 3, 4]
        assert sorted(set(sent)) == boundaries


@given(
    st.sampled_from(ORDERS),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_every_lowered_schedule_passes_the_checker_however_early_receives_are(
    name, ranks, chunks, additional, ahead
):
    schedule = generate(name, *find_nearest_size(name, ranks, chunks, additional))
    lowered = lower(schedule, ahead)
    check(lowered)
    assert lower(lowered, ahead) == lowered
    compute = [[a for a in rank if a.kind.is_compute] for rank in lowered.ranks]
    assert compute == [list(rank) for rank in schedule.ranks]


@given(st.sampled_from(ORDERS), st.integers(2, 5), st.integers(1, 4), st.integers(0, 9))
def test_receives_of_an_edge_are_posted_in_the_order_of_its_sends_and_early(
    name, ranks, chunks, additional
):
    lowered = lower(generate(name, *find_nearest_size(name, ranks, chunks, additional)), ahead=2)
    rank_of = lowered.rank_of
    for source in range(ranks):
        for target in range(ranks):
            sent = [
                (a.kind.value[-1], a.stage, a.microbatch)
                for a in lowered.ranks[source]
                if a.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
                and rank_of[a.stage + (1 if a.kind is ActionKind.SEND_F else -1)] == target
            ]
            received = [
                (
                    a.kind.value[-1],
                    a.stage + (-1 if a.kind is ActionKind.RECV_F else 1),
                    a.microbatch,
                )
                for a in lowered.ranks[target]
                if a.kind in (ActionKind.RECV_F, ActionKind.RECV_B)
                and rank_of[a.stage + (-1 if a.kind is ActionKind.RECV_F else 1)] == source
            ]
            assert sent == received
    for actions in lowered.ranks:
        _assert_posted_early(actions, ahead=2)


def _assert_posted_early(actions, ahead):
    """Assert that at least `ahead` compute actions, or all earlier ones, are between receive and
    use."""
    for position, action in enumerate(actions):
        if action.kind not in (ActionKind.RECV_F, ActionKind.RECV_B):
            continue
        user = ActionKind.F if action.kind is ActionKind.RECV_F else ActionKind.B
        between = 0
        before = sum(a.kind.is_compute for a in actions[:position])
        for later in actions[position:]:
            if (later.kind, later.stage, later.microbatch) == (
                user,
                action.stage,
                action.microbatch,
            ):
                break
            between += later.kind.is_compute
        assert between >= min(ahead, before + between)
