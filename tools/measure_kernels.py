"""Measure a few kernels on this machine's chip, and print the constants that explain them.

    python tools/measure_kernels.py --write mine.yaml      then parallel.cluster=mine.yaml

Products of several sizes give the share of the peak and the cost of starting a tile, a large
addition gives the memory bandwidth, attention its own rate, and a tiny kernel the time of a launch.
The result, `Constants(...)`, is what the planner uses for a chip. A chip that is not in the table
has no peaks; then the rates of the fastest products and of the addition take their place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megaframe.errors import UserError, report_errors
from megaframe.hardware.chips import CHIPS, Chip, suggest_chips
from megaframe.hardware.cluster import Cluster, load_cluster, write_cluster
from megaframe.hardware.likely_cluster import find_cluster_for_device
from megaframe.io.closed_output import allow_closed_output
from megaframe.ops.matmul import multiply
from megaframe.planner.constants import Constants, get_family_constants
from megaframe.planner.kernel_times import compute_kernel_rates, estimate_matmul_seconds

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MEASURED = ("product", "start", "attention", "memory", "launch")
"""The constants that one process can measure."""
_LEAST_SECONDS = 0.2
"""Least seconds for which each kernel is repeated."""


@dataclass(frozen=True)
class MeasuredConstants:
    """The result.

    Attributes:
        constants: Those found.
        errors: Relative error of each product's predicted time.
    """

    constants: Constants
    errors: tuple[float, ...]


def measure_median_seconds(kernel: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of one call of `kernel`."""
    kernel()
    samples: list[float] = []
    end = time.perf_counter() + _LEAST_SECONDS
    while len(samples) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        kernel()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def measure_products(
    sizes: list[tuple[int, int, int]], kind: torch.dtype, device: torch.device
) -> list[float]:
    """Return the seconds of a product for each size.

    Args:
        sizes: Rows, outputs and terms of each product.
        kind: Type of the operands.
        device: Where they are.
    """
    seconds = []
    for rows, outputs, terms in sizes:
        left = torch.randn(rows, terms, device=device).to(kind)
        right = torch.randn(terms, outputs, device=device).to(kind)
        seconds.append(measure_median_seconds(partial(multiply, left, right), device))
    return seconds


def fit_constants(
    chip: Chip,
    kind: str,
    sizes: list[tuple[int, int, int]],
    measured: list[float],
    others: Constants,
) -> MeasuredConstants:
    """Return the constants whose `product` and `start` explain these products best, by a search on
    a grid: the model is not linear where memory bounds a product.

    Args:
        chip: The chip.
        kind: Type of the operands.
        sizes: As in `measure_products`.
        measured: Measured seconds.
        others: The other constants.
    """
    best = MeasuredConstants(others, (np.inf,))
    for start in (0.0, *np.geomspace(4, 1024, 33)):
        for share in np.geomspace(0.02, 1.5, 120):
            constants = replace(others, product=float(share), start=float(start))
            rate = compute_kernel_rates(chip, constants, kind)
            errors = [
                float(estimate_matmul_seconds(rate, *size)) / seconds - 1
                for size, seconds in zip(sizes, measured, strict=True)
            ]
            if sum(map(abs, errors)) < sum(map(abs, best.errors)):
                best = MeasuredConstants(constants, tuple(errors))
    return best


def list_widths(largest: int) -> list[int]:
    """Return the widths of the square products that are measured."""
    return [size for size in (256, 512, 1024, 2048, 4096, 8192) if size <= largest]


def measure_bandwidth(device: torch.device, largest: int) -> float:
    """Return the bytes/s at which a large addition reads and writes memory."""
    large = torch.randn(largest * largest, device=device)
    return 2 * large.nbytes / measure_median_seconds(lambda: large.add(1.0), device)


def measure_unknown_chip(chip: Chip, device: torch.device, largest: int) -> Chip:
    """Return a chip of which only the memory is known, with the rates that are measured on it: of
    the fastest product by type, and of moving memory. Types in which it cannot multiply have no
    rate.

    Args:
        chip: The chip, of which only the memory is known.
        device: This device.
        largest: Width of the largest product.
    """
    peaks: dict[str, float] = {}
    for kind, dtype in TYPES.items():
        sizes = [(width, width, width) for width in list_widths(largest)[-3:]]
        try:
            measured = measure_products(sizes, dtype, device)
        except RuntimeError:
            continue
        peaks[kind] = max(2.0 * n**3 / t for (n, _, _), t in zip(sizes, measured, strict=True))
    return replace(chip, peaks=peaks, bandwidth=measure_bandwidth(device, largest))


