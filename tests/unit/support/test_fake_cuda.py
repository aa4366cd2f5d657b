"""The stand-in for GPUs sees the faults that it is there for, and nothing else."""

import pytest

PROGRAMS = {
    "unordered_streams": {"race"},
    "ordered_streams": set(),
    "reads_of_two_streams": set(),
    "freed_in_use": {"lifetime"},
    "freed_but_recorded": set(),
    "freed_after_a_wait": set(),
    "pinned_memory_read_too_early": set(),
    "pinned_memory_changed_too_early": {"race"},
    "unrecorded_event": {"event"},
    "nothing_written": set(),
    "a_graph": set(),
    "a_graph_that_waits": {"capture"},
    "a_graph_that_copies_from_pageable_memory": {"capture"},
    "a_graph_with_an_event_from_outside": {"capture"},
    "a_graph_that_loses_a_stream": {"capture", "race"},
    "a_graph_and_another_stream": {"race"},
    "a_mask": {"wait"},
    "mixed_devices": set(),
    "a_kernel_without_order": {"race"},
    "activations": set(),
    "landing": set(),
    "optimizer_state": set(),
    "background": set(),
    "background_far_behind": set(),
    "clock": set(),
    "transfer": set(),
    "messages_both_ways_as_one": set(),
    "settings": set(),
}


@pytest.mark.parametrize(("program", "kinds"), PROGRAMS.items(), ids=PROGRAMS)
def test_every_fault_is_reported_and_nothing_else(fake_gpu, program, kinds):
    fake_gpu.run("fake_cuda.programs:main", program, world=RANKS.get(program, 1))
    assert fake_gpu.list_kinds() - ({"wait"} - kinds) == kinds, fake_gpu.reports


RANKS = {"transfer": 2, "messages_both_ways_as_one": 2, "settings": 2}
LEFT_OUT = [
    ("activations", "_copy_out", "wait_stream", "race"),
    ("activations", "take", "wait_event", "race"),
    ("activations", "_free_outgoing", "wait_event", "lifetime"),
    ("activations", "_copy_in", "wait_stream", "race"),
    ("landing", "copy_to_host", "wait_stream", "race"),
    ("landing", "copy_to_host", "record_stream", "lifetime"),
    ("landing", "wait_for_copies", "synchronize", None),
    ("optimizer_state", "wait_for_fetched", "wait_stream", "race"),
    ("optimizer_state", "write_back", "wait_stream", "race"),
    ("optimizer_state", "_copy_in", "wait_event", "race"),
    ("optimizer_state", "_allocate", "wait_stream", "race"),
    ("optimizer_state", "_allocate", "record_stream", "lifetime"),
    ("optimizer_state", "synchronize", "synchronize", None),
    ("background", "_copy_from_device", "wait_event", "race"),
    ("background", "_copy_from_device", "synchronize", None),
    ("background_far_behind", "wait_for_copy", "wait_event", "race"),
    ("clock", "__call__", "is_current_stream_capturing", "capture"),
    ("transfer", "_wait_for_all", "wait", "race"),
]
"""A wait or a note of the project's own code, and what is reported without it; None: nothing, but
the result is wrong."""


@pytest.mark.parametrize(("program", "function", "method", "kind"), LEFT_OUT)
def test_every_wait_is_needed(fake_gpu, program, function, method, kind):
    words = (program, function, method)
    fake_gpu.run("fake_cuda.programs:without", *words, world=RANKS.get(program, 1), fails=True)
    kinds = fake_gpu.list_kinds() - {"wait"}
    assert kind in kinds if kind else fake_gpu.failed, kinds
