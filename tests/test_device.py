"""Settings that a rank requests from its host."""

import os
import sys

import pytest

from megaframe.layout import Layout
from megaframe.mesh import Mesh


@pytest.mark.skipif(sys.platform != "linux", reason="schedulers of Linux")
def test_no_thread_of_a_rank_takes_the_processor_of_another(pool):
    for policies in pool.run(2, of_threads):
        assert len(policies) > 3
        assert set(policies) == {os.SCHED_BATCH}


def of_threads():
    """Return the scheduling policies of the threads that a mesh starts to carry messages."""
    before = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    mesh = Mesh(Layout(data=2), device="cpu", timeout=60)
    made = set(os.listdir("/proc/self/task")) - before
    found = [os.sched_getscheduler(int(thread)) for thread in made]
    mesh.close()
    return found
