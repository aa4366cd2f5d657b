"""The stand-in for NCCL: what NCCL would wait for without end is an error, a rank that is recorded
alone calls what it calls among others, and communicators end as NCCL's do."""

import pytest
from fake_cuda.client import PLAIN, SMALL
from fake_cuda.nccl_layouts import LAYOUTS, make_config, name_layout, record_layout
from fake_cuda.nccl_rules import CollectiveCall, CreateCommunicator, MessageGroup
from slow_cases import mark_slow

FOREVER = {
    "messages_both_ways_one_by_one": (
        "rank 0 waits forever for rank 1 to connect",
        "rank 0: send float32 4 to rank 1",
        "rank 1: send float32 4 to rank 0",
        "[programs.py:",
    ),
    "collectives_in_opposite_orders": (
        "rank 0 waits forever for ranks [1] to connect",
        "rank 0: all_reduce float32 4 over",
        "rank 1: all_reduce float32 4 over",
    ),
    "communicators_in_another_order": ("ranks do not make communicators in one order: rank ",),
    "a_collective_without_a_rank": ("rank 0 waits forever for ranks [1] to connect",),
}
"""Programs of two ranks that NCCL would not bring to an end, and what is said."""


# The program without a rank repeats another one; that of communicators waits 90 s for torch.
@pytest.mark.parametrize(
    "program", mark_slow(FOREVER, except_for=["messages_both_ways_one_by_one"])
)
def test_what_nccl_would_wait_for_is_an_error(fake_gpu, program):
    output = fake_gpu.run("fake_cuda.programs:main", program, world=2, fails=True)
    assert fake_gpu.failed
    for text in FOREVER[program]:
        assert text in output


@pytest.mark.slow
def test_a_pipeline_whose_links_nothing_connects_before_a_step_is_an_error(fake_gpu, overrides):
    """With 1F1B both ranks begin with a receive."""
    keys = {**SMALL, **PLAIN, "parallel__pipeline": 2, "train__steps": 1}
    keys = overrides(**keys, run__device="cuda")
    output = fake_gpu.run(
        "fake_cuda.programs:pretrain_without_connecting", *keys, world=2, fails=True
    )
    assert fake_gpu.failed and "rank 0 waits forever for rank 1 to connect" in output
    assert "rank 1: receive float64" in output and "[executor.py:" in output


ALSO_ALONE = [
    i
    for i, (world, _, layout) in enumerate(LAYOUTS)
    if (world == 2 and layout.get("schedule") in (None, "1f1b") and layout.get("zero") in (None, 3))
    or layout.get("dispatch") == "all_gather"
]
"""Each axis, and collectives on parts of any sizes."""
QUICK_ALONE = [i for i in ALSO_ALONE if "context" in LAYOUTS[i][2]]


@pytest.mark.parametrize(
    "layout",
    mark_slow(ALSO_ALONE, except_for=QUICK_ALONE),
    ids=[name_layout(*LAYOUTS[i]) for i in ALSO_ALONE],
)
def test_a_rank_that_runs_alone_calls_the_same(fake_gpu, layout):
    """So what is simulated of many ranks is what they call."""
    world, model, parallel = LAYOUTS[layout]
    fake_gpu.run("fake_cuda.programs:main", "layout_of_a_test", str(layout), world=world)
    single_recorded = record_layout(make_config(world, model, parallel), world)
    assert [*map(list_transfers, fake_gpu.calls)] == [*map(list_transfers, single_recorded)]
    assert all(len(list_transfers(calls)) > 20 for calls in single_recorded)


def list_transfers(calls):
    """Return what a rank makes and transfers, without lines and streams. One number more is summed
    over each communicator that torch splits from another."""
    kinds = [
        recorded_call
        for recorded_call in calls
        if isinstance(recorded_call, CollectiveCall | CreateCommunicator | MessageGroup)
    ]
    return [
        str(recorded_call)
        for recorded_call in kinds
        if not str(recorded_call).startswith("all_reduce float32 1 ")
    ]


FAILURES = {
    "abort_together": set(),
    "abort_one_after_the_other": {"abort"},
    "destroy_in_use": {"abort"},
}


@pytest.mark.parametrize(("program", "kinds"), FAILURES.items(), ids=FAILURES)
def test_how_communicators_end(fake_gpu, program, kinds):
    fake_gpu.run(f"fake_cuda.fake_failures:{program}", world=2, fails=bool(kinds))
    assert fake_gpu.list_kinds() - {"wait"} == kinds, fake_gpu.reports
