"""Whole training steps on the available GPU, compared with plain PyTorch under torch.compile.

    python benchmarks/gpu/training_gpu.py [--dry] [--only ROW ...] [--write FILE.json]

A row is a config of `configs/bench`, the most important first. Both contenders train it in separate
processes, one after the other, on the same shapes; the ratio is of their median steps. Rows of the
host measure only its time per block. `make gpu-check` runs as many rows as its time allows and puts
them into its result. `--dry` runs the rows in a tiny size, also on a CPU, and measures nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
from time_limit import parse_object, run_limited, write_json  # noqa: E402

PEERS = ROOT / "benchmarks" / "peers"
_MINUTES = 9.5
"""For all rows: about a minute per contender, most of it for its start and its compiler."""
_LONGEST = 180.0
"""Most seconds of one contender on one row."""
_LEAST = 30.0
"""With fewer seconds left, no contender would get to its first step."""
_STEPS = ("train.steps=20",)
TINY = (
    *("model.layers=1", "model.hidden=64", "model.heads=2", "model.kv_heads=2", "model.ffn=128"),
    *("model.vocab=256", "train.seq=32", "train.global_batch=4", "train.microbatch=2"),
    *("train.steps=2", "optim.warmup=1"),
)


@dataclass(frozen=True)
class TrainingCase:
    """A config, and its goal on one H200.

    Attributes:
        goal: What is to be reached; empty if the row is only what another one is compared with.
        most: Whether `reach` is an upper limit instead of a lower.
        peer: Whether plain PyTorch trains the same.
        script: Ours.
        keeps_trace: Whether its trace is kept.
    """

    name: str
    config: str
    goal: str
    reach: float
    most: bool = False
    peer: bool = True
    overrides: tuple[str, ...] = ()
    script: str = "gpu_ours.py"
    keeps_trace: bool = False

    @property
    def path(self) -> str:
        """Path of the config from the root of the project."""
        return f"configs/bench/{self.config}.yaml"

    def list_overrides(self, dry: bool) -> list[str]:
        """Return the overrides of the config. A dry run records no graph, as a CPU cannot."""
        if not dry:
            return [*self.overrides, *_STEPS]
        overrides = [key for key in self.overrides if key not in GRAPH]
        positions = ["model.positions=32"] if self.config.startswith("gpt") else []
        return [*overrides, *TINY, *positions]


def _make_host_case(config: str, *overrides: str) -> TrainingCase:
    goal = "host_seconds_per_block"
    arguments = config, goal, 180e-6, True, False, overrides
    return TrainingCase(f"{config}-host", *arguments, script="gpu_host.py")


GRAPH = ("train.cuda_graph=true",)
_HEADS, _LATENTS = (f"model.indexer.absorb={value}" for value in ("false", "true"))
ROWS = (
    TrainingCase("llama-8b-slice", "llama-8b-slice", "mfu_causal", 0.60, keeps_trace=True),
    TrainingCase("llama-8b-slice-fp8", "llama-8b-slice-fp8", "times_bf16", 1.3, peer=False),
    TrainingCase("moe-slice", "moe-slice", "mfu_causal", 0.45),
    TrainingCase("gpt-1.3b", "gpt-1.3b", "mfu_causal", 0.52),
    TrainingCase("gpt2-124m", "gpt2-124m", "tokens_per_second", 650_000),
    TrainingCase("gpt2-124m-graph", "gpt2-124m", "host_seconds_per_step", 1e-3, True, False, GRAPH),
    _make_host_case("llama-8b-slice"),
    _make_host_case("moe-slice", "model.ffn=2048"),  # six layers of full width do not fit
    TrainingCase("sparse-slice", "sparse-slice", "", 0.0, peer=False, overrides=(_HEADS,)),
    TrainingCase(
        *("sparse-slice-latents", "sparse-slice", "times_heads", 1.0),
        peer=False,
        overrides=(_LATENTS,),
    ),
)
RATIOS = {"-fp8": "times_bf16", "-latents": "times_heads"}
"""Names of speeds over that of the row without this end of its name."""
FASTER = 1.15
"""Goal for the speed of each row that has a peer, relative to the peer."""
MOST_IDLE = 0.005
"""Goal for the share of a step in which the GPU does nothing."""


def make_environment() -> dict[str, str]:
    """Return the variables of a process that finds this checkout where it is not installed."""
    python_path = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}


def run_contender(
    script: str, row: TrainingCase, dry: bool, seconds: float, trace: Path | None = None
) -> dict[str, Any]:
    """Return what one contender says of a row, or what went wrong.

    Args:
        trace: Where to write the trace of two steps.
    """
    command = [sys.executable, str(PEERS / script), "--config", str(ROOT / row.path)]
    if trace is not None:
        command += ["--trace", str(trace)]
    completed = run_limited([*command, *row.list_overrides(dry)], seconds, make_environment())
    result = next(filter(None, map(parse_object, reversed(completed.lines))), None)
    if completed.code == 0 and result is not None:
        return result
    trouble = completed.explain_failure() if completed.code != 0 else "it printed no result"
    # Keep what was measured before it failed.
    key = "trouble" if result is None else "incomplete"
    return {**(result or {}), key: trouble, "details": completed.errors}


def add_shares(row: TrainingCase, result: dict[str, Any], dry: bool) -> dict[str, Any]:
    """Return what a contender said, with its share of this chip's bf16 peak (with causal attention
    counted as half and as whole) and where the rest of the time went."""
    import torch

    from megaframe.config import load
    from megaframe.metrics.flops import count_flops
    from megaframe.metrics.peak_flops import find_chip_peak
    from megaframe.metrics.waterfall import attribute_losses
    from megaframe.model.model_chunk import list_model_specs

    if "tokens_per_second" not in result:
        return result
    config = load(str(ROOT / row.path), row.list_overrides(dry))
    flops = count_flops(list_model_specs(config.model, config.train), config)
    has_gpu = torch.cuda.is_available()
    peak = find_chip_peak(torch.cuda.get_device_name(), "bf16") if has_gpu else None
    with_shares = dict(result)
    for name, each in (("mfu_causal", flops.model), ("mfu_full", flops.full_attention)):
        rate = result["tokens_per_second"] * each
        with_shares[name] = None if peak is None else rate / (peak * 1e12)
    with_shares["tflops_causal"] = result["tokens_per_second"] * flops.model / 1e12
    if "parts" in result:
        lost = attribute_losses(
            result["parts"], mfu=with_shares["mfu_causal"], recompute=flops.recompute
        )
        with_shares["waterfall"] = lost
    return with_shares


def measure(
    dry: bool, only: Sequence[str] = (), until: float = math.inf, traces: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yield each row as it is written into the results, anew after each contender.

    Args:
        until: The monotonic time by which all end.
        traces: Prefix of the names of traces that are kept.
    """
    for row in ROWS:
        if only and row.name not in only:
            continue
        results: dict[str, Any] = {"row": row.name, "config": row.path}
        if until - time.monotonic() < _LEAST:
            yield {**results, "trouble": "left out for time"}
            continue
        trace = None
        if row.keeps_trace and traces is not None:
            trace = traces.with_name(f"{traces.name}-{row.name}.json.gz")
        scripts = {"ours": row.script, **({"plain": "gpu_plain.py"} if row.peer else {})}
        for number, (name, script) in enumerate(scripts.items()):
            # One that hangs leaves the other its share.
            seconds = (until - time.monotonic()) / (len(scripts) - number)
            seconds = seconds if dry else min(seconds, _LONGEST)
            result = run_contender(script, row, dry, seconds, trace if name == "ours" else None)
            try:
                results[name] = add_shares(row, result, dry)
            except Exception as broken:
                results[name] = {**result, "incomplete": f"{type(broken).__name__}: {broken}"}
            yield {**results, **compare_contenders(results)}


