"""Weak scaling by simulation: what latencies of 5 to 50 us cost a step on up to 16,384 ranks.

Every rank has the same work, whatever their number, and no transfer would cost anything if it were
hidden. The compute of a step, the collectives and the buckets are those of the planner; a step is
then played event by event: a bucket is sent when the backward pass has completed it and the ones
before it have been sent, and a block of the next forward pass begins when its bucket is back. The
efficiency is the time of a step without data ranks, relative to that with them.

Before and after: the number of valid tokens counted within a step by a ring on the host, or known a
step ahead; buckets of half a block, or by the rule of `megaframe/architecture/buckets.py`; and with
`parallel.reduce_precision=bf16` parts exchanged between all pairs of ranks, or in steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megaframe.architecture.buckets import group_blocks_into_buckets
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig, load
from megaframe.config.load import resolve_config_path
from megaframe.hardware.cluster import Cluster, load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.data_parallel_times import (
    compute_block_load,
    count_table_elements,
    estimate_exchange_times,
    estimate_optimizer_seconds,
    resolve_bucket_size,
)
from megaframe.planner.layer_times import estimate_block_times, estimate_head_times
from megaframe.planner.layout_sizes import make_layout_sizes
from megaframe.planner.machine import Machine
from megaframe.planner.parameter_counts import count_rank_parameters

RANKS = (64, 256, 1024, 4096, 16384)
LATENCIES = (5.0, 10.0, 20.0, 50.0)
MODELS = ("llama3-8b", "gpt2-1.5b")
TENSOR = {"llama3-8b": 8}
"""Tensor ranks of a model, which fill a node; 1 for the others."""
MICROBATCHES = 4
_WIDE, _HIGH = 190, 170
_COLOURS = ("#b8bcc2", "#6f7782", "#0b6e4f", "#f0c9a0", "#d98f4e", "#a34a00")


@dataclass(frozen=True)
class Variant:
    """What a step does.

    Attributes:
        ahead: The valid tokens are known with the batch.
        rule: Buckets by rule, not of half a block.
        half: Gradients are reduced in bf16.
        in_steps: Their parts are exchanged in steps.
    """

    name: str
    ahead: bool = True
    rule: bool = True
    half: bool = False
    in_steps: bool = True


VARIANTS = (
    Variant("before", ahead=False, rule=False),
    Variant("buckets by rule", ahead=False),
    Variant("tokens ahead"),
    Variant("bf16 before", ahead=False, rule=False, half=True, in_steps=False),
    Variant("bf16, both", half=True, in_steps=False),
    Variant("bf16 in steps", half=True),
)
"""Each adds one change to the one before it, in fp32 and then with `reduce_precision=bf16`."""


@dataclass(frozen=True)
class SimulatedStep:
    """One step.

    Attributes:
        data: Data ranks.
        latency: Of the network, in us.
        alone: Its seconds without data ranks.
        seconds: With them.
        waiting: For the valid tokens.
        buckets: Of the blocks.
    """

    model: str
    ranks: int
    data: int
    latency: float
    variant: str
    alone: float
    seconds: float
    waiting: float
    buckets: int

    @property
    def efficiency(self) -> float:
        """Seconds without data ranks relative to those with them."""
        return self.alone / self.seconds


def compute_last_sent(ready: Sequence[float], seconds: Sequence[float]) -> float:
    """Return when the last of several transfers ends, which are sent one after the other.

    Args:
        ready: When each may begin, in order.
        seconds: How long each takes.
    """
    now = 0.0
    for start, long in zip(ready, seconds, strict=True):
        now = max(now, start) + long
    return now


def compute_last_computed(arrivals: Sequence[float], seconds: Sequence[float]) -> float:
    """Return when the last of several computations ends, which need what arrives in turn.

    Args:
        arrivals: How long the transfer takes that each needs; they follow one another.
        seconds: How long each computes.
    """
    arrived = now = 0.0
    for transfer, long in zip(arrivals, seconds, strict=True):
        arrived += transfer
        now = max(now, arrived) + long
    return now


def estimate_counting_wait(machine: Machine, latency: float, step: float, blocks: int) -> float:
    """Return the seconds that a device idles while its host waits for the number of valid tokens: a
    ring on the host takes 2 (p - 1) messages, and the host is ahead of the device by the part of a
    step that it does not need to launch it."""
    software, sizes = machine.software, machine.sizes
    kernels = software.kernels * (1 + software.backward_kernels) * blocks * sizes.microbatches
    launching = (kernels + software.step_kernels) * machine.rate.launch
    waiting = 2 * (float(sizes.data) - 1) * latency
    return max(0.0, waiting - max(0.0, step - float(launching)))


def simulate(
    name: str, config: RunConfig, ranks: int, cluster: Cluster, variant: Variant
) -> SimulatedStep:
    """Simulate a step of a dense model without a pipeline at ZeRO 1."""
    layout = Layout.from_parallel(config.parallel, ranks)
    if not variant.rule:
        config = _with(config, bucket_size=1)
    if variant.half:
        config = _with(config, reduce_precision="bf16")
    shipped = get_cluster_constants(cluster)
    software = replace(shipped.software, exchange_in_steps=variant.in_steps)
    constants = replace(shipped, software=software)
    config = resolve_bucket_size(config, layout, cluster)
    machine = Machine(
        config, cluster, constants, make_layout_sizes(config.parallel, config.train, layout)
    )
    counts = count_rank_parameters(config.model, config.train, layout, plan_stages(config))
    halves = [*zip(counts.split[1::2], counts.split[::2], strict=True)]
    least = config.parallel.bucket_size
    groups = group_blocks_into_buckets(halves, 1 if least == "auto" else least)
    block, head = estimate_block_times(machine, 0).combined, estimate_head_times(machine).combined
    forward, backward = float(block.forward), float(block.backward + block.weight)
    ends, layers = float(head.total), config.model.layers

    tables = [float(size) for size in counts.tables]  # a tied head is the embedding
    ready, sizes = [0.0] * (len(tables) - 1), tables[1:]
    arriving: list[float] = []
    for of in reversed(groups):
        second_half, first_half = halves[of.start]
        computed = (layers - of.start) * backward
        if of.halves:
            ready += [computed - backward * first_half / (second_half + first_half), computed]
            sizes += [second_half, first_half]
            arriving.append(second_half + first_half)
        else:
            ready.append(computed)
            sizes.append(sum(map(sum, halves[of.start : of.stop])))
            arriving.append(sizes[-1])
    backward_end = layers * backward
    ready += [backward_end, backward_end]
    sizes += [tables[0], float(counts.vectors)]
    scattered = [_compute_exchange_times(machine, size).scatter for size in sizes]
    sent = compute_last_sent(ready, [float(long) for long in scattered])

    # The gains and biases come back first, then what the passes need, in their order.
    blocks = [forward * (of.stop - of.start) for of in groups]
    needed = [counts.vectors, tables[0], *reversed(arriving), *tables[1:]]
    gathered = [float(_compute_exchange_times(machine, size).gather) for size in needed]
    gathered_again = compute_last_computed(
        gathered, [0.0, 0.0, *blocks, *(0.0 for _ in tables[1:])]
    )

    owned = replace(
        compute_block_load(machine, 0).scale(layers),
        tables=len(tables) * count_table_elements(machine),
    )
    update = float(estimate_optimizer_seconds(machine, owned))
    many = int(machine.sizes.microbatches)
    passes = many * (layers * (forward + backward) + ends) + update
    step = passes + (sent - backward_end) + (gathered_again - sum(blocks))
    latency = cluster.tiers[-1].latency
    waiting = 0.0 if variant.ahead else estimate_counting_wait(machine, latency, step, layers)
    return SimulatedStep(
        name,
        ranks,
        layout.data,
        round(latency * 1e6, 3),
        variant.name,
        passes,
        step + waiting,
        waiting,
        len(sizes) - len(tables) - 1,
    )


def _compute_exchange_times(machine: Machine, size: float) -> Any:
    return estimate_exchange_times(machine, size, 1.0)


def _with(config: RunConfig, **parallel: Any) -> RunConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})


def scale_config(config: RunConfig, tensor: int, ranks: int) -> RunConfig:
    """Return the config for this many ranks, each with as much work."""
    data = ranks // tensor
    batch = {"global_batch": MICROBATCHES * data, "microbatch": 1, "batch_ramp": None}
    scaled = config.model_copy(update={"train": config.train.model_copy(update=batch)})
    return _with(scaled, tensor=tensor, data=data, zero=1, bucket_size="auto")


def simulate_all(arguments: argparse.Namespace) -> Iterator[SimulatedStep]:
    """Yield all steps."""
    cluster = load_cluster(arguments.cluster)
    inner, *_, outer = cluster.tiers
    for name in arguments.models:
        config = load(resolve_config_path(name))
        for latency in arguments.latencies:
            slow = replace(cluster, tiers=(inner, replace(outer, latency=latency * 1e-6)))
            for ranks in arguments.ranks:
                sized = scale_config(config, TENSOR.get(name, 1), ranks)
                for variant in VARIANTS:
                    yield simulate(name, sized, ranks, slow, variant)


def format_table(steps: Sequence[SimulatedStep]) -> str:
    """Return the efficiencies as a table in Markdown."""
    names = [variant.name for variant in VARIANTS]
    rows = ["| model | latency | ranks | data ranks | " + " | ".join(names) + " |"]
    rows.append("|---" * (4 + len(names)) + "|")
    for start in range(0, len(steps), len(names)):
        panel_steps = steps[start : start + len(names)]
        first = panel_steps[0]
        cells = " | ".join(f"{line.efficiency:.1%}" for line in panel_steps)
        rows.append(
            f"| {first.model} | {first.latency:g} us | {first.ranks} | {first.data} | {cells} |"
        )
    return "\n".join(rows)


def draw(steps: Sequence[SimulatedStep], out: Path) -> None:
    """Draw the efficiency over the ranks: a panel for each model (rows) and latency."""
    models = [*dict.fromkeys(line.model for line in steps)]
    latencies = [*dict.fromkeys(line.latency for line in steps)]
    width, height = 40 + _WIDE * len(latencies), 40 + _HIGH * len(models)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="9" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row, model in enumerate(models):
        for column, latency in enumerate(latencies):
            panel_steps = [line for line in steps if (line.model, line.latency) == (model, latency)]
            parts += _draw_panel(
                panel_steps, 40 + column * _WIDE, 20 + row * _HIGH, first=column == 0
            )
    for number, (variant, colour) in enumerate(zip(VARIANTS, _COLOURS, strict=True)):
        x, y = 40 + number * (width - 40) // len(VARIANTS), height - 8
        parts.append(f'<rect x="{x}" y="{y - 7}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y - 2}">{variant.name}</text>')
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _draw_panel(
    panel_steps: Sequence[SimulatedStep], left: int, top: int, *, first: bool
) -> Iterator[str]:
    """Yield the shapes of one panel, whose corner is at (left, top)."""
    ranks = sorted({line.ranks for line in panel_steps})
    wide, high = _WIDE - 20, _HIGH - 45

    def x(number: int) -> float:
        return left + wide * ranks.index(number) / max(1, len(ranks) - 1)

    def y(share: float) -> float:
        return top + 12 + high * (1 - share)

    title = f"{panel_steps[0].model}, {panel_steps[0].latency:g} us"
    yield f'<text x="{left}" y="{top + 4}" font-weight="bold">{title}</text>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield (
            f'<line x1="{left}" x2="{left + wide}" y1="{y(share):.1f}" y2="{y(share):.1f}" '
            'stroke="#ddd"/>'
        )
        if first:
            yield f'<text x="{left - 32}" y="{y(share) + 3:.1f}">{share:.0%}</text>'
    for number in ranks:
        yield f'<text x="{x(number):.1f}" y="{y(0) + 12:.1f}" text-anchor="middle">{number}</text>'
    for variant, colour in zip(VARIANTS, _COLOURS, strict=True):
        of = sorted(
            (step.ranks, step.efficiency) for step in panel_steps if step.variant == variant.name
        )
        points = " ".join(f"{x(number):.1f},{y(share):.1f}" for number, share in of)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="names or paths of configs")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--latencies", nargs="+", type=float, default=LATENCIES, help="us")
    parser.add_argument("--cluster", default="h100-ib", help="whose other figures hold")
    parser.add_argument("--write", type=Path, help="write all steps as JSON")
    parser.add_argument("--plot", type=Path, help="draw them as SVG")
    arguments = parser.parse_args()
    steps_of_all = [*simulate_all(arguments)]
    print(format_table(steps_of_all))
    if arguments.write:
        steps = [{**asdict(line), "efficiency": line.efficiency} for line in steps_of_all]
        arguments.write.write_text(json.dumps(steps, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        draw(steps_of_all, arguments.plot)


if __name__ == "__main__":
    main()
