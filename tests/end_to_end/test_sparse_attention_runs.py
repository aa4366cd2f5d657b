"""Whole runs with an indexer: both stages of its training, and resuming under other layouts."""

import pytest
from checkpoint_helpers import load_weights
from entry_runs import read_lines, train
from tolerances import promised

SPARSE = {
    "model__layers": 4,
    "model__norm": "rmsnorm",
    "model__latent": "{query_rank: 12, kv_rank: 10, head_dim: 6, rotary_dim: 4, value_dim: 5}",
    "optim__schedule": "constant",
    "train__microbatch": 1,
}
INDEXER = "heads: 2, head_dim: 6, top_k: 5, loss: 0.5"
LAYOUTS = (
    (1, {}),
    (4, {"tensor": 2, "context": 2, "context_kind": "ring", "zero": 1}),
    (2, {"pipeline": 2, "schedule": "zb-h1"}),
)


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts(pool, overrides, tmp_path):
    keys = {**SPARSE, "model__indexer": f"{{{INDEXER}}}"}
    whole = overrides(run__dir=tmp_path / "whole", train__steps=2 * len(LAYOUTS), **keys)
    pool.run(1, train, whole)
    for part, (ranks, parallel) in enumerate(LAYOUTS, 1):
        layout = {f"parallel__{key}": value for key, value in parallel.items()}
        options = {"train__steps": 2 * part, "checkpoint__every": 2, "checkpoint__resume": "latest"}
        pool.run(ranks, train, overrides(**keys, **options, **layout))
    lines = zip(read_lines(tmp_path / "run"), read_lines(tmp_path / "whole"), strict=True)
    for line, other in lines:
        for key in ("loss", "indexer_loss", "grad_norm"):
            assert line[key] == promised(other[key])
        assert line["indexer_loss"] > 0


def test_an_indexer_is_trained_alone_and_then_with_all_else(pool, overrides, tmp_path):
    """As DeepSeek-V3.2 was: beside attention to all keys, and then with attention to the chosen."""
    keys = {**SPARSE, "model__layers": 2, "train__steps": 2, "checkpoint__every": 2}
    pool.run(1, train, overrides(run__dir=tmp_path / "plain", **keys))
    stages = {
        "warm-up": {"model__indexer": f"{{{INDEXER}, dense: true}}"},
        "sparse": {"model__indexer": f"{{{INDEXER}}}"},
    }
    stages["warm-up"]["optim__frozen"] = "['!*.indexer.*']"
    before = "plain"
    for stage, more in stages.items():
        weights = tmp_path / before / "checkpoints/step-00000002"
        more |= {"run__dir": tmp_path / stage, "checkpoint__weights": weights}
        pool.run(2, train, overrides(**keys, **more))
        before = stage
    plain, warm, sparse = (
        load_weights(tmp_path / name / "checkpoints/step-00000002") for name in ("plain", *stages)
    )
    indexed = {name for name in warm if ".indexer." in name}
    assert len(indexed) == 2 * 4 and warm.keys() == plain.keys() | indexed
    assert all(float((warm[name] - plain[name]).abs().max()) == 0 for name in plain)
    assert all(float((sparse[name] - warm[name]).abs().max()) > 0 for name in warm)
    first, last = read_lines(tmp_path / "warm-up")
    assert last["indexer_loss"] < first["indexer_loss"]
