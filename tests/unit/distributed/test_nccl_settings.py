"""What a run sets for CUDA and NCCL: values of the environment count, and bad ones are refused."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pretrain_gpt
from megaframe.distributed.allocator_settings import _NAMES as ALLOCATOR
from megaframe.distributed.collectives import ALONE, Group
from megaframe.distributed.fake_group import FakeGroup
from megaframe.distributed.nccl_communicators import allocate
from megaframe.distributed.nccl_settings import LINK_CTAS, NcclSettings, configure_nccl
from megaframe.errors import UserError

NAMES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_MAX_CTAS",
    "TORCH_NCCL_HIGH_PRIORITY",
    "NCCL_LOCAL_REGISTER",
)


@pytest.fixture
def environment(monkeypatch):
    """environment(**values): the environment has these of the variables and no others."""

    def make(**values):
        for name in (*NAMES, *ALLOCATOR):
            monkeypatch.setenv(name, "")  # so that what a run sets is undone
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_memory_grow_unless_the_environment_says_otherwise(name, environment):
    environment()
    line = "allocator: PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert configure_nccl(3).allocator == line
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    environment(**{name: "max_split_size_mb:64"})
    assert configure_nccl(3).allocator == (
        f"allocator: {name}=max_split_size_mb:64, from the environment"
    )
    assert os.environ[name] == "max_split_size_mb:64"
    assert {*ALLOCATOR} & {*os.environ} == {name}


@pytest.mark.parametrize(
    ("graph", "variables"), [(True, {}), (False, {"NCCL_LOCAL_REGISTER": "1"})]
)
def test_registered_buffers_have_segments_of_fixed_sizes(graph, variables, environment):
    environment(**variables)
    assert "segments of fixed sizes" in configure_nccl(3, graph=graph).allocator
    assert "PYTORCH_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(("streams", "queues"), [(3, 8), (8, 8), (17, 17), (32, 32), (None, 32)])
def test_there_is_a_hardware_queue_for_each_stream(streams, queues, environment):
    environment()
    settings = configure_nccl(streams)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == str(queues)
    assert (settings.link_ctas, settings.high_priority, settings.register) == (
        LINK_CTAS,
        True,
        False,
    )
    assert not settings.warnings and len(settings.lines) == 4
    assert settings.lines[0].startswith(
        f"nccl: CUDA_DEVICE_MAX_CONNECTIONS={queues}, as the layout"
    )


def test_values_of_the_environment_count_and_are_logged_as_such(environment):
    values = dict(zip(NAMES, ("20", "16", "0", "1"), strict=True))
    environment(**values)
    settings = configure_nccl(17)
    assert {name: os.environ[name] for name in NAMES} == values
    assert (settings.link_ctas, settings.high_priority, settings.register) == (None, False, True)
    assert settings.lines == tuple(
        f"nccl: {n}={v}, from the environment" for n, v in values.items()
    )


@pytest.mark.parametrize(
    ("value", "streams", "mend"), [("1", 17, "; leave it unset, or use 17"), (None, 40, "forever")]
)
def test_fewer_hardware_queues_than_streams_are_a_warning(value, streams, mend, environment):
    environment(**({NAMES[0]: value} if value else {}))
    (warning,) = configure_nccl(streams).warnings
    text = f"warning: {NAMES[0]}={value or 32} is less than the {streams} streams of this layout"
    assert warning.startswith(text) and warning.endswith(mend)


class Registering(FakeGroup):
    """A group with memory of its own for transfers, on some devices."""

    def __init__(self, supported):
        super().__init__(0, 2)
        self._supported, self.allocated = supported, []

    def _get_backend(self, device):
        return self

    def supports_tensor_alloc(self, device):
        return self._supported

    def allocate_tensor(self, size, *, dtype, device):
        self.allocated.append(torch.full((size,), 7.0, dtype=dtype, device=device))
        return self.allocated[-1]


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("settings", [NcclSettings(register=True), NcclSettings(), None])
def test_only_what_is_asked_for_is_registered_where_torch_can(supported, settings):
    handle, device = Registering(supported), torch.device("cpu")
    group = Group(("data_shard", "context"), (0, 1), 0, handle)
    tensor = allocate(5, torch.bfloat16, device, group, settings)
    assert tensor.shape == (5,) and tensor.dtype == torch.bfloat16 and not tensor.any()
    registered = supported and settings is not None and settings.register
    assert [allocated is tensor for allocated in handle.allocated] == [True] * registered
    alone_tensor = allocate(5, torch.float64, device, ALONE, NcclSettings(register=True))
    assert alone_tensor.shape == (5,) and alone_tensor.dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "values", "range"),
    [
        (NAMES[0], ["0", "33", "-1", "", "8.0", "eight", "9" * 5000, "٣"], "1 to 32"),
        (NAMES[1], ["0", "65"], "1 to 64"),
        (NAMES[2], ["2"], "0 to 1"),
        (NAMES[3], ["2"], "0 to 1"),
    ],
)
def test_values_out_of_range_are_refused_with_name_and_range(name, values, range, environment):
    for value in values:
        environment(**{name: value})
        with pytest.raises(UserError, match=f"{name}='.*' in the environment is not a number from"):
            configure_nccl(8)
        with pytest.raises(UserError, match=f"from {range}; leave it unset"):
            configure_nccl(8)


def test_a_run_is_refused_before_it_starts(overrides, environment, call_main, tmp_path):
    environment(NCCL_MAX_CTAS="99")
    status, _, errors = call_main(pretrain_gpt.main, *overrides(run__device="auto"))
    assert status == 2 and not (tmp_path / "run").exists()
    message = "error: NCCL_MAX_CTAS='99' in the environment is not a number from 1 to 64; leave it"
    assert message in errors
