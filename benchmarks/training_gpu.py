"""Whole training steps on the GPU that is here, ours beside plain PyTorch under torch.compile.

    python benchmarks/training_gpu.py [--dry] [--only ROW ...] [--write FILE.json]

A row is a config of `configs/bench`. Both contenders train it in a process of their own, one after
the other, on the same shapes; the ratio is of their median steps. `make gpu-check` runs all rows
and puts them into its result; `--dry` runs them in a tiny size, on a CPU too, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
MINUTES = 3.5
"""Of all rows on an H200: for each about 20 s of ours and 30 s of the peer, which compiles."""
_LONGEST = 100.0
"""Seconds of one contender on one row."""
TINY = (
    *("model.layers=1", "model.hidden=64", "model.heads=2", "model.kv_heads=2", "model.ffn=128"),
    *("model.vocab=256", "train.seq=32", "train.global_batch=4", "train.microbatch=2"),
    *("train.steps=2", "optim.warmup=1"),
)


@dataclass(frozen=True)
class Row:
    """A config, and what it is to reach on one H200: of `goal` at least so much. peer: whether
    plain PyTorch trains the same."""

    config: str
    goal: str
    least: float
    peer: bool = True
    overrides: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Of its config, from the root of the project."""
        return f"configs/bench/{self.config}.yaml"


ROWS = (
    Row("gpt2-124m", "tokens_per_second", 650_000),
    Row("gpt-1.3b", "mfu_causal", 0.52),
    Row("llama-8b-slice", "mfu_causal", 0.60),
    Row("llama-8b-slice-fp8", "tokens_per_second", 0.0, peer=False),
    Row("moe-slice", "mfu_causal", 0.45),
)
FASTER = 1.15
"""What each row is to be over the peer; and 8 bits over 16: `FP8_FASTER`."""
FP8_FASTER = 1.3


def contender(script: str, row: Row, dry: bool) -> dict[str, Any]:
    """What one says of a row, or the trouble that it has."""
    command = [sys.executable, str(PEERS / script), "--config", str(ROOT / row.path)]
    command += [*row.overrides, *(TINY if dry else ())]
    if dry and row.config.startswith("gpt"):
        command.append("model.positions=32")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LONGEST
        )
    except subprocess.TimeoutExpired:
        return {"trouble": f"not finished after {_LONGEST:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"trouble": lines[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def shares(row: Row, found: dict[str, Any], dry: bool) -> dict[str, Any]:
    """What a contender said, with its share of the peak of this chip in bf16: with causal attention
    counted as half, and as whole."""
    import torch

    from megaframe.config import load
    from megaframe.meter.flops import count_flops
    from megaframe.meter.peaks import chip_peak
    from megaframe.stage import model_specs

    if "trouble" in found:
        return found
    config = load(str(ROOT / row.path), [*row.overrides, *(TINY if dry else ())])
    flops = count_flops(model_specs(config), config)
    here = torch.cuda.is_available()
    peak = chip_peak(torch.cuda.get_device_name(), "bf16") if here else None
    for name, each in (("mfu_causal", flops.model), ("mfu_full", flops.full_attention)):
        rate = found["tokens_per_second"] * each
        found[name] = None if peak is None else rate / (peak * 1e12)
    found["tflops_causal"] = found["tokens_per_second"] * flops.model / 1e12
    return found


def measure(dry: bool, only: Sequence[str] = (), minutes: float = MINUTES) -> Iterator[dict]:
    """Each row as it is written into the results."""
    begun = time.monotonic()
    for row in ROWS:
        if only and row.config not in only:
            continue
        if time.monotonic() - begun > 60 * minutes:
            yield {"config": row.path, "trouble": f"left out after {minutes:g} minutes"}
            continue
        ours = shares(row, contender("gpu_ours.py", row, dry), dry)
        found: dict[str, Any] = {"config": row.path, "goal": {row.goal: row.least}, "ours": ours}
        if row.peer:
            found["plain"] = plain = shares(row, contender("gpu_plain.py", row, dry), dry)
            if "trouble" not in ours and "trouble" not in plain:
                found["times_plain"] = ours["tokens_per_second"] / plain["tokens_per_second"]
                found["same_start"] = math.isclose(
                    ours["first_loss"], plain["first_loss"], rel_tol=0.02
                )
        yield found


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, where 16 bits were measured with what 8 bits gain."""
    by_config = {row["config"]: row.get("ours", {}) for row in rows}
    for row in rows:
        base = by_config.get(row["config"].replace("-fp8", ""), {})
        both = base.get("tokens_per_second"), row.get("ours", {}).get("tokens_per_second")
        if "-fp8" in row["config"] and all(both):
            row["times_bf16"] = both[1] / both[0]
    return rows


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    parts = [f"{Path(row['config']).stem:<20}"]
    if "trouble" in row:
        return f"{parts[0]}{row['trouble']}"
    for name in ("ours", "plain"):
        found = row.get(name)
        if found is None:
            continue
        if "trouble" in found:
            parts.append(f"{name}: {found['trouble']}")
            continue
        mfu = found["mfu_causal"]
        parts.append(
            f"{name} {found['tokens_per_second']:>12,.0f} tokens/s, mfu "
            f"{'n/a' if mfu is None else f'{mfu:.1%}'}, host "
            f"{1e6 * found['host_seconds_per_block']:,.0f} us a block"
        )
    for name in ("times_plain", "times_bf16"):
        if name in row:
            parts.append(f"{name} {row[name]:.2f}")
    return "; ".join(parts)


def main() -> int:
    """The command. Status 1 where there is no GPU to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, no measurement")
    parser.add_argument("--only", nargs="+", default=[], choices=[row.config for row in ROWS])
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    import torch

    if not torch.cuda.is_available() and not given.dry:
        print("torch sees no GPU: nothing to measure here (--dry tries the script itself)")
        return 1
    rows = []
    for row in measure(given.dry, given.only, given.minutes):
        rows.append(row)
        print(line_of(row), flush=True)
    if given.write:
        given.write.write_text(json.dumps(with_ratios(rows), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
