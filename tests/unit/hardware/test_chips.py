"""The table of chips: every device is the right chip or none, and every figure is possible."""

import re

import pytest

from megaframe.hardware.chips import CHIPS, CLOCK_EXPONENT, TYPES, find_chip, identify_chip
from megaframe.hardware.cluster import describe_unknown_chip, list_cluster_names, load_cluster
from megaframe.hardware.likely_cluster import find_cluster_for_device
from megaframe.planner.constants import CONSTANTS, get_cluster_constants

GIB = 2.0**30
DEVICES = {
    # Name and GiB as torch reports them: chip, TFLOP/s in bf16 (None: none), TB/s.
    ("Tesla V100-SXM2-16GB", 15.8): ("v100-sxm-16gb", None, 0.9),
    ("Tesla V100-SXM3-32GB", 31.7): ("v100-sxm-32gb", None, 0.9),
    ("Tesla V100-PCIE-16GB", 15.8): ("v100-pcie-16gb", None, 0.9),
    ("Tesla V100-PCIE-32GB", 31.7): ("v100-pcie-32gb", None, 0.9),
    ("Tesla V100S-PCIE-32GB", 31.7): ("v100s", None, 1.134),
    ("Tesla T4", 14.6): ("t4", None, 0.32),
    ("NVIDIA A100-SXM4-40GB", 39.4): ("a100-40gb", 312, 1.555),
    ("A100-SXM4-40GB", 39.6): ("a100-40gb", 312, 1.555),
    ("NVIDIA A100-SXM4-80GB", 79.3): ("a100-80gb", 312, 2.039),
    ("A100-PCIE-40GB", 39.6): ("a100-pcie-40gb", 312, 1.555),
    ("NVIDIA A100 80GB PCIe", 79.3): ("a100-pcie-80gb", 312, 1.935),
    ("NVIDIA A10", 22.1): ("a10", 125, 0.6),
    ("NVIDIA A30", 23.6): ("a30", 165, 0.933),
    ("NVIDIA A40", 44.4): ("a40", 149.7, 0.696),
    ("NVIDIA RTX A6000", 47.5): ("rtx-a6000", 154.8, 0.768),
    ("NVIDIA GeForce RTX 3090", 23.7): ("rtx-3090", 71, 0.936),
    ("NVIDIA H100 80GB HBM3", 79.1): ("h100", 989.4, 3.35),
    ("NVIDIA H100 PCIe", 79.1): ("h100-pcie", 756, 2.0),
    ("NVIDIA H100 NVL", 93.0): ("h100-nvl", 835.5, 3.9),
    ("NVIDIA H20", 95.1): ("h20", 148, 4.0),
    ("NVIDIA H200", 140.4): ("h200", 989.4, 4.8),
    ("NVIDIA H200 NVL", 140.4): ("h200-nvl", 835.5, 4.8),
    ("NVIDIA GH200 480GB", 94.5): ("gh200-96gb", 989.4, 4.0),
    ("NVIDIA GH200 120GB", 94.5): ("gh200-96gb", 989.4, 4.0),
    ("NVIDIA GH200 144G HBM3e", 140.4): ("gh200-144gb", 989.4, 4.9),
    ("NVIDIA L4", 22.0): ("l4", 121, 0.3),
    ("NVIDIA L40", 44.4): ("l40", 181, 0.864),
    ("NVIDIA L40S", 44.4): ("l40s", 362, 0.864),
    ("NVIDIA GeForce RTX 4090", 23.5): ("rtx-4090", 165.2, 1.008),
    ("NVIDIA RTX 6000 Ada Generation", 47.4): ("rtx-6000-ada", 364.2, 0.96),
    ("NVIDIA GeForce RTX 5090", 31.4): ("rtx-5090", 209.5, 1.792),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.0): ("rtx-pro-6000", 503.8, 1.792),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 95.0): (
        "rtx-pro-6000-max-q",
        438.9,
        1.792,
    ),
    ("NVIDIA B200", 178.4): ("b200", 2250, 8.0),
    ("NVIDIA GB200", 184.0): ("gb200", 2500, 8.0),
    ("NVIDIA B300 SXM6 AC", 267.7): ("b300", 2250, 8.0),
    ("NVIDIA GB300", 276.6): ("gb300", 2500, 8.0),
    ("AMD Instinct MI250X", 64.0): ("mi250x", 191.5, 1.6384),
    ("AMD Instinct MI300X", 192.0): ("mi300x", 1307.4, 5.3),
    ("AMD Instinct MI325X", 256.0): ("mi325x", 1307.4, 6.0),
}
STRANGERS = (
    "",
    "Abacus",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A10G",
    "NVIDIA H20-3e",
    "NVIDIA H800",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA L400",
    "xNVIDIA H100 PCIe",
)


@pytest.mark.parametrize(("device", "figures"), DEVICES.items(), ids=lambda figure: str(figure[0]))
def test_a_device_is_its_chip_with_its_own_memory(device, figures):
    (name, memory), (chip, bf16, bandwidth) = device, figures
    device_chip = identify_chip(name, memory * GIB)
    assert (device_chip.name, device_chip.memory) == (chip, memory * GIB)
    assert device_chip.peaks.get("bf16") == (bf16 and pytest.approx(bf16 * 1e12))
    assert device_chip.bandwidth == pytest.approx(bandwidth * 1e12)
    matching = [
        candidate.name
        for candidate in CHIPS.values()
        if candidate.names and re.fullmatch(candidate.names, name)
    ]
    assert matching == [chip]


