"""Descriptions of clusters, and the messages about impossible ones."""

import pytest

from megaframe.errors import UserError
from megaframe.hardware.cluster import list_cluster_names, load_cluster

GOOD = """chip: h100
tiers:
  - {name: node, size: 8, bandwidth: 4e11, latency: 3e-6}
  - {name: net, size: 64, bandwidth: 5e10, latency: 8e-6}
failure_hours: 5e4
price: 2
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return load_cluster(str(path))

    return read


@pytest.mark.parametrize("name", list_cluster_names())
def test_every_description_is_sound(name):
    cluster = load_cluster(name)
    assert cluster.size >= cluster.node >= 1
    assert 0 < cluster.chip.power_share <= 1


def test_the_default_is_eight_h100_with_400_gigabits_each():
    cluster = load_cluster()
    assert (cluster.chip.name, cluster.node, cluster.tiers[1].bandwidth) == ("h100", 8, 50e9)


def test_figures_of_its_own_replace_those_of_the_chip(read):
    cluster = read(GOOD + "memory: 1e11\nwatts: 500\nhost_link: 2e10\npeaks: {bf16: 5e14}\n")
    assert (cluster.chip.memory, cluster.chip.host_link) == (1e11, 2e10)
    assert cluster.chip.peaks["bf16"] == 5e14
    assert cluster.chip.peaks["fp8"] == load_cluster().chip.peaks["fp8"]
    assert cluster.chip.power_share < read(GOOD).chip.power_share


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "chip: h100",
            "chip: h1000\nmemory: 1e10",
            ["chip=h1000 is unknown", "h100", "give its bandwidth, peaks", "measure_kernels"],
        ),
        ("price: 2", "price: 2\npeaks: {bf61: 1e12}", ["peaks.bf61"]),
        ("price: 2", "price: 2\nconstants: {produce: 1}", ["constants.produce", "mean product?"]),
        ("size: 64", "size: 60", ["tiers[1].size=60", "tiers[0].size=8", "use 64"]),
        ("bandwidth: 5e10", "bandwidth: 5e12", ["tiers[1].bandwidth=5e+12", "4e+11 or less"]),
        ("price: 2\n", "", ["price: missing; give the figure"]),
        ("price: 2", "price: -2", ["price=-2", "greater than or equal to 0"]),
        ("latency: 8e-6", "latencies: 8e-6", ["tiers.1.latencies: unknown key", "latency?"]),
        ("size: 8,", "size: eight,", ["tiers.0.size=eight"]),
        ("chip: h100", "chip: [h100", ["not valid YAML"]),
    ],
)
def test_impossible_clusters(read, before, after, expected):
    assert before in GOOD
    with pytest.raises(UserError) as error:
        read(GOOD.replace(before, after))
    for part in expected:
        assert part in str(error.value)


def test_unknown_clusters():
    with pytest.raises(UserError, match=r"no file h100_ib\.yaml; use h100-ib"):
        load_cluster("h100_ib")


def test_a_chip_of_ones_own(read):
    figures = "memory: 1e10\nbandwidth: 1e11\nunits: 9\npeaks: {fp32: 1e12, tf32: 4e12}\n"
    cluster = read(GOOD.replace("h100", "mine") + figures + "constants: {launch: 1e-5}\n")
    chip = cluster.chip
    assert (chip.name, chip.memory, chip.bandwidth, chip.units) == ("mine", 1e10, 1e11, 9)
    assert chip.has_rates and chip.peaks == {"fp32": 1e12, "tf32": 4e12}
    assert cluster.constants == {"launch": 1e-5}
