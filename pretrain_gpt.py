"""Pretrain a GPT: read the config, lay out the ranks, train."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import partial

from megaframe import __version__
from megaframe.config import (
    describe_all_keys,
    describe_common_keys,
    describe_unknown_options,
    explain,
)
from megaframe.config.describe import WIDTH
from megaframe.errors import EXIT_USER_ERROR, UserError, report_errors
from megaframe.extensions import load_extensions, load_with_extensions
from megaframe.io.closed_output import allow_closed_output

_USAGE = """pretrain_gpt.py --config FILE [--dry-run [--gpus N]] [--force] [section.key=value ...]

  python pretrain_gpt.py --config configs/demo.yaml train.steps=10      (after `make demo`)
  torchrun --nproc-per-node 8 pretrain_gpt.py --config llama3-8b optim.lr=1e-4
  python pretrain_gpt.py --config llama3-70b --dry-run --gpus 256 parallel.cluster=h100-ib
"""


def main() -> None:
    """Read the config, check it, and print what was asked for or train."""
    arguments, unknown = parse_arguments()
    if arguments.explain:
        with report_errors():
            load_extensions(arguments.config, arguments.overrides)
            print(explain(arguments.explain))
        return
    if arguments.list_configs:
        from megaframe.planner.config_list import describe_configs

        with report_errors():
            print(describe_configs())
        return
    # megaframe names lost ranks itself; torch's warnings would add pages of C++ stack traces.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported objects are never freed; collecting garbage during imports is 1/7 of the start time.
    gc.disable()
    from megaframe.distributed.mesh import read_global_rank
    from megaframe.training.auto_layout import find_cluster, resolve_phases
    from megaframe.training.dry_run import describe_run
    from megaframe.training.entry import train
    from megaframe.training.memory_check import judge_memory, plan_dry_run

    gc.freeze()
    gc.enable()
    with report_errors():
        rank = read_global_rank()
    with report_errors(rank=rank):
        refuse_options(arguments, unknown)
        if arguments.dry_run and rank:
            return  # the first rank prints for all
        config = load_with_extensions(arguments.config, arguments.overrides)
        if not arguments.dry_run:
            train(config, force=arguments.force)
            return
        config, world = plan_dry_run(config, arguments.gpus)
        before = None
        for phase, layout, notes in resolve_phases(config, world, data=False):
            cluster = find_cluster(phase.parallel, phase.run)
            verdict = judge_memory(phase, layout, cluster)
            description = describe_run(phase, layout, cluster, before)
            head = [*verdict.lines, *notes] if before is None else ["", *notes, *verdict.lines]
            print("\n".join([*head, description]), flush=True)
            for warning in verdict.warn_or_refuse(force=arguments.force):
                print(warning)
            before = phase


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Returns what it says, and the options that do not exist. Help ends
    the program, and so does a command line without anything to do."""
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        epilog=f"keys that people change, with their defaults:\n{describe_common_keys()}",
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, width=WIDTH, max_help_position=26
        ),
        add_help=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a YAML file, or the name of a shipped config: demo")
    add("--dry-run", action="store_true", help="print if it fits, config, layout and memory")
    add("--gpus", type=int, metavar="N", help="with --dry-run: plan for N GPUs, here or elsewhere")
    add("--force", action="store_true", help="run even if there is too little memory by the plan")
    add("--explain", metavar="KEY", help="document section.key or section, and exit")
    add("--list-configs", action="store_true", help="list the shipped configs, and exit")
    add("--version", action="version", version=f"megaframe {__version__}", help="print it and exit")
    add(
        "-h",
        "--help",
        nargs="?",
        const="common",
        choices=("common", "all"),
        metavar="all",
        help="print this, or with `all` every key with its values, and exit",
    )
    add("overrides", nargs="*", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.help == "all":
        parser.epilog = f"all keys, with their defaults and values:\n\n{describe_all_keys()}"
    if arguments.help:
        print(parser.format_help(), end="")
        sys.exit(0)
    # What argparse does not know is words after an option too, which are as good as those before.
    arguments.overrides += [word for word in rest if not word.startswith("-")]
    unknown = [word for word in rest if word.startswith("-")]
    asks = arguments.overrides or arguments.explain or arguments.list_configs or unknown
    if arguments.config is None and not asks:
        parser.exit(EXIT_USER_ERROR, parser.format_usage())
    return arguments, unknown


def refuse_options(arguments: argparse.Namespace, unknown: list[str]) -> None:
    """Raise `UserError` for unknown options, and for one that needs another."""
    if unknown:
        known = vars(arguments).keys() - {"overrides"}
        raise UserError(
            describe_unknown_options(unknown, (f"--{n.replace('_', '-')}" for n in known))
        )
    if arguments.gpus is not None and not arguments.dry_run:
        raise UserError(
            f"--gpus {arguments.gpus} needs --dry-run: it plans and does not start ranks; to train "
            f"on as many, use torchrun --nproc-per-node {arguments.gpus} pretrain_gpt.py ..."
        )


if __name__ == "__main__":
    with allow_closed_output():
        main()
