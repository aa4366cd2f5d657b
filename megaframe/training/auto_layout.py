"""What a config leaves to the run, decided before anything is built: with `parallel.auto` the
planner's best layout for the available ranks, recomputed blocks, bucket size, vocabulary, and the
steps of `data.epochs`.

`resolve_config` decides all of it, for the entry and for whoever else makes a `Trainer`, which
refuses a config that it has not decided: two runs of one config must have the same buckets, or
their last bits differ. What is decided depends only on config, world size and device, so all ranks
decide alike without communicating. A resumed run keeps its layout, which is read from the config in
its run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from megaframe.architecture.absorption import (
    KEY,
    count_multiplications,
    decide_absorption,
    explain_obstacle,
)
from megaframe.architecture.stages import plan_stages
from megaframe.config import CheckpointConfig, ParallelConfig, RunConfig, RunSection, TrainConfig
from megaframe.config.load import load_from_run
from megaframe.config.phases import list_phase_keys, name_phase
from megaframe.data.vocabulary_size import find_vocab_size
from megaframe.distributed.device import explain_hidden_gpu, read_host_memory
from megaframe.distributed.mesh import read_local_world_size
from megaframe.errors import UserError
from megaframe.hardware.cluster import DEFAULT, Cluster, load_cluster
from megaframe.hardware.likely_cluster import find_cluster_for_device
from megaframe.io.run_files import CONFIG_FILE
from megaframe.layout import Layout, resolve_axis_sizes
from megaframe.model.model_chunk import list_model_specs
from megaframe.planner.advice import describe_decision
from megaframe.planner.candidates import SEARCHED_KEYS, SearchSpace
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.data_parallel_times import resolve_bucket_size
from megaframe.planner.island_advice import list_reasons
from megaframe.planner.layout_search import search
from megaframe.planner.parameter_counts import count_rank_parameters
from megaframe.planner.peak_memory import resolve_recompute_blocks
from megaframe.resilience.elastic import fit_layout
from megaframe.training.phases import decide_phases
from megaframe.training.run_length import decide_steps, has_undecided_length
from megaframe.validate.run import validate_config

_SIMULATED = 8
"""Layouts that the search simulates; more would delay the start of the run."""
UNDECIDED: Mapping[str, object] = {
    "model.vocab": None,
    KEY: "auto",
    "parallel.auto": True,
    "parallel.bucket_size": "auto",
    "train.recompute_blocks": "auto",
}
"""The value of each key that leaves it to `resolve_config`."""


def resolve_config(
    config: RunConfig, world: int, *, data: bool = True
) -> tuple[RunConfig, Layout, list[str]]:
    """Check a config and decide what it leaves to the run.

    Args:
        config: The run, as it was read.
        world: Number of ranks that were started. With `faults.elastic` the layout may use fewer.
        data: Whether the run has its tokenizer and token files here; a dry run need not.

    Returns:
        The config with a value for each key of `UNDECIDED` and for `train.steps`, the layout of its
        ranks, and lines that say what was decided. With `parallel.layers_per_stage=measured` what
        depends on the stages is left to `decide_stages`, which needs the ranks.

    Raises:
        UserError: The config has mistakes, or no value can be found for a key.
    """
    if data or config.model.vocab is None:
        config = config.replace(model={"vocab": find_vocab_size(config.model, config.data)})
    config, length = decide_steps(config, data=data)
    config, notes = choose_layout(config, world)
    notes = [*length, *notes]
    if config.faults.elastic:
        config, world = fit_layout(config, world)
    validate_config(config, world, data=data)
    config, products = choose_absorption(config)
    notes = [*notes, *products]
    if config.parallel.layers_per_stage != "measured":
        config, more = choose_by_stages(config, world)
        notes = [*notes, *more]
    return config, Layout.from_parallel(config.parallel, world), notes


def resolve_phases(
    config: RunConfig, world: int, *, data: bool = True
) -> list[tuple[RunConfig, Layout, list[str]]]:
    """Return what `resolve_config` does for each phase that a run has left (`data.phases`), or for
    the run if it has no phases, and check that all phases have the same parameters.

    Args:
        config: As for `resolve_config`.
        world: As for `resolve_config`.
        data: As for `resolve_config`.

    Raises:
        UserError: As `resolve_config`, with the name of the phase.
    """
    resolved = []
    for phase in decide_phases(config):
        try:
            resolved.append(resolve_config(phase, world, data=data))
        except UserError as error:
            if phase.data.phase is None:
                raise
            raise UserError(f"{name_phase(phase.data, phase.data.phase.number)}: {error}") from None
    _check_same_parameters([phase for phase, _, _ in resolved])
    return resolved


def _check_same_parameters(phases: Sequence[RunConfig]) -> None:
    """Raise `UserError` for a phase whose model has not the parameters of the first one."""
    keys = [key for key in list_phase_keys(phases[0].data) if key.startswith("model.")]
    if not keys:
        return
    first, *others = (
        {spec.name: spec.shape for spec in list_model_specs(phase.model, phase.train)}
        for phase in phases
    )
    for phase, shapes in zip(phases[1:], others, strict=True):
        for name in sorted(first.keys() | shapes.keys()):
            if first.get(name) != shapes.get(name) and phase.data.phase is not None:
                raise UserError(
                    f"{name_phase(phase.data, phase.data.phase.number)} has other parameters than "
                    f"the phases before: {name} has shape {shapes.get(name)} instead of "
                    f"{first.get(name)}; leave {', '.join(sorted(keys))} as they are where they "
                    "change parameters"
                )


def choose_by_stages(config: RunConfig, world: int) -> tuple[RunConfig, list[str]]:
    """Return the config with everything chosen that depends on the division into stages, and lines
    that say so. The config must have passed the checks for this number of ranks."""
    notes: list[str] = []
    for choose in (choose_bucket_size, choose_recomputed_blocks):
        config, more = choose(config, world)
        notes = [*notes, *more]
    return config, notes


def refuse_undecided(config: RunConfig) -> None:
    """Raise a `UserError` that names the keys which `resolve_config` has yet to decide, if any."""
    undecided = []
    for key, value in UNDECIDED.items():
        if _look_up(config, key) == value:
            undecided.append(f"{key}={json.dumps(value).strip(chr(34))}")
    if has_undecided_length(config.data, config.train):
        epochs = config.data.epochs
        undecided.append("data.phases" if epochs is None else f"data.epochs={epochs:g}")
    if undecided:
        raise UserError(
            f"{', '.join(undecided)}: not decided, but a trainer needs values; "
            "use the config that megaframe.training.auto_layout.resolve_config returns"
        )


def _look_up(config: RunConfig, key: str) -> object:
    """Return the value of a key; the name of its section if there is none."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name, name)
    return value