def test_every_chip_that_torch_reports_is_in_this_test():
    reported = {chip.name for chip in CHIPS.values() if chip.names} - {"cpu"}
    assert reported == {chip for chip, _, _ in DEVICES.values()}


@pytest.mark.parametrize("device", STRANGERS)
def test_a_stranger_is_no_chip_and_has_no_rates(device):
    assert find_chip(device) is None
    device_chip = identify_chip(device, 20 * GIB, 46)
    assert (device_chip.name, device_chip.memory, device_chip.units) == (device, 20 * GIB, 46)
    assert not device_chip.has_rates and not device_chip.peaks
    assert find_cluster_for_device(device, 20 * GIB).notes == (describe_unknown_chip(device_chip),)
    assert (
        "with 20.0 GiB: its memory is planned, its speed is not predicted"
        in describe_unknown_chip(device_chip)
    )


def test_a_known_name_with_other_memory_is_a_stranger():
    assert identify_chip("NVIDIA A100-SXM4-80GB", 79.3 * GIB).has_rates
    assert not identify_chip("NVIDIA A100-SXM4-80GB", 39.4 * GIB).has_rates


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_the_figures_of_a_chip_are_possible_and_have_a_source(chip):
    assert set(chip.peaks) <= set(TYPES) and chip.has_rates
    known = [chip.peaks[kind] for kind in TYPES if kind in chip.peaks]
    assert known == sorted(known, reverse=True)
    assert chip.family in CONSTANTS and chip.source
    assert 0.2 < chip.power_share <= 1
    if not chip.is_host:
        assert 10 < chip.peaks["fp16"] / chip.bandwidth < 500  # operations per byte: checks units
        assert chip.link is None or chip.link >= (chip.host_link or 0)


# GHz at which products run at most, and FLOPs of a processor in a cycle in 16 bits (whitepapers of
# the architectures: four tensor cores with 256 or 512 multiplications and additions each).
CLOCKS = {
    "a100-40gb": (1.41, 2048),
    "a100-80gb": (1.41, 2048),
    "a100-pcie-40gb": (1.41, 2048),
    "a100-pcie-80gb": (1.41, 2048),
    "h100": (1.83, 4096),
    "h100-500w": (1.83, 4096),
    "h100-pcie": (1.62, 4096),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_processors_and_their_clock_make_the_peak(name):
    chip, (clock, flops) = CHIPS[name], CLOCKS[name]
    assert chip.units * clock * 1e9 * flops == pytest.approx(chip.peaks["bf16"], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("h100-500w", "h100"),
        ("h100-pcie", "h100"),
        ("h100-nvl", "h100"),
        ("h200-nvl", "h200"),
        ("a100-pcie-40gb", "a100-40gb"),
        ("a100-pcie-80gb", "a100-80gb"),
    ],
)
def test_a_part_with_less_power_needs_what_its_processors_and_clock_need(name, whole):
    part, whole = CHIPS[name], CHIPS[whole]
    processors = part.units / whole.units
    clock = part.peaks["bf16"] / whole.peaks["bf16"] / processors
    added = (whole.product_watts - whole.idle_watts) * processors * clock ** (1 / CLOCK_EXPONENT)
    assert part.product_watts == pytest.approx(whole.idle_watts + added, abs=1)
    # Its clock under power is that of the whole chip at the same power per processor.
    share = clock * part.power_share
    power = (part.watts - part.idle_watts) / (whole.product_watts - whole.idle_watts) / processors
    assert share == pytest.approx(min(clock, power**CLOCK_EXPONENT), rel=2e-3)
    assert 0.5 < part.power_share < 1
    assert part.get_sustained_flops("bf16") < whole.get_sustained_flops("bf16")


@pytest.mark.parametrize("device", [name for name, _ in DEVICES])
def test_a_known_device_has_a_cluster_that_says_what_it_assumes(device):
    cluster, chip = find_cluster_for_device(device), find_chip(device)
    assert cluster.chip == chip
    (note,) = cluster.notes
    assert f"{device} is the chip {chip.name}" in note and "assumed" in note
    if cluster.name in list_cluster_names():
        shipped = load_cluster(cluster.name)
        assert cluster.tiers == shipped.tiers and f"cluster {cluster.name} are" in note
    else:
        assert cluster.tiers[0].bandwidth == (chip.link or chip.host_link)


@pytest.mark.parametrize("name", list_cluster_names())
def test_a_cluster_of_a_chip_with_links_has_no_faster_ones(name):
    cluster = load_cluster(name)
    if cluster.chip.link is not None:
        assert cluster.tiers[0].bandwidth == cluster.chip.link


def test_only_what_was_fitted_goes_without_a_word():
    silent = {family for family, constants in CONSTANTS.items() if not constants.unfitted}
    assert silent == {"a100", "h100"}
    assert get_cluster_constants(find_cluster_for_device("NVIDIA GeForce RTX 4090")).unfitted
