"""torchtitan: converts a job's TOML. Models there are named, and have no sizes in the file."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megaframe.errors import UserError
from megaframe.migration.conversion import (
    DECIDE,
    DIFFERS,
    Conversion,
    add_defaults,
    list_settings,
    make_defaults,
)

PROGRAM = "torchtitan"
_DEFAULTS = {
    "training": {"local_batch_size": 8, "seq_len": 2048, "steps": 10000},
    "optimizer": {"name": "AdamW", "lr": 8e-4},
    "lr_scheduler": {"warmup_steps": 200, "decay_type": "linear"},
    "metrics": {"log_freq": 10},
    "activation_checkpoint": {"mode": "selective"},
    "parallelism": {"data_parallel_shard_degree": -1, "fsdp_reshard_after_forward": "default"},
    "checkpoint": {"enable": False, "interval": 500, "keep_latest_k": 10},
    "validation": {"enable": False, "freq": 10},
    "job": {"dump_folder": "./outputs"},
}
"""Those whose values are others than ours, or are needed to convert other settings."""
_SCHEDULES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "GPipe": "gpipe",
    "InterleavedZeroBubble": "zb-h1",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
_TYPES = {"bfloat16": "bf16", "float32": "fp32"}
_RECIPES = {"tensorwise": "tensor", "rowwise": "row", "rowwise_with_gw_hp": "row"}
_VOCABULARIES = {"llama3": 128256}


def find_model_name(table: Mapping[str, Any]) -> str:
    """Return the name that a job's model may have as a shipped config: `llama3-8b`."""
    model = table.get("model")
    parts = [model.get("name"), model.get("flavor")] if isinstance(model, Mapping) else []
    name = "-".join(str(part) for part in parts if part).lower().replace("_", "-")
    return re.sub(r"^(deepseek-v\d).*", r"\1", name)


