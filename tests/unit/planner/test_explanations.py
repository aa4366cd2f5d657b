"""What the theory says of a plan, against the predictions that it explains."""

from dataclasses import replace

import pytest

from megaframe.config import RunConfig
from megaframe.hardware.cluster import Tier, load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import get_cluster_constants, get_family_constants
from megaframe.planner.explanations import EXPLANATIONS
from megaframe.planner.explanations.collectives import explain_collectives
from megaframe.planner.explanations.explanation import Explanation, format_bytes
from megaframe.planner.explanations.failures import explain_failures
from megaframe.planner.explanations.roofline import explain_roofline
from megaframe.planner.explanations.scaling import explain_scaling
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.prediction import predict

CLUSTER = load_cluster("h100-ib")
CONSTANTS = get_family_constants("h100")
IDEAL = replace(CLUSTER, tiers=(Tier("links", 4096, 0.0, 1e30),), jitter=0.0)
"""Links without latency and without end, and ranks that never lag."""


def choose(cluster=CLUSTER, gpus=16, batch=64, seq=2048, **parallel):
    model = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 32000}
    train = {"seq": seq, "global_batch": batch}
    config = RunConfig.model_validate({"model": model, "train": train, "parallel": parallel})
    layout = Layout.from_parallel(config.parallel, gpus)
    return LayoutChoice(config, layout, predict(config, layout, cluster, CONSTANTS))


def read_table(explanation):
    return [dict(zip(explanation.head, row, strict=True)) for row in explanation.rows]


@pytest.mark.parametrize("zero", [0, 1])
def test_amdahl_and_gustafson_are_the_predictions_where_nothing_else_grows(zero):
    """Over ideal links a step is a bubble, launches, and an update that ZeRO divides, and passes
    that data ranks divide, as long as all stages have a microbatch at the same time."""
    choice = choose(IDEAL, pipeline=4, zero=zero)
    explanation = explain_scaling(choice, IDEAL, CONSTANTS)
    rows = read_table(explanation)
    assert [row["GPUs"] for row in rows[:3]] == [4, 8, 16] and len(rows) > 5
    for row in rows:
        if 64 * 4 // row["GPUs"] >= 4:
            assert row["speed-up"] == pytest.approx(row["Amdahl"], rel=1e-9)
        if zero == 0:
            assert row["scaled speed-up"] == pytest.approx(row["Gustafson"], rel=1e-9)
        assert row["growing batch"] == 4 * row["GPUs"]
    named = explanation.lines[0].rpartition(": ")[2]
    assert "bubble" in named and ("optimizer" in named) == (zero == 0) and "compute" not in named


def test_what_grows_with_the_ranks_is_named():
    lines = explain_scaling(choose(zero=1, batch=512), CLUSTER, CONSTANTS).lines
    assert lines[-1].startswith("Karp and Flatt 1990") and "; data grows from" in lines[-1]


def test_a_batch_that_cannot_be_divided_is_told_one_that_can():
    explanation = explain_scaling(choose(gpus=3, batch=3), CLUSTER, CONSTANTS)
    assert not explanation.rows and "use train.global_batch=6" in explanation.lines[0]
    assert explain_scaling(choose(gpus=3, batch=6), CLUSTER, CONSTANTS).rows


def test_collectives_of_each_axis_are_compared():
    explanation = explain_collectives(choose(gpus=64, tensor=4), CLUSTER, CONSTANTS)
    rows = read_table(explanation)
    assert {(row["ranks of"], row["collective"]) for row in rows} == {
        ("tensor", "all_gather"),
        ("shard", "all_reduce"),
    }
    for column in explanation.head[3:]:
        cells = [row[column] for row in rows if row["ranks of"] == "shard"]
        times = {float(cell.rstrip("*").replace(",", "")): cell.endswith("*") for cell in cells}
        assert times[min(times)] and sum(times.values()) == 1
    assert any(
        "Fastest all_reduce of 16 shard ranks by size: tree, ring" in line
        for line in explanation.lines
    )
    assert any("doubling; of those that NCCL has, ring." in line for line in explanation.lines)
    assert any("g was not measured apart" in line for line in explanation.lines)
    measured = replace(CLUSTER, reduction=1e12)
    lines = explain_collectives(choose(measured, tensor=4), measured, CONSTANTS).lines
    assert any("1 / g = 1000 GB/s" in line for line in lines)


