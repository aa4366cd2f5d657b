"""Times attention and norms with other sizes of tiles than those that are in their tables.

    python benchmarks/gpu/tile_sweep.py [--only KIND ...] [--write FILE.json] [--dry]

The tables of `megaframe_kernels/attention/launches.py` hold the largest tiles that stay in
registers, which is not always what is fastest. Each variant is compiled in one of several processes
first, and then timed alone, forward or backward, on the cases of `gpu_check.py`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
from kernel_bench import format_first_line, make_passes  # noqa: E402
from kernel_timing import measure_timing  # noqa: E402
from time_limit import write_json  # noqa: E402

Sizes = tuple[int, ...]
VARIANTS: dict[str, list[Sizes]] = {
    "forward": [
        *((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 8, 4), (256, 64, 8, 3)),
        *((64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3)),
    ],
    "queries": [
        *((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 8, 3)),
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2)),
    ],
    "keys": [
        *((32, 128, 8, 3), (64, 128, 8, 2), (64, 128, 8, 3), (128, 128, 8, 2)),
        *((64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3), (64, 128, 4, 2), (32, 128, 4, 3)),
    ],
    "norm": [(warps, per) for warps in (4, 8, 16) for per in (16, 32, 48)],
}
"""Of attention: queries, keys, warps and stages of a tile. Of norms: warps of a program, and warps
of a multiprocessor in the backward pass."""
_QUIET = 90.0
"""Seconds that a process may compile."""


def select(kind: str, sizes: Sizes) -> None:
    """Let a kernel run with these sizes from now on, whatever its chip and the width of a head."""
    from megaframe_kernels.attention import launches
    from megaframe_kernels.elementwise import norm

    if kind == "norm":
        warps, norm.WARPS_PER_PROCESSOR = sizes
        choose = norm.choose_tile
        norm.choose_tile = lambda x: (*choose(x)[:2], warps)
        return
    tables = {
        "forward": launches.FORWARD,
        "queries": launches.BACKWARD_QUERIES,
        "keys": launches.BACKWARD_KEYS,
    }
    queries, keys, warps, stages = sizes
    for generation in tables[kind].values():
        for width in generation:
            generation[width] = launches.Tiling(queries, keys, warps, stages)


def list_passes(kind: str, dry: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what a variant of this kind changes, with the names of the cases."""
    from kernel_cases import REAL, TINY, list_cases
    from megaframe_kernels.registry import KERNELS

    kernel = KERNELS["norm" if kind == "norm" else "attention"]
    run = kernel.implementations["triton"].run
    for case in list_cases(TINY if dry else REAL):
        if case.kernel != kernel.name:
            continue
        forward, backward = make_passes(case, case.arguments(), run)
        if kind in ("forward", "norm"):
            yield f"{case.name}, forward", forward
        if kind != "forward" and backward is not None:
            yield f"{case.name}, backward", backward


def measure_variant(kind: str, sizes: Sizes, timed: bool, dry: bool) -> dict[str, Any]:
    """Run a variant. Return its microseconds by case, or why it does not run."""
    select(kind, sizes)
    found: dict[str, Any] = {"kind": kind, "sizes": sizes}
    try:
        for name, run in list_passes(kind, dry):
            if timed:
                found[name] = round(1e6 * measure_timing(run, dry).seconds, 1)
            else:
                run()
    except Exception as broken:
        found["trouble"] = format_first_line(broken)
    return found


def compile_all(only: list[str], dry: bool) -> None:
    """Run every variant once, in several processes, which fills Triton's cache."""
    count = max(1, (os.cpu_count() or 2) - 2)
    command = [sys.executable, __file__, "--only", *only, *(["--dry"] if dry else [])]
    shards = [
        subprocess.Popen([*command, "--compile", str(number), str(count)], cwd=ROOT)
        for number in range(count)
    ]
    for shard in shards:
        try:
            shard.wait(_QUIET)
        except subprocess.TimeoutExpired:
            shard.kill()


def main() -> int:
    """Run the command. The status is 1 if there is no GPU to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--write", type=Path, metavar="FILE.json")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("NUMBER", "COUNT"))
    arguments = parser.parse_args()
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not arguments.dry:
        print("torch sees no GPU: nothing to measure here (--dry tries the script itself)")
        return 1
    if not has_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    todo = [(kind, sizes) for kind in arguments.only for sizes in VARIANTS[kind]]
    if arguments.dry:
        todo = [(kind, VARIANTS[kind][0]) for kind in arguments.only]
    with torch.device("cuda" if has_gpu else "cpu"):
        if arguments.compile:
            number, count = arguments.compile
            for variant in todo[number::count]:
                measure_variant(*variant, timed=False, dry=arguments.dry)
            return 0
        if has_gpu:
            compile_all(arguments.only, arguments.dry)
        results = []
        for variant in todo:
            results.append(measure_variant(*variant, timed=True, dry=arguments.dry))
            print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
            if arguments.write:
                write_json(arguments.write, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
