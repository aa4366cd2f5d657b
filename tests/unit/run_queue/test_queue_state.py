"""What a queue knows again after it was killed."""

import os
import signal
import subprocess
import sys

from patience import PATIENCE

from megaframe.run_queue.queue_state import AdoptedProcess, QueueState, RunRecord


def test_a_state_is_read_as_it_was_written(tmp_path):
    assert QueueState.read(tmp_path) == QueueState()
    record = RunRecord(["a=1"], "running", 2, 3, 1, "status 1")
    record.note_process(os.getpid())
    state = QueueState({"run": record})
    state.write(tmp_path)
    assert QueueState.read(tmp_path) == state
    # Numbers of processes mean nothing after the machine was booted again.
    QueueState({"run": record}, namespace="before").write(tmp_path)
    assert QueueState.read(tmp_path).runs["run"].process is None


def test_a_process_that_is_no_child_is_watched_and_asked_to_leave():
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        record = RunRecord([])
        record.note_process(process.pid)
        adopted = AdoptedProcess(*record.process)
        assert adopted.poll() is None
        assert AdoptedProcess(process.pid, record.process[1] - 1).poll() == 143  # another one
        adopted.terminate()
        assert process.wait(PATIENCE) == -signal.SIGTERM
        assert adopted.poll() == 143
        adopted.terminate()  # nobody gets it
