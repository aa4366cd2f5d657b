"""Pretrain a GPT: read the config, lay out the ranks, train.

python pretrain_gpt.py --config configs/demo.yaml [section.key=value ...]
torchrun --nproc-per-node N pretrain_gpt.py --config configs/demo.yaml [section.key=value ...]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys

from megaframe import __version__
from megaframe.config import explain, listing, load
from megaframe.errors import EXIT_USER_ERROR, reported
from megaframe.layout import Layout
from megaframe.plan.check import check
from megaframe.plan.elastic import fitted

_USAGE = """usage: pretrain_gpt.py --config FILE [--dry-run] [--force] [section.key=value ...]

  python pretrain_gpt.py --config configs/demo.yaml train.steps=10      (after `make demo`)
  torchrun --nproc-per-node 8 pretrain_gpt.py --config llama3-8b --dry-run

--help lists all options and keys; --explain KEY documents one."""


def main() -> None:
    """Read the config, check it, and print what was asked for or train."""
    arguments = parse_arguments()
    if arguments.config is None and not arguments.overrides and not arguments.explain:
        print(_USAGE, file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    if arguments.explain:
        with reported():
            print(explain(arguments.explain))
        return
    # megaframe names lost ranks itself; torch's warnings would add pages of C++ stack traces.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported objects are never freed; collecting garbage during imports is 1/7 of the start time.
    gc.disable()
    from megaframe.attempts import train
    from megaframe.automatic import cluster_of, with_blocks, with_layout
    from megaframe.describe import describe
    from megaframe.faults.leaving import record_flights
    from megaframe.mesh import global_rank, world_size
    from megaframe.preflight import check_memory
    from megaframe.trainer import resolve

    gc.freeze()
    gc.enable()
    with reported(rank=global_rank()):
        world = world_size()
        config, notes = with_layout(resolve(load(arguments.config, arguments.overrides)), world)
        if config.faults.elastic:
            config, world = fitted(config, world)
        check(config, world, data=not arguments.dry_run)
        config, more = with_blocks(config, world)
        notes += more
        layout = Layout.from_parallel(config.parallel, world)
        if arguments.dry_run:
            host = cluster_of(config).chip.is_host
            print("\n".join([*notes, describe(config, layout, host=host)]), flush=True)
            for line in check_memory(config, layout, dry_run=True, force=arguments.force):
                print(line)
            return
        if global_rank() >= world:
            return  # the layout that was chosen does not use this rank
        notes += check_memory(config, layout, force=arguments.force)
        record_flights(config)
        train(config, layout, notes)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; --help lists all keys and their defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file, or the name of a shipped config: demo"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved config, layout, parameter count and memory, and exit",
    )
    parser.add_argument(
        "--force", action="store_true", help="run even if a GPU has less memory than the plan needs"
    )
    parser.add_argument(
        "--explain", metavar="KEY", help="document section.key or section, and exit"
    )
    parser.add_argument("--version", action="version", version=f"megaframe {__version__}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args()


if __name__ == "__main__":
    main()