def migrate_torchtitan(
    table: Mapping[str, Any], model: Mapping[str, Any], world: int | None
) -> Conversion:
    """Convert a job.

    Args:
        table: The content of its TOML.
        model: Keys of `model` that the model of the job has; empty if they are not known.
        world: Number of ranks that train; None if it is not known.
    """
    settings = add_defaults(list_settings(table), make_defaults(_DEFAULTS))
    c = Conversion(PROGRAM, settings, world)
    name, flavor = c.read_text("model.name"), c.read_text("model.flavor")
    # Its models predict one token.
    own = {key: value for key, value in model.items() if key != "mtp_depth"}
    c.put_model(own, "model.name", "model.flavor")
    if not model:
        c.note(DECIDE, f"model: {name} {flavor} is none of the shipped configs; give its keys")
        c.said |= {"model.name", "model.flavor"}
    folder = c.read_text("model.hf_assets_path") or c.read_text("model.tokenizer_path")
    if folder:
        path = folder if folder.endswith(".json") else f"{folder.rstrip('/')}/tokenizer.json"
        c.put("data.tokenizer", f"hf:{path}", "model.hf_assets_path", "model.tokenizer_path")
    dataset = c.read_text("training.dataset_path") or c.read_text("training.dataset")
    c.note(DECIDE, f"training.dataset = {dataset}: data.sources are token files, which "
           "tools/preprocess_data.py makes of texts")  # fmt: skip
    c.said |= {"training.dataset", "training.dataset_path"}
    _convert_parallel(c)
    _convert_training(c)
    _convert_rates(c)
    _convert_files(c)
    c.convert_rest()
    return c


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        UserError: If it is none, or nothing here can read it.
    """
    try:
        module = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise UserError("TOML needs Python 3.11, or the package tomli: pip install tomli") from None
    try:
        table: dict[str, Any] = module.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not TOML: {error or 'nested too deep'}") from None
    return table


def _convert_parallel(c: Conversion) -> None:
    shard = c.read_number("parallelism.data_parallel_shard_degree")
    copies = c.read_integer("parallelism.data_parallel_replicate_degree") or 1
    if shard is not None and shard > 0:
        c.put("parallel.data", int(shard * copies), "parallelism.data_parallel_shard_degree")
    c.put("parallel.data_replicate", copies, "parallelism.data_parallel_replicate_degree")
    reshard = c.read_text("parallelism.fsdp_reshard_after_forward")
    pipelined = (c.read_integer("parallelism.pipeline_parallel_degree") or 1) > 1
    c.put("parallel.pipeline", c.read_integer("parallelism.pipeline_parallel_degree"),
          "parallelism.pipeline_parallel_degree")  # fmt: skip
    whole = reshard == "never" or (reshard == "default" and pipelined)
    c.put("parallel.zero", 0 if shard == 1 else 2 if whole else 3,
          "parallelism.data_parallel_shard_degree", "parallelism.fsdp_reshard_after_forward",
          why="FSDP")  # fmt: skip
    schedule = c.read_text("parallelism.pipeline_parallel_schedule")
    if pipelined and schedule:
        ours = _SCHEDULES.get(schedule, schedule)
        c.put("parallel.schedule", ours, "parallelism.pipeline_parallel_schedule")
        if ours in ("interleaved", "zb-v", "dualpipe-v"):
            c.put("parallel.chunks", 2, why="two stages of each rank")
    else:
        c.drop("parallelism.pipeline_parallel_schedule")
    if pipelined and schedule == "InterleavedZeroBubble":
        c.note(DIFFERS, "InterleavedZeroBubble: zb-h1 has one stage on each rank")
    csv = c.read_text("parallelism.pipeline_parallel_schedule_csv")
    if csv:
        c.note(DECIDE, f"pipeline_parallel_schedule_csv = {csv}: parallel.schedule=file:PATH")
    if c.read_text("parallelism.context_parallel_rotate_method"):
        c.put("parallel.context_kind", "ring", "parallelism.context_parallel_rotate_method")


def _convert_training(c: Conversion) -> None:
    local = c.read_integer("training.local_batch_size") or 1
    batch = c.read_number("training.global_batch_size") or -1
    axes = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")
    sizes = [c.read_integer(f"parallelism.{axis}") or 1 for axis in axes]
    for key, axis, size in zip(("tensor", "context", "pipeline"), axes, sizes, strict=True):
        c.put(f"parallel.{key}", size, f"parallelism.{axis}")
    ranks = c.get_value("parallel.data")
    if ranks is None and c.world:
        ranks = max(1, c.world // (sizes[0] * sizes[1] * sizes[2]))
    if batch > 0:
        c.put("train.global_batch", batch, "training.global_batch_size")
    else:
        c.put("train.global_batch", local * (ranks or 1), "training.local_batch_size",
              why=f"of {ranks or 1} data ranks")  # fmt: skip
        if ranks is None:
            c.note(DECIDE, "train.global_batch: is of one data rank; give their number by --gpus")
    if sizes[2] > 1:
        size = c.read_integer("parallelism.pipeline_parallel_microbatch_size") or 1
        c.put("train.microbatch", size, "parallelism.pipeline_parallel_microbatch_size",
              why="of the pipeline")  # fmt: skip
    else:
        c.put("train.microbatch", local, "training.local_batch_size")
        c.drop("parallelism.pipeline_parallel_microbatch_size")
    dtype = c.read_text("training.mixed_precision_param") or "bfloat16"
    c.put("train.precision", _TYPES.get(dtype, dtype), "training.mixed_precision_param")
    c.drop("training.mixed_precision_reduce", "training.dtype")
    mode = c.read_text("activation_checkpoint.mode")
    if mode == "memory_budget":
        c.put("train.recompute_blocks", "auto", "activation_checkpoint.mode")
    else:
        c.put("train.recompute", mode, "activation_checkpoint.mode")
    if c.read_switch("compile.enable"):
        c.put("train.compile", "inductor", "compile.enable")
    c.drop("compile.components", "compile.backend")
    recipe = c.read_text("quantize.linear.float8.recipe_name") or "tensorwise"
    if any("float8" in value for value in c.read_values("model.converters") or ()):
        c.put("train.fp8", _RECIPES.get(recipe, recipe), "model.converters",
              "quantize.linear.float8.recipe_name")  # fmt: skip
    c.drop("quantize.linear.float8.recipe_name")


def _convert_rates(c: Conversion) -> None:
    name = c.read_text("optimizer.name") or "AdamW"
    c.put("optim.name", "adamw" if name in ("Adam", "AdamW") else name.lower(), "optimizer.name")
    if name == "Adam":
        c.note(DIFFERS, "optimizer.name = Adam: weight decay is decoupled here, as in AdamW")
    kind = c.read_text("lr_scheduler.decay_type") or "linear"
    share = c.read_number("lr_scheduler.decay_ratio")
    steps = c.read_integer("training.steps")
    c.put("train.steps", steps, "training.steps")
    warmup = c.read_number("lr_scheduler.warmup_steps") or 0
    if kind == "sqrt":
        c.note(DECIDE, "lr_scheduler.decay_type = sqrt: optim.schedule is cosine, linear or wsd")
    elif share is not None and steps and round(share * steps) < steps - warmup:
        c.put("optim.schedule", "wsd", "lr_scheduler.decay_ratio")
        c.put("optim.decay", max(1, round(share * steps)), "lr_scheduler.decay_ratio",
              why=f"of {steps} steps")  # fmt: skip
        if kind != "linear":
            c.note(DIFFERS, f"lr_scheduler.decay_type = {kind}: optim.schedule=wsd is linear")
    else:  # what decays begins when warm-up ends
        c.put("optim.schedule", kind, "lr_scheduler.decay_type", "lr_scheduler.decay_ratio")
    rate, factor = c.read_number("optimizer.lr"), c.read_number("lr_scheduler.min_lr_factor")
    c.put("optim.lr", rate, "optimizer.lr")
    if rate and factor:
        c.put("optim.min_lr", float(f"{rate * factor:.6g}"), "lr_scheduler.min_lr_factor",
              why=f"of {rate:g}")  # fmt: skip


def _convert_files(c: Conversion) -> None:
    if c.read_switch("checkpoint.enable"):
        c.put("checkpoint.every", c.read_integer("checkpoint.interval"), "checkpoint.interval",
              "checkpoint.enable")  # fmt: skip
        c.put("checkpoint.keep", c.read_integer("checkpoint.keep_latest_k"),
              "checkpoint.keep_latest_k")  # fmt: skip
        c.put("checkpoint.resume", "latest", "checkpoint.enable")
        base = c.read_text("job.dump_folder") or "."
        folder = c.read_text("checkpoint.folder")
        c.put("checkpoint.folder", folder and f"{base.rstrip('/')}/{folder}", "checkpoint.folder")
    else:
        c.put("checkpoint.every", 0, "checkpoint.enable")
    source = c.read_text("checkpoint.initial_load_path")
    if source:
        c.note(DECIDE, f"checkpoint.initial_load_path = {source}: tools/checkpoint.py imports it, "
               "for checkpoint.weights")  # fmt: skip
    c.drop("checkpoint.interval", "checkpoint.keep_latest_k", "checkpoint.folder")
    c.drop("checkpoint.initial_load_model_only")
    c.put("run.dir", c.read_text("job.dump_folder"), "job.dump_folder")
    if c.read_switch("metrics.enable_wandb"):
        c.put("metrics.wandb", "torchtitan", "metrics.enable_wandb", why="the name of the project")
    if c.read_switch("profiling.enable_profiling"):
        every = c.read_integer("profiling.profile_freq") or 10
        c.put("metrics.profile", [every], "profiling.enable_profiling", "profiling.profile_freq")
    c.drop("profiling.profile_freq")
    if c.read_switch("validation.enable"):
        c.put("train.eval_every", c.read_integer("validation.freq"), "validation.freq",
              "validation.enable")  # fmt: skip
        steps = c.read_number("validation.steps")
        if steps is not None and steps > 0:
            batch = c.read_integer("validation.local_batch_size") or 8
            c.put("train.eval_samples", int(steps * batch), "validation.steps",
                  why=f"of {batch} samples of one rank")  # fmt: skip
    c.drop("validation.freq", "validation.steps", "validation.local_batch_size",
               "validation.seq_len", "validation.dataset", "validation.dataset_path")  # fmt: skip
    for name in ("train_timeout_seconds", "init_timeout_seconds"):
        c.put("parallel.timeout", c.read_number(f"comm.{name}"), f"comm.{name}")
