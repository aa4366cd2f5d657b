"""Predict a run: does it fit, how fast is it, which layout is best and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megaframe.architecture.absorption import decide_absorption
from megaframe.config import RunConfig, dump
from megaframe.errors import UserError, explain_failed_write, report_errors
from megaframe.extensions import load_with_extensions
from megaframe.hardware.cluster import DEFAULT, list_cluster_names, load_cluster
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.regular_file import write_file
from megaframe.layout import Layout
from megaframe.planner.advice import describe_alternatives, describe_decision, describe_prediction
from megaframe.planner.budget import BudgetPlan, plan_budget
from megaframe.planner.budget_request import parse_budget
from megaframe.planner.candidates import SEARCHED_KEYS, SearchSpace
from megaframe.planner.constants import Constants, get_cluster_constants
from megaframe.planner.explanations import EXPLANATIONS, Explanation
from megaframe.planner.explanations.software import explain_software
from megaframe.planner.fit import suggest_changes
from megaframe.planner.island_advice import list_reasons
from megaframe.planner.layout_search import LayoutChoice, SearchResult, describe_candidate, search
from megaframe.planner.peak_memory import resolve_recompute_blocks
from megaframe.planner.plan_record import make_plan_record
from megaframe.planner.prediction import predict
from megaframe.planner.theory.scaling_laws import LAWS, load_law
from megaframe.planner.trainers import TRAINERS
from megaframe.validate.run import validate_config

_GIB = 2.0**30
_ROWS = 12
_DENSE_CONFIG = "llama3-8b"
"""Shape of a budget's models if no config is given."""
_LEAST_OVERTRAINING, _MOST_OVERTRAINING = 0.01, 10_000.0
_EPILOG = """\
With --search, what is given on the command line (parallel.tensor=8, train.microbatch=1 ...) stays,
and every other size of the layout is chosen; without it the layout is that of the config.

examples:
  python tools/plan.py --config configs/llama3-8b.yaml --gpus 64 parallel.zero=3
  python tools/plan.py --config configs/gpt3-175b.yaml --gpus 1024 --search --write best.yaml
  python tools/plan.py --config configs/gpt3-175b.yaml --gpus 1024 --dry-run --rank 17 \\
      parallel.tensor=8 parallel.pipeline=8
  python tools/plan.py --config configs/llama3-8b.yaml --gpus 64 \\
      --scaling --collectives --roofline --failures
  python tools/plan.py --budget "64 h100 for 7 days" --overtrain 4
"""


def main() -> None:
    """Print the plan as text or JSON, and write the files that were asked for."""
    arguments = parse_arguments()
    with report_errors():
        space, choice, result, explanations = make_plan(arguments)
        constants = get_cluster_constants(space.cluster)
        if arguments.dry_run:
            run_dry_run(choice, arguments.rank, as_json=arguments.json)
            return
        for name, (explain, _) in EXPLANATIONS.items():
            if getattr(arguments, name) or arguments.html:
                explanations[name] = explain(choice, space.cluster, constants)
        if arguments.software:
            names = arguments.software.split(",")
            explanations["software"] = explain_software(choice, space.cluster, constants, names)
        asked = {name: each for name, each in explanations.items() if getattr(arguments, name)}
        if arguments.json:
            print(json.dumps(make_plan_record(space, choice, result, asked), indent=1))
        else:
            print_plan(space, constants, choice, result)
            print_explanations(asked)
        if arguments.write:
            write_config(Path(arguments.write), choice)
        if arguments.html:
            from megaframe.planner.plan_page import write_page

            path = Path(arguments.html)
            write_page(path, choice, result, space.cluster, constants, explanations)


