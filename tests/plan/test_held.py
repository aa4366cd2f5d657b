"""Parameters counted from the config against those that the layers' specs declare."""

from pathlib import Path

import pytest

from megaframe.comm import ALONE
from megaframe.config import load
from megaframe.describe import held_by
from megaframe.layout import Layout
from megaframe.plan.held import held
from megaframe.plan.stages import stage_plans
from megaframe.stage import build_stages

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
LAYOUTS = [
    {},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 16, "data": 2, "expert": 4, "expert_tensor": 2},
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("depth", [0, 1])
def test_every_config_holds_what_its_layers_declare(path, sizes, depth):
    pipeline = sizes.get("pipeline", 1)
    config = load(
        str(path), [f"parallel.pipeline={pipeline}", f"model.mtp_depth={depth}", "model.vocab=5003"]
    )
    layout = Layout(**sizes)
    plans = stage_plans(config)
    for plan in plans:
        stages = build_stages(config, [plan], ALONE)
        declared = held_by([u for stage in stages.values() for u in stage.units], layout)
        counted = held(config, layout, [plan])
        assert sorted(counted.tables) == sorted(declared.tables)
        assert counted.blocks == declared.blocks
        assert (counted.experts or (0,) * len(counted.blocks)) == declared.experts
        assert counted.vectors == declared.vectors
