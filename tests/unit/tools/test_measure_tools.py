"""The tools that measure links and kernels, run on two real ranks of this machine."""

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import load_program

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.chips import CHIPS
from megaframe.hardware.cluster import load_cluster, write_cluster
from megaframe.hardware.likely_cluster import find_cluster_for_device
from megaframe.layout import Layout
from megaframe.planner.collective_times import ALGORITHMS, GroupLevel
from megaframe.planner.constants import get_cluster_constants, get_family_constants
from megaframe.planner.kernel_times import compute_kernel_rates, estimate_matmul_seconds
from megaframe.planner.prediction import predict

ROOT = Path(__file__).parents[3]
PLANNED = RunConfig(
    model={"layers": 2, "hidden": 64, "heads": 2, "vocab": 100},
    train={"precision": "fp32", "global_batch": 4},
)
FEW = ["--device", "cpu", "--times", "2", "--smallest", "65536", "--largest", "4194304"]


def measure_links(*arguments):
    """Return what the tool prints on this rank."""
    module, sys.argv = load_program("tools/measure_links.py"), ["measure_links.py", *arguments]
    with redirect_stdout(StringIO()) as printed:
        module.run(module.parse_arguments())
    return printed.getvalue()


def test_measured_links_become_a_cluster(pool, tmp_path):
    path = str(tmp_path / "mine.yaml")
    printed, nothing = pool.run(2, measure_links, *FEW, "--write", path)
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert f"node        {operation}" in printed
    assert nothing == ""
    assert "node: gamma " in printed and "Fastest all_reduce of 2 node ranks by size: " in printed
    cluster = load_cluster(path)
    assert [(tier.name, tier.size) for tier in cluster.tiers] == [("node", 2)]
    assert 1e7 < cluster.tiers[0].bandwidth < 1e12


def test_links_of_each_axis_are_measured(pool):
    printed, *_ = pool.run(4, measure_links, *FEW, "--times", "1", "--tensor", "2")
    assert "tensor      all_gather" in printed and "data        all_gather" in printed


@given(
    alpha=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e8, 1e12), gamma=st.floats(1e-12, 1e-8),
    ranks=st.sampled_from([2, 3, 8]),
)  # fmt: skip
def test_alpha_beta_and_gamma_of_a_ring_are_found_again(alpha, bandwidth, gamma, ranks):
    module = load_program("tools/measure_links.py")
    level = [GroupLevel(float(ranks), alpha, bandwidth, gamma=gamma)]
    sizes = [ranks * 4.0**power for power in range(4, 16)]
    fits = [
        module.fit_ring("node", name, ranks, sizes, [float(ring(size, level)) for size in sizes])
        for name, ring in RINGS.items()
    ]
    gather = fits[0]
    assert (gather.alpha, gather.bandwidth) == pytest.approx((alpha, bandwidth), rel=1e-3)
    assert module.fit_gamma(fits) == pytest.approx(gamma, rel=0.01, abs=1e-3 / bandwidth)


RINGS = {name: ALGORITHMS[name]["ring"] for name in ("all_gather", "reduce_scatter")}


def test_a_reduction_that_takes_no_time_is_said_and_is_in_no_description(tmp_path):
    module = load_program("tools/measure_links.py")
    fits = [
        module.LinkFit("node", name, 4, 1e-5, 1e9, 0.0, 1e9)
        for name in ("all_gather", "reduce_scatter")
    ]
    assert module.fit_gamma(fits) == 0
    assert next(module.describe_reduction("node", fits)) == (
        "node: gamma 0: reduce-scatters took no longer than all-gathers"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--chip", "h1000"], "--chip h1000 is unknown; use h100"),
        ([], "links need 2 ranks or more"),
        (["--smallest", "64", "--largest", "64"], "--smallest 64 must be at least 4 and less than"),
    ],
)
def test_wrong_questions_about_links(words, expected, monkeypatch):
    module = load_program("tools/measure_links.py")
    monkeypatch.setattr(sys, "argv", ["measure_links.py", *words])
    with pytest.raises(UserError, match=expected):
        module.run(module.parse_arguments())


def test_kernels_explain_the_products_they_were_fitted_to(call_main):
    options = ("--json", "--device", "cpu", "--largest", "256", "--precision", "fp32")
    _, printed, _ = call_main(load_program("tools/measure_kernels.py").main, *options)
    constants = json.loads(printed)
    assert all(constants[key] > 0 for key in ("product", "memory", "attention", "launch"))
    assert max(map(abs, constants["errors"])) < 1.0


def test_an_unknown_chip_is_planned_by_what_is_measured_on_it(monkeypatch, tmp_path, call_main):
    path = tmp_path / "mine.yaml"
    options = ("--write", str(path), "--device", "cpu", "--largest", "256", "--precision", "fp32")
    module = load_program("tools/measure_kernels.py")
    unknown = find_cluster_for_device("Abacus", 8 * 2.0**30, 46)
    monkeypatch.setattr(module, "detect_cluster", lambda device: unknown)
    with pytest.raises(UserError, match=r"unknown chip Abacus with 8\.0 GiB: .* not predicted"):
        predict(PLANNED, Layout(), unknown, get_cluster_constants(unknown))
    assert f"wrote {path}" in call_main(module.main, *options)[1]
    cluster = load_cluster(str(path))
    assert (cluster.chip.name, cluster.chip.memory, cluster.chip.units) == ("Abacus", 2**33, 46)
    assert 1e9 < cluster.chip.peaks["fp32"] < 1e14 and cluster.tiers == unknown.tiers
    constants = get_cluster_constants(cluster)
    assert constants.launch == cluster.constants["launch"] and not constants.unfitted
    prediction = predict(PLANNED, Layout(), cluster, constants)
    assert prediction.step_seconds > 0 and not any("not fitted" in r for r in prediction.reasons)


def test_links_are_added_to_a_description_and_the_chip_stays(tmp_path):
    path = tmp_path / "mine.yaml"
    unknown = find_cluster_for_device("Abacus", 8 * 2.0**30)
    figures = {"bandwidth": 1e11, "peaks": {"fp32": 1e12}, "memory": 2**33}
    write_cluster(path, unknown, {**figures, "constants": {"product": 0.5}}, "by hand")
    module = load_program("tools/measure_links.py")
    options = Namespace(write=path, chip=None, failure_hours=None, price=3.0)
    cluster = module.choose_cluster(options, None)
    tier = {"name": "node", "size": 2, "kind": "switch", "bandwidth": 1e9, "latency": 1e-6}
    module.write_description(path, cluster, [tier], options, 2.5e-10)
    read_back = load_cluster(str(path))
    assert (read_back.chip, read_back.constants) == (cluster.chip, {"product": 0.5})
    assert read_back.reduction == 4e9
    assert (read_back.tiers[0].bandwidth, read_back.price, read_back.failure_hours) == (
        1e9,
        3.0,
        5e4,
    )


def test_the_start_of_a_product_is_found_again():
    module = load_program("tools/measure_kernels.py")
    chip, known = CHIPS["a100-80gb"], get_family_constants("a100")
    truth = replace(known, product=0.7, start=256.0)
    sizes = [(n, n, n) for n in (512, 1024, 2048, 4096)] + [(4096, 4096, 64)]
    rate = compute_kernel_rates(chip, truth, "bf16")
    durations = [float(estimate_matmul_seconds(rate, *size)) for size in sizes]
    fit = module.fit_constants(chip, "bf16", sizes, durations, known)
    assert fit.constants.product == pytest.approx(0.7, rel=0.05)
    assert fit.constants.start == pytest.approx(256, rel=0.25)