def make_plan(
    arguments: argparse.Namespace,
) -> tuple[SearchSpace, LayoutChoice, SearchResult | None, dict[str, Explanation]]:
    """Return what a command line asks for: the run and its GPUs, the layout, the search that found
    it, and what is explained already."""
    if arguments.budget is not None:
        plan = parse_budget_plan(arguments)
        return plan.space, plan.result.best, plan.result, {"budget": plan.explanation}
    if arguments.law is not None or arguments.overtrain is not None:
        raise UserError('--law and --overtrain belong to --budget, such as "64 h100 for 7 days"')
    space = parse_space(arguments)
    constants = get_cluster_constants(space.cluster)
    if arguments.search:
        result = search(space, constants)
        return space, result.best, result, {}
    return space, predict_layout(space, constants), None, {}


def parse_budget_plan(arguments: argparse.Namespace) -> BudgetPlan:
    """Return the plan of a budget.

    Raises:
        UserError: It buys nothing, or other words of the command line contradict it.
    """
    budget = parse_budget(arguments.budget, arguments.cluster)
    if arguments.gpus not in (None, budget.gpus):
        raise UserError(
            f"--gpus {arguments.gpus} and --budget {arguments.budget} name different numbers of "
            "GPUs; leave --gpus out"
        )
    overtraining = 1.0 if arguments.overtrain is None else arguments.overtrain
    if not _LEAST_OVERTRAINING <= overtraining <= _MOST_OVERTRAINING:
        raise UserError(
            f"--overtrain {overtraining:g} is not within {_LEAST_OVERTRAINING:g} and "
            f"{_MOST_OVERTRAINING:g}; 1 is what the law wants"
        )
    given = [text.partition("=")[0] for text in arguments.overrides]
    for key in ("train.steps", "data.epochs"):
        if key in given:
            raise UserError(f"{key} follows from --budget; leave it out")
    config = load_with_extensions(arguments.config or _DENSE_CONFIG, arguments.overrides)
    config = config.model_copy(update={"data": config.data.model_copy(update={"epochs": None})})
    check_vocab(config)
    name = arguments.law or next(iter(LAWS))
    return plan_budget(
        budget,
        config,
        get_cluster_constants(budget.cluster),
        (name, load_law(name)),
        overtraining=overtraining,
        fixed=select_fixed_keys(config, given),
        given=given,
    )


def check_vocab(config: RunConfig) -> None:
    """Raise `UserError` if the config leaves the vocabulary to a tokenizer."""
    if config.model.vocab is None:
        raise UserError("model.vocab is not set, and a plan reads no tokenizer; give model.vocab=N")


def select_fixed_keys(config: RunConfig, given: Sequence[str]) -> dict[str, Any]:
    """Return the keys that a search chooses but the command line gives, with their values."""
    fixed: dict[str, Any] = {}
    for section, keys in ((config.parallel, "parallel"), (config.train, "train")):
        for name in SEARCHED_KEYS:
            if f"{keys}.{name}" in given and getattr(section, name) is not None:
                fixed[name] = getattr(section, name)
    return fixed


def select_phase(config: RunConfig, number: int | None) -> RunConfig:
    """Return the config of a phase as that of a run of its own, from its first step to its last.

    Args:
        config: The whole run. Without phases it is returned as it is.
        number: Which of `data.phases`, from 1; None for the first.

    Raises:
        UserError: There is no such phase.
    """
    phases = len(config.data.phases)
    if number is not None and not 1 <= number <= phases:
        has = f"has {phases}; use 1 to {phases}" if phases else "has none; leave --phase out"
        raise UserError(f"--phase {number}: data.phases {has}")
    if not phases:
        return config
    from megaframe.training.phases import decide_phases  # needs torch

    whole = config.replace(checkpoint={"resume": None}, train={"stop_after": None})
    phase = decide_phases(whole)[(number or 1) - 1]
    place = phase.data.phase
    assert place is not None
    steps = phase.train.last_step - place.step
    return phase.replace(
        train={"steps": steps, "stop_after": None},
        data={"phases": (), "phase": None},
        optim={"span": None},
    )


