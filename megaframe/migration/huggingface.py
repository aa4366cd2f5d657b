"""Hugging Face: converts TrainingArguments, as JSON or YAML have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaframe.config.settings_elsewhere import SETTINGS_ELSEWHERE
from megaframe.migration.conversion import (
    DECIDE,
    DIFFERS,
    REFUSED,
    Conversion,
    add_defaults,
    list_settings,
    make_defaults,
)

PROGRAM = "Hugging Face"
_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
    "logging_steps": 500,
    "save_strategy": "steps",
    "save_steps": 500,
    "seed": 42,
    "optim": "adamw_torch",
}
"""Those whose values are others than ours, or are needed to convert other settings."""
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
_EPOCHS = 3


def migrate_huggingface(
    arguments: Mapping[str, Any], model: Mapping[str, Any], world: int | None
) -> Conversion:
    """Convert TrainingArguments.

    Args:
        arguments: The content of their file.
        model: Keys of `model` that a config.json stands for; empty without one.
        world: Number of ranks that train; None if it is not known.
    """
    settings = add_defaults(list_settings(arguments), make_defaults(_DEFAULTS))
    c = Conversion(PROGRAM, settings, world)
    c.put_model(model, why="config.json")
    if not model:
        c.note(DECIDE, "model: give its config.json by --model, or the keys of a file of configs")
    c.note(DECIDE, "data.sources: make token files of the texts by tools/preprocess_data.py")
    _convert_length(c)
    if not any(SETTINGS_ELSEWHERE[PROGRAM].get(name) == "train.seq" for name in c.settings):
        c.note(DECIDE, "train.seq: tokens of a sample")
    _convert_rates(c)
    _convert_precision(c)
    _convert_files(c)
    c.convert_rest()
    return c


def _convert_length(c: Conversion) -> None:
    micro = c.read_integer("per_device_train_batch_size") or 1
    accumulated = c.read_integer("gradient_accumulation_steps") or 1
    c.put("train.microbatch", micro, "per_device_train_batch_size")
    c.put("train.global_batch", micro * accumulated * (c.world or 1),
          "per_device_train_batch_size", "gradient_accumulation_steps",
          why=f"on {c.world or 1} GPUs")  # fmt: skip
    if c.world is None:
        c.note(DECIDE, "train.global_batch: is of one GPU; give their number by --gpus")
    steps = c.read_number("max_steps")
    if steps is not None and steps > 0:
        c.put("train.steps", steps, "max_steps")
        c.drop("num_train_epochs")
    else:
        epochs = c.read_number("num_train_epochs")
        c.put("data.epochs", epochs or _EPOCHS, "num_train_epochs",
              why="" if epochs else "its default")  # fmt: skip


def _convert_rates(c: Conversion) -> None:
    steps = c.get_value("train.steps")
    kind = c.read_text("lr_scheduler_type") or "linear"
    c.put("optim.schedule", _SCHEDULES.get(kind, kind), "lr_scheduler_type")
    warmup, share = c.read_number("warmup_steps"), c.read_number("warmup_ratio")
    if warmup is not None and 0 < warmup < 1:
        warmup, share = None, warmup
    if kind == "constant":
        c.drop("warmup_steps", "warmup_ratio")
        return
    c.put("optim.warmup", warmup, "warmup_steps")
    if share and not warmup and steps:
        c.put("optim.warmup", round(share * steps), "warmup_ratio", why=f"of {steps} steps")
    elif share and not warmup:
        c.note(DECIDE, f"{share:g} of the steps are warm-up: optim.warmup, in steps")
    rate = c.read_number("learning_rate")
    c.put("optim.lr", rate, "learning_rate")
    lowest = c.read_number("lr_scheduler_kwargs.min_lr")
    part = c.read_number("lr_scheduler_kwargs.min_lr_rate")
    c.put("optim.min_lr", lowest, "lr_scheduler_kwargs.min_lr")
    if part and rate:
        c.put("optim.min_lr", float(f"{part * rate:.6g}"), "lr_scheduler_kwargs.min_lr_rate")
    if kind == "warmup_stable_decay":
        decay = c.read_integer("lr_scheduler_kwargs.num_decay_steps")
        c.put("optim.decay", decay, "lr_scheduler_kwargs.num_decay_steps")
        c.drop("lr_scheduler_kwargs.num_stable_steps")


def _convert_precision(c: Conversion) -> None:
    if c.read_switch("bf16"):
        c.put("train.precision", "bf16", "bf16")
    elif c.read_switch("fp16"):
        c.put("train.precision", "fp16", "fp16")
    else:
        c.put("train.precision", "fp32", why="fp32, without bf16 or fp16")
    c.drop("bf16", "fp16")
    name = c.read_text("optim") or "adamw_torch"
    if name.startswith("adamw"):
        c.put("optim.name", "adamw", "optim")
        if "8bit" in name or "bnb" in name:
            c.put("optim.state", "int8", "optim")
    elif name in ("sgd", "lion_32bit", "lion"):
        c.put("optim.name", name.partition("_")[0], "optim")
    else:
        c.note(REFUSED, f"optim = {name}: optim.name is adamw, muon, lion or sgd")


def _convert_files(c: Conversion) -> None:
    if (c.read_text("logging_strategy") or "steps") != "steps":
        c.drop("logging_steps")
    strategy = c.read_text("eval_strategy") or c.read_text("evaluation_strategy") or "no"
    every = c.read_number("eval_steps") or c.read_number("logging_steps")
    if strategy == "steps":
        c.put("train.eval_every", every, "eval_steps", "eval_strategy", "evaluation_strategy")
        c.note(DIFFERS, "evaluations are of train.eval_samples samples of the validation split, "
               "not of all of it")  # fmt: skip
    elif strategy != "no":
        c.note(DECIDE, f"eval_strategy = {strategy}: train.eval_every, in steps")
    c.drop("per_device_eval_batch_size")
    saves = c.read_text("save_strategy") or "steps"
    interval = c.read_number("save_steps")
    if saves == "steps":
        c.put("checkpoint.every", interval, "save_steps")
    elif saves == "no":
        c.put("checkpoint.every", 0, "save_strategy")
    else:
        c.note(DECIDE, f"save_strategy = {saves}: checkpoint.every, in steps")
    resumed = c.read_text("resume_from_checkpoint")
    if resumed and resumed.lower() == "true":
        c.put("checkpoint.resume", "latest", "resume_from_checkpoint")
    elif resumed and resumed.lower() != "false":
        c.note(DECIDE, f"resume_from_checkpoint = {resumed}: its weights are imported by "
               "tools/checkpoint.py import-hf, for checkpoint.weights")  # fmt: skip
    kinds = c.read_values("report_to") or ()
    if {"tensorboard", "all"} & {*kinds}:
        c.put("metrics.tensorboard", True, "report_to")
    if {"wandb", "all"} & {*kinds}:
        c.put("metrics.wandb", "megaframe", "report_to", why="the name of the project")
    c.drop("logging_dir")
