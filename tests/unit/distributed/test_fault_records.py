"""The flight record of a rank, and whether torch leaves failed communicators to this process."""

import os
import time

import pytest
from torch._C import _distributed_c10d

from megaframe.distributed import fault_records, nccl_settings


def test_a_record_is_written_under_the_name_that_torch_takes(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    record = b"a record"
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda **_: record, raising=False)
    message = fault_records.write_flight_record(tmp_path / "faults", 3)
    assert (tmp_path / "faults/nccl-rank-3").read_bytes() == record
    assert message.startswith(f"flight record in {tmp_path}/faults/nccl-rank-3; torchfrtrace")


def test_what_cannot_be_recorded_is_said(tmp_path, monkeypatch):
    if hasattr(_distributed_c10d, "_dump_nccl_trace"):
        monkeypatch.delattr(_distributed_c10d, "_dump_nccl_trace")
    assert "this torch has none of NCCL" in fault_records.write_flight_record(tmp_path, 0)

    def fails(**_):
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", fails, raising=False)
    message = fault_records.write_flight_record(tmp_path, 0)
    assert message == "no flight record: CUDA error: unspecified launch failure"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert "TORCH_FR_BUFFER_SIZE=0" in fault_records.write_flight_record(tmp_path, 0)


def test_a_process_whose_record_cannot_be_read_ends(tmp_path):
    process = os.fork()
    if not process:
        os.close(2)  # its stacks
        os.open(os.devnull, os.O_WRONLY)
        fault_records._SECONDS = 0.2
        _distributed_c10d._dump_nccl_trace = lambda **_: time.sleep(60)
        fault_records.write_flight_record(tmp_path, 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("ASYNC_ERROR_HANDLING", "3"), ("DUMP_ON_TIMEOUT", "1")]
)
def test_values_of_the_environment_count(monkeypatch, name, value):
    for other in nccl_settings._ABORT_VARIABLES:
        monkeypatch.setenv(other, "")  # so that they are as before at the end
        monkeypatch.delenv(other)
    assert not nccl_settings.can_abort()
    nccl_settings.allow_abort()
    assert nccl_settings.can_abort()
    monkeypatch.setenv(f"TORCH_NCCL_{name}", value)
    nccl_settings.allow_abort()
    assert os.environ[f"TORCH_NCCL_{name}"] == value and not nccl_settings.can_abort()