def parse_space(arguments: argparse.Namespace) -> SearchSpace:
    """Return what a command line asks for.

    Raises:
        UserError: If it cannot be planned.
    """
    config = load_with_extensions(arguments.config, arguments.overrides)
    check_vocab(config)
    if config.data.epochs is not None:
        from megaframe.training.run_length import decide_steps  # needs torch

        config, _ = decide_steps(config, data=False)
    config = select_phase(config, arguments.phase)
    cluster_name = arguments.cluster or config.parallel.cluster
    cluster = load_cluster(cluster_name or DEFAULT)
    if cluster_name is None:
        text = f"no cluster is named, so {DEFAULT} is assumed; name yours with --cluster"
        cluster = replace(cluster, notes=(text,))
    parallel = config.parallel
    ranks_per_sample = parallel.tensor * parallel.context * parallel.pipeline
    gpus = arguments.gpus
    if gpus is None:
        gpus = ranks_per_sample * (parallel.data or max(1, cluster.node // ranks_per_sample))
    if gpus < 1:
        raise UserError(f"--gpus {gpus} is not a number of GPUs; use 1 or more")
    given = [text.partition("=")[0] for text in arguments.overrides]
    return SearchSpace(config, gpus, cluster, select_fixed_keys(config, given))


def predict_layout(space: SearchSpace, constants: Constants) -> LayoutChoice:
    """Return the config's own layout with its prediction."""
    config, gpus = space.config, space.gpus
    validate_config(config, gpus, data=False)
    layout = Layout.from_parallel(config.parallel, gpus)
    config = resolve_recompute_blocks(decide_absorption(config), layout, space.cluster.chip)
    return LayoutChoice(config, layout, predict(config, layout, space.cluster, constants))


def print_plan(
    space: SearchSpace, constants: Constants, choice: LayoutChoice, result: SearchResult | None
) -> None:
    """Print the plan: words first, tables second.

    Args:
        space: The run and the GPUs that were asked for.
        constants: What kernels and collectives reach there.
        choice: The layout.
        result: The search that found it; None if the layout was given.
    """
    console, cluster = Console(highlight=False, soft_wrap=True), space.cluster
    console.print(
        f"[bold]{space.gpus} GPUs ({cluster.chip.name}) of {cluster.name}, {choice.layout}[/bold]"
    )
    if result is not None:
        for line in describe_decision(result, cluster):
            console.print(line)
    else:
        for line in describe_prediction(choice, cluster):
            console.print(line)
        if not choice.prediction.fits:
            console.print("[bold]Instead[/bold]")
            for line in suggest_changes(replace(space, config=choice.config, fixed={}), constants):
                console.print(f"  {line}")
    for line in list_reasons(choice, cluster):
        console.print(f"  - {line}")
    console.print(_make_table(choice))
    if result is not None:
        console.print("[bold]Other choices, each with the best values of everything else[/bold]")
        for line in describe_alternatives(result, cluster):
            console.print(f"  {line}")
        console.print(_make_choices_table(result))


def print_explanations(explanations: Mapping[str, Explanation]) -> None:
    """Print what was asked to be explained: sentences, and a table each."""
    console = Console(highlight=False, soft_wrap=True)
    for explanation in explanations.values():
        console.print(f"[bold]{explanation.title}[/bold]")
        for line in explanation.lines:
            console.print(f"  {line}", markup=False)
        for line in explanation.format_table():
            console.print(f"  {line}", markup=False)


def _make_table(choice: LayoutChoice) -> Table:
    prediction = choice.prediction
    table = Table("seconds of a step", "", "GiB on the fullest GPU", "", box=None, pad_edge=False)
    times = [(name, f"{value:.4g}") for name, value in prediction.breakdown.items() if value > 1e-9]
    sizes = [(name, f"{value / _GIB:.2f}") for name, value in prediction.memory_bytes.items()]
    times.append(("in all", f"{prediction.step_seconds:.4g}"))
    sizes.append(("in all", f"{sum(prediction.memory_bytes.values()) / _GIB:.2f}"))
    num_rows = max(len(times), len(sizes))
    empty = [("", "")] * num_rows
    for left, right in zip([*times, *empty][:num_rows], [*sizes, *empty][:num_rows], strict=True):
        table.add_row(*left, *right)
    return table


def _make_choices_table(result: SearchResult) -> Table:
    table = Table("seconds", "MFU", "GiB", "layout", box=None, pad_edge=False)
    for choice in result.choices[:_ROWS]:
        prediction = choice.prediction
        table.add_row(
            f"{prediction.step_seconds:.4g}",
            "-" if prediction.mfu is None else f"{prediction.mfu:.1%}",
            f"{sum(prediction.memory_bytes.values()) / _GIB:.1f}",
            describe_candidate(result.candidates, choice.index),
        )
    return table


def write_config(path: Path, choice: LayoutChoice) -> None:
    """Write the config with the layout, ready for pretrain_gpt.py."""
    head = f"# {choice.layout}: {choice.prediction.step_seconds:.3g} s a step by the plan.\n"
    with explain_failed_write(path):
        write_file(path, head + dump(choice.config))


def run_dry_run(choice: LayoutChoice, rank: int, *, as_json: bool) -> None:
    """Run one rank's step on meta tensors, and print what it counts next to the plan.

    Args:
        choice: The layout.
        rank: The rank.
        as_json: Whether to print JSON.

    Raises:
        UserError: For a rank that the layout does not have.
    """
    from megaframe.training.meta_step import run_meta_step
    from megaframe.training.meta_step.compare import compare_with_plan

    if not 0 <= rank < choice.layout.world:
        raise UserError(
            f"--rank {rank} is not one of the {choice.layout.world} ranks; use 0 to "
            f"{choice.layout.world - 1}"
        )
    rows = compare_with_plan(
        choice.config, choice.layout, rank, run_meta_step(choice.config, choice.layout, rank)
    )
    if as_json:
        print(json.dumps([vars(row) for row in rows], indent=1))
        return
    console = Console(highlight=False)
    console.print(f"rank {rank} of {choice.layout}: one step of the real executor, run alone")
    table = Table("", "counted", "planned", "difference", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row.name, *row.shown)
    console.print(table)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: Its words; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file, or the name of a shipped config: demo"
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help=f"{', '.join(list_cluster_names())}, or the path of a description (default: "
        f"parallel.cluster, or {DEFAULT})",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="default: as the layout says")
    parser.add_argument(
        "--phase", type=int, metavar="N", help="plan this one of data.phases, from 1 (default: 1)"
    )
    parser.add_argument("--search", action="store_true", help="choose the layout")
    for name, (_, text) in EXPLANATIONS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"explain {text}")
    parser.add_argument(
        "--software",
        metavar="NAMES",
        help="also predict other trainers on the same layout, names divided by commas: "
        f"{', '.join(TRAINERS)}",
    )
    parser.add_argument(
        "--budget",
        metavar="TEXT",
        help='choose the model, its tokens and the layout for "64 h100 for 7 days" (or hours, '
        "weeks, dollars; a chip or a cluster), in the shape of --config (default: "
        f"{_DENSE_CONFIG})",
    )
    parser.add_argument(
        "--law",
        metavar="NAME",
        help=f"of compute-optimal sizes: {', '.join(LAWS)}, or the path of a fit "
        f"(default: {next(iter(LAWS))})",
    )
    parser.add_argument(
        "--overtrain",
        type=float,
        metavar="X",
        help="tokens for each parameter, as a multiple of the law's (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page that works without a network")
    parser.add_argument("--write", metavar="FILE", help="write a config with the layout")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run a step of one rank on meta tensors, without memory or other ranks (needs torch)",
    )
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which one (default: 0)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with allow_closed_output():
        main()