def choose_absorption(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the config with `model.indexer.absorb=auto` decided, and a line that says how if there
    is an indexer. The config must have passed the checks."""
    decided = decide_absorption(config)
    indexer = decided.model.indexer
    if decided == config or indexer is None:
        return config, []
    other = config.replace(
        model={"indexer": indexer.model_copy(update={"absorb": not indexer.absorb})}
    )
    obstacle = None if indexer.absorb else explain_obstacle(other.model, other.train)
    why = obstacle
    if obstacle is None:
        numbers = (count_multiplications(each.model, each.train.seq) for each in (decided, other))
        why = "{:,.0f} multiplications of attention per token in place of {:,.0f}".format(*numbers)
    return decided, [f"{KEY}=auto: {str(indexer.absorb).lower()}, {why}"]


def choose_layout(config: RunConfig, world: int) -> tuple[RunConfig, list[str]]:
    """Return the config with a layout chosen if `parallel.auto` is set, and lines that say what is
    known of the machine and explain the choice. Layout keys that the config sets are kept.

    Raises:
        UserError: If no layout fits, or if nothing is known of the speed of this machine's chip.
    """
    if not config.parallel.auto:
        return config, _describe_machine(config.run, config.parallel)
    saved = load_saved_config(config.run, config.checkpoint)
    if saved is not None and not resolve_axis_sizes(saved.parallel, world)[1]:
        layout = _select_layout_keys(config.parallel, saved.parallel, saved.train)
        note = f"parallel.auto: the layout that {config.run.dir} started with"
        return config.replace(**layout), [note, *_describe_machine(config.run, config.parallel)]
    cluster = find_cluster(config.parallel, config.run)
    set_keys = config.parallel.model_fields_set.intersection(SEARCHED_KEYS)
    values = {name: getattr(config.parallel, name) for name in set_keys}
    fixed = {name: value for name, value in values.items() if value is not None}
    family = get_cluster_constants(cluster)
    result = search(SearchSpace(config, world, cluster, fixed), family, simulated=_SIMULATED)
    best = result.best.config
    layout = _select_layout_keys(config.parallel, best.parallel, best.train)
    why = [*describe_decision(result, cluster), *list_reasons(result.best, cluster)]
    notes = [f"parallel.auto: {world} ranks on {cluster.name}. {why[0]}", *why[1:]]
    if saved is not None:
        notes.append(f"the layout that {config.run.dir} started with is not one for {world} ranks")
    return config.replace(**layout), notes


def choose_recomputed_blocks(config: RunConfig, world: int) -> tuple[RunConfig, list[str]]:
    """Return the config with the recomputed blocks chosen if `train.recompute_blocks=auto`, and a
    line that says how many. As few blocks are recomputed as memory allows. The layout must be known
    and the config must have passed `check`."""
    if config.train.recompute_blocks != "auto":
        return config, []
    cluster = find_cluster(config.parallel, config.run)
    layout = Layout.from_parallel(config.parallel, world)
    resolved = resolve_recompute_blocks(config, layout, cluster.chip)
    plans = plan_stages(resolved)
    recomputed, blocks = sum(p.recomputed for p in plans), sum(len(p.blocks) for p in plans)
    by_stage = ", ".join(str(plan.recomputed) for plan in plans)
    note = f"train.recompute_blocks=auto: {recomputed} of {blocks} blocks are recomputed"
    note += f" ({by_stage} by stage)" * (len(plans) > 1) + f", to fit {cluster.chip.name}"
    return resolved, [note]


def choose_bucket_size(config: RunConfig, world: int) -> tuple[RunConfig, list[str]]:
    """Return the config with `parallel.bucket_size=auto` decided, and a line that says so if blocks
    share buckets. The layout must be known and the config must have passed `check`."""
    layout = Layout.from_parallel(config.parallel, world)
    cluster = find_cluster(config.parallel, config.run)
    decided = resolve_bucket_size(config, layout, cluster)
    size = decided.parallel.bucket_size
    if size == config.parallel.bucket_size:
        return decided, []
    plans, ranks = plan_stages(decided), layout.island_data * layout.context
    by_stage = (
        count_rank_parameters(decided.model, decided.train, layout, [plan]).group_blocks(
            decided.parallel, [plan]
        )
        for plan in plans
    )
    groups = [*chain.from_iterable(by_stage)]
    if ranks == 1 or all(group.halves for group in groups):
        return decided, []
    blocks = sum(len(plan.blocks) for plan in plans)
    return decided, [
        f"parallel.bucket_size=auto: {size:,} elements, so that {blocks} blocks are in "
        f"{len(groups)} buckets, by the links of {cluster.name} between {ranks} data ranks"
    ]


def find_cluster(parallel: ParallelConfig, run: RunSection) -> Cluster:
    """Return the cluster that the config names, or else the likely one for its device, whose chip
    and memory are those of the device. `Cluster.notes` says what is only assumed."""
    if parallel.cluster is not None:
        return load_cluster(parallel.cluster)
    device, has_gpu = run.device, torch.cuda.is_available()
    if device == "cpu" or (device != "cuda" and not has_gpu):
        cpu = load_cluster("cpu")
        memory = read_host_memory() / read_local_world_size()
        return replace(cpu, chip=replace(cpu.chip, memory=memory))
    if not has_gpu:
        text = (
            "there is no GPU here that could be asked for its name and memory: cluster "
            f"{DEFAULT} is assumed; name another with parallel.cluster"
        )
        return replace(load_cluster(DEFAULT), notes=(text,))
    properties = torch.cuda.get_device_properties(0)
    name = torch.cuda.get_device_name(0)
    return find_cluster_for_device(name, properties.total_memory, properties.multi_processor_count)


def _describe_machine(run: RunSection, parallel: ParallelConfig) -> list[str]:
    """Return lines about the machine that no part of the config tells: which chip its GPUs are, or
    why a run with `auto` is on the CPU."""
    if parallel.cluster is not None:
        return []
    notes = list(find_cluster(parallel, run).notes)
    if run.device in ("auto", "shared") and not torch.cuda.is_available():
        hidden = explain_hidden_gpu()
        notes += [f"run.device={run.device} is the CPU: {hidden}"] if hidden else []
    return notes


def _select_layout_keys(
    asked: ParallelConfig, parallel: ParallelConfig, train: TrainConfig
) -> dict[str, dict[str, object]]:
    """Return the keys of a layout by section, for a config that leaves it open.

    Args:
        asked: The section of that config.
        parallel: The section of a config that has the layout.
        train: The section of the same.
    """
    names = [name for name in SEARCHED_KEYS if hasattr(parallel, name)]
    names += ["tensor_chunks", "schedule_microbatches", "layers_per_stage", "expert_overlap"]
    layout = {name: getattr(parallel, name) for name in names}
    if asked.layers_per_stage == "measured" and parallel.layers_per_stage is None:
        layout["layers_per_stage"] = "measured"
    keys = ("microbatch", "recompute", "recompute_blocks")
    of_train = {name: getattr(train, name) for name in keys}
    return {"parallel": {**layout, "auto": False}, "train": of_train}


def load_saved_config(run: RunSection, checkpoint: CheckpointConfig) -> RunConfig | None:
    """Return the config of the run to be resumed, or None if there is none that can be read."""
    folder = Path(run.dir)
    if checkpoint.resume is None or not (folder / CONFIG_FILE).exists():
        return None
    try:
        return load_from_run(folder)
    except UserError:
        return None  # written by another version; its checkpoints can be loaded at any layout
