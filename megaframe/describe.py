"""What `--dry-run` prints: the resolved config, layout, parameter count and memory."""

from __future__ import annotations

from dataclasses import asdict

from megaframe.config import RunConfig, dump
from megaframe.layout import Layout
from megaframe.plan.memory import memory
from megaframe.spec import parameter_count
from megaframe.stage import model_specs


def describe(config: RunConfig, layout: Layout) -> str:
    """The run in words and numbers; nothing is allocated for it."""
    specs = model_specs(config)
    count = parameter_count(specs)
    plan = memory(config, count)
    tokens = config.train.global_batch * config.train.seq
    lines = [
        dump(config),
        f"layout      {layout}",
        f"parameters  {count:,} in {len(specs)} tensors",
        f"batch       {config.train.global_batch} samples, {tokens:,} tokens a step, "
        f"{tokens * config.train.steps:,} in the run",
        "memory per rank, without interpreter and temporaries",
        *(f"  {kind:<12}{_gib(size):>12}" for kind, size in asdict(plan).items()),
        f"  {'total':<12}{_gib(plan.total):>12}",
    ]
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3f} GiB"