def compare_contenders(results: dict[str, Any]) -> dict[str, Any]:
    """Compare ours with plain, if both were measured."""
    own_result, plain = results["ours"], results.get("plain", {})
    if "tokens_per_second" not in own_result or "tokens_per_second" not in plain:
        return {}
    return {
        "times_plain": own_result["tokens_per_second"] / plain["tokens_per_second"],
        "same_start": math.isclose(own_result["first_loss"], plain["first_loss"], rel_tol=0.02),
    }


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows; those that are compared with another one with their speedup, if that was
    measured too."""
    speeds = {row["row"]: row.get("ours", {}).get("tokens_per_second") for row in rows}

    def compute_gain(name: str) -> dict[str, float]:
        ends = [end for end in RATIOS if name.endswith(end)]
        others = {end: speeds.get(name.removesuffix(end)) for end in ends}
        speed = speeds[name]
        return {RATIOS[end]: speed / other for end, other in others.items() if other and speed}

    return [{**row, **compute_gain(row["row"])} for row in rows]


def format_line(row: dict[str, Any]) -> str:
    """Format a row."""
    parts = [f"{row['row']:<20}"]
    if "trouble" in row:
        return f"{parts[0]}{row['trouble']}"
    for name in ("ours", "plain"):
        result = row.get(name, {})
        for key in ("trouble", "incomplete"):
            if key in result:
                parts.append(f"{name}: {result[key]}")
        if "host_seconds_per_block" in result:
            parts.append(f"host {1e6 * result['host_seconds_per_block']:,.0f} us a block")
        if "tokens_per_second" not in result:
            continue
        cells = [f"{name} {result['tokens_per_second']:>12,.0f} tokens/s"]
        for key in ("mfu_causal", "gpu_idle"):
            if result.get(key) is not None:
                cells.append(f"{key} {result[key]:.1%}")
        parts.append(", ".join([*cells, f"host {1e3 * result['host_seconds_per_step']:,.1f} ms"]))
    for name in ("times_plain", *RATIOS.values()):
        if name in row:
            parts.append(f"{name} {row[name]:.2f}")
    return "; ".join(parts)


def main() -> int:
    """Run the command. The status is 1 if there is no GPU to measure."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, no measurement")
    parser.add_argument("--only", nargs="+", default=[], choices=[row.name for row in ROWS])
    parser.add_argument("--minutes", type=float, default=_MINUTES)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    # On SIGTERM exit normally, which also ends the processes that run in groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    import torch

    if not torch.cuda.is_available() and not arguments.dry:
        print("torch sees no GPU: nothing to measure here (--dry tries the script itself)")
        return 1
    rows: dict[str, dict[str, Any]] = {}
    traces = arguments.write.with_suffix("") if arguments.write and not arguments.dry else None
    for row in measure(arguments.dry, arguments.only, begun + 60 * arguments.minutes, traces):
        rows[row["row"]] = row
        print(format_line(row), flush=True)
        if arguments.write:
            write_json(arguments.write, with_ratios(list(rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