def measure_constants(
    chip: Chip, kind: str, device: torch.device, largest: int
) -> MeasuredConstants:
    """Measure all constants of this chip that one process can measure; the others are those already
    known.

    Args:
        chip: The chip.
        kind: Type of the operands.
        device: This device.
        largest: Width of the largest product.
    """
    family_constants = get_family_constants(chip.family)
    sizes = [(width, width, width) for width in list_widths(largest)] + [(largest, largest, 64)]
    memory = min(1.0, measure_bandwidth(device, largest) / chip.bandwidth)
    small = torch.zeros(1, device=device)
    launch = measure_median_seconds(lambda: small.add_(1.0), device)
    heads, length, width = 8, min(2048, largest), 64
    query = torch.randn(1, heads, length, width, device=device).to(TYPES[kind])
    attention_time = measure_median_seconds(
        lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True), device
    )
    flops = 2.0 * heads * length * length * width  # both products, half of them masked
    sustained = chip.get_sustained_flops(kind)
    if sustained is None:
        raise UserError(f"chip {chip.name} has no figure for {kind}; use {', '.join(chip.peaks)}")
    attention = flops / attention_time / sustained
    constants = replace(family_constants, memory=memory, launch=launch, attention=attention)
    return fit_constants(chip, kind, sizes, measure_products(sizes, TYPES[kind], device), constants)


def detect_cluster(device: torch.device) -> Cluster:
    """Return the likely cluster of the device that is measured."""
    if device.type == "cpu":
        return load_cluster("cpu")
    properties = torch.cuda.get_device_properties(0)
    name = torch.cuda.get_device_name(0)
    return find_cluster_for_device(name, properties.total_memory, properties.multi_processor_count)


def describe_chip(chip: Chip, values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a cluster's description that tell what was measured: the chip, its rates
    if its datasheet is not known, and the constants."""
    keys: dict[str, Any] = {"chip": chip.name, "memory": chip.memory}
    if chip.name not in CHIPS:
        peaks = {kind: float(f"{rate:.4g}") for kind, rate in chip.peaks.items()}
        bandwidth = float(f"{chip.bandwidth:.4g}")
        keys |= {"bandwidth": bandwidth, "units": chip.units, "peaks": peaks}
    return {**keys, "constants": {name: float(f"{values[name]:.3g}") for name in MEASURED}}


def main() -> None:
    """Measure, and print the constants or write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chip", help="whose peaks and bandwidth are compared with (default: that of the device)"
    )
    parser.add_argument("--precision", choices=list(TYPES), default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--largest", type=int, default=None, help="widest product")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--write",
        type=Path,
        help="description of a cluster to write, with links that are assumed; of a file that is "
        "there, the chip is replaced and the links stay",
    )
    arguments = parser.parse_args()
    if arguments.chip is not None and arguments.chip not in CHIPS:
        raise UserError(f"--chip {arguments.chip} is unknown; use {suggest_chips(arguments.chip)}")
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    largest = arguments.largest or (1024 if device.type == "cpu" else 8192)
    if largest < 256:
        raise UserError(f"--largest {largest} is too small to measure; use 256 or more")
    cluster = detect_cluster(device)
    chip = CHIPS[arguments.chip] if arguments.chip else cluster.chip
    if not chip.has_rates:
        chip = measure_unknown_chip(chip, device, largest)
    measured = measure_constants(chip, arguments.precision, device, largest)
    values = asdict(measured.constants)
    values = {key: values[key] for key in (*MEASURED, "contention", "links")}
    if arguments.write:
        changes = describe_chip(chip, values)
        write_cluster(arguments.write, cluster, changes, "Measured by tools/measure_kernels.py.")
    if arguments.json:
        print(json.dumps({**values, "errors": measured.errors}))
        return
    shown = ", ".join(f"{key}={value:.3g}" for key, value in values.items() if key in MEASURED)
    print(f"{chip.name}: Constants({shown})")
    print(f"products within {max(map(abs, measured.errors)):.0%} of what these predict")
    if arguments.write:
        print(
            f"wrote {arguments.write}; its links: tools/measure_links.py --write {arguments.write}"
        )


if __name__ == "__main__":
    with allow_closed_output(), report_errors():
        main()