def test_one_rank_sends_nothing():
    explanation = explain_collectives(choose(gpus=1), CLUSTER, CONSTANTS)
    assert not explanation.rows and "nothing is sent; use --gpus" in explanation.lines[-1]


def test_what_a_rank_adds_is_part_of_the_step_where_it_was_measured():
    plain = choose(zero=0, batch=16).prediction
    slow = choose(replace(CLUSTER, reduction=1e9), zero=0, batch=16).prediction
    assert slow.breakdown["data"] > plain.breakdown["data"]
    assert slow.breakdown["compute"] == plain.breakdown["compute"]


@pytest.mark.parametrize("seq", [16, 2048])
def test_operators_under_the_ridge_are_named(seq):
    choice = choose(gpus=16, tensor=2, seq=seq, batch=16)
    explanation = explain_roofline(choice, CLUSTER, CONSTANTS)
    rows = {row["operator, or axis"]: row for row in read_table(explanation)}
    under = next(line for line in explanation.lines if line.startswith("Under the ridge"))
    assert {"attention.qkv", "mlp.up", "scores of attention", "output head", "tensor"} <= {*rows}
    for name, row in rows.items():
        assert (row["FLOP a byte"] < row["ridge"]) == (row["bound by"] != "compute")
        if row["over"] == "memory":
            assert (name in under) == (row["bound by"] == "memory")
    assert rows["mlp.up"]["bound by"] == ("memory" if seq == 16 else "compute")


def test_what_lifts_each_bound_is_a_key_that_does_so():
    choice = choose(gpus=16, tensor=2, zero=1, batch=16)
    rows = {row["operator, or axis"]: row for row in
            read_table(explain_roofline(choice, CLUSTER, CONSTANTS))}  # fmt: skip
    batch = int(rows["data"]["at the ridge with"].removeprefix("train.global_batch="))
    assert rows["data"]["bound by"] == "link" and batch > 16
    again = explain_roofline(choose(gpus=16, tensor=2, zero=1, batch=batch), CLUSTER, CONSTANTS)
    rows = {row["operator, or axis"]: row for row in read_table(again)}
    assert rows["data"]["bound by"] == "compute"


def test_daly_s_interval_loses_least():
    choice = choose(gpus=16, zero=1)
    rows = read_table(explain_failures(choice, CLUSTER, CONSTANTS))
    lost = [row["lost"] for row in rows]
    assert min(lost) == lost[2] and rows[2]["save every"] == "1 t"
    for row in rows:
        assert row["lost"] == pytest.approx(row["lost by saves"] + row["by failures"])


def test_everything_is_explained_of_experts_and_of_a_measured_cpu():
    moe = {"experts": 8, "top_k": 2, "ffn": 256}
    model = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 1000, "moe": moe}
    cluster = load_cluster("cpu")
    constants = get_cluster_constants(cluster)
    train = {"seq": 128, "global_batch": 16, "precision": "fp32"}
    parallel = {"expert": 4, "pipeline": 2, "zero": 1}
    config = RunConfig.model_validate({"model": model, "train": train, "parallel": parallel})
    layout = Layout.from_parallel(config.parallel, 8)
    choice = LayoutChoice(config, layout, predict(config, layout, cluster, constants))
    for explain, _ in EXPLANATIONS.values():
        explanation = explain(choice, cluster, constants)
        assert explanation.lines and explanation.rows
        assert len({len(row) for row in explanation.rows} | {len(explanation.head)}) == 1


def test_tables_are_aligned_and_say_what_does_not_apply():
    explanation = Explanation("t", (), ("name", "bytes"), (("a", 1234), ("bcdef", None)))
    assert list(explanation.format_table()) == ["name   bytes", "a      1,234", "bcdef  -"]
    assert explanation.to_record()["table"][0] == {"name": "a", "bytes": 1234}
    assert [format_bytes(size) for size in (0, 1023, 1536, 2.0**60)] == [
        "0 B", "1.02e+03 B", "1.5 KiB", "1.02e+03 PiB",
    ]  # fmt: skip
