"""What the page of a plan shows."""

import pytest

from megaframe.config import RunConfig
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import get_family_constants
from megaframe.planner.rooflines import compute_communication_rooflines

CLUSTER = load_cluster("h100-ib")
GPT = {"layers": 24, "hidden": 4096, "heads": 32, "vocab": 32000}


def test_communication_rooflines():
    config = RunConfig.model_validate(
        {"model": GPT, "train": {"seq": 2048, "global_batch": 256}, "parallel": {"tensor": 8}}
    )
    constants = get_family_constants("h100")
    layout = Layout.from_parallel(config.parallel, 64)
    rooflines = {
        b.axis: b for b in compute_communication_rooflines(config, layout, CLUSTER, constants)
    }
    assert set(rooflines) == {"tensor", "data"}
    assert rooflines["tensor"].tier == "nvlink" and rooflines["data"].tier == "infiniband"
    # Each row has 6 x 12 h^2 / 8 matrix operations and moves 10 x 2 h x 7/8 bytes; rows cancel.
    matrices = 6 * 12 * 4096**2 + 6 * 2 * 4096 * 1024
    sent_bytes = 10 * 2 * 4096 * 7 / 8
    assert rooflines["tensor"].intensity == pytest.approx(matrices / 8 / sent_bytes)
