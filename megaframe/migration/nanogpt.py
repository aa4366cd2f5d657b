"""nanoGPT: reads a config file, which is Python, without running it, and converts it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from megaframe.errors import UserError
from megaframe.migration.conversion import (
    DECIDE,
    DIFFERS,
    Conversion,
    Setting,
    add_defaults,
    list_settings,
    make_defaults,
)
from megaframe.migration.literals import UnknownValueError, compute, parse_python
from megaframe.migration.shell_script import mark_unknown

PROGRAM = "nanoGPT"
_DEFAULTS = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "block_size": 1024,
    "batch_size": 12,
    "gradient_accumulation_steps": 40,
    "learning_rate": 6e-4,
    "min_lr": 6e-5,
    "max_iters": 600000,
    "lr_decay_iters": 600000,
    "warmup_iters": 2000,
    "decay_lr": True,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "dropout": 0.0,
    "eval_interval": 2000,
    "eval_iters": 200,
    "log_interval": 1,
    "always_save_checkpoint": True,
    "init_from": "scratch",
    "out_dir": "out",
    "dataset": "openwebtext",
}
"""Those of its train.py."""
_SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_WORDS = 50257


def migrate_nanogpt(text: str) -> Conversion:
    """Convert a config file of nanoGPT, or the settings at the top of its train.py.

    Args:
        text: The file.

    Raises:
        UserError: If it is not Python.
    """
    try:
        tree = parse_python(text, "exec")
    except ValueError as error:
        raise UserError(f"it is not Python: {error}") from None
    c = Conversion(PROGRAM, add_defaults(_list_assignments(tree), make_defaults(_DEFAULTS)))
    _convert_model(c)
    _convert_training(c)
    c.convert_rest()
    return c


def _list_assignments(tree: ast.Module) -> Iterator[Setting]:
    """Yield what is assigned to names, up to where train.py reads other files."""
    values: dict[str, Any] = {}

    def look_up(name: str) -> Any:
        if name not in values:
            raise UnknownValueError
        return values[name]

    for statement in tree.body:
        called = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(called, ast.Call) and ast.unparse(called.func)[:5] == "exec":
            return
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or value is None:
            continue
        for target in targets:
            if not isinstance(target, ast.Name):
                continue
            values.pop(target.id, None)
            try:
                values[target.id] = compute(value, look_up)
                yield from list_settings({target.id: values[target.id]})
            except UnknownValueError:
                yield Setting(target.id, (mark_unknown("?"),), f"{target.id} = an expression")


def _convert_model(c: Conversion) -> None:
    start = c.read_text("init_from") or "scratch"
    if start in _SIZES:
        for key, size in zip(("layers", "heads", "hidden"), _SIZES[start], strict=True):
            c.put(f"model.{key}", size, "init_from")
        c.put("model.bias", True, "init_from")
        c.drop("n_layer", "n_head", "n_embd", "bias")
        c.note(DECIDE, f"init_from = {start}: import it (tools/checkpoint.py import-hf), and name "
               "it by checkpoint.weights")  # fmt: skip
    elif start == "resume":
        c.put("checkpoint.resume", "latest", "init_from")
    elif start != "scratch":
        c.note(DECIDE, f"init_from = {start}: checkpoint.resume or checkpoint.weights")
    c.put("model.activation", "gelu", why="as its model has it")
    c.put("model.position", "learned", why="as its model has it")
    c.put("model.tie_embeddings", True, why="as its model has it")
    dataset = c.read_text("dataset") or ""
    if dataset.endswith("_char"):
        c.note(DECIDE, "model.vocab: the characters of the text; data.tokenizer=bytes has 257")
    else:
        c.put("model.vocab", _WORDS, why="GPT-2's")
    c.said |= {"init_from", "dataset"}
    c.note(DECIDE, f"dataset = {dataset}: data.sources are token files, which "
           "tools/preprocess_data.py makes of text; train.bin has no index")  # fmt: skip


def _convert_training(c: Conversion) -> None:
    batch = c.read_integer("batch_size") or 1
    c.put("train.microbatch", batch, "batch_size")
    accumulated = c.read_integer("gradient_accumulation_steps") or 1
    c.put("train.global_batch", batch * accumulated, "gradient_accumulation_steps", "batch_size",
          why="over all ranks")  # fmt: skip
    if c.read_switch("decay_lr"):
        c.put("optim.schedule", "cosine", "decay_lr")
        c.put("optim.warmup", c.read_number("warmup_iters"), "warmup_iters")
        c.put("optim.min_lr", c.read_number("min_lr"), "min_lr")
        c.put("optim.decay", c.read_integer("lr_decay_iters"), "lr_decay_iters")
    else:
        c.put("optim.schedule", "constant", "decay_lr")
        c.drop("warmup_iters", "min_lr", "lr_decay_iters")
    dtype = c.read_text("dtype")
    c.put("train.precision", dtype and _PRECISIONS.get(dtype, dtype), "dtype")
    device = c.read_text("device")
    if device and not device.startswith("cuda"):
        c.put("run.device", device, "device")
    every, count = c.read_integer("eval_interval"), c.read_integer("eval_iters")
    c.put("train.eval_every", every, "eval_interval")
    c.put("train.eval_samples", count and count * batch, "eval_iters", why=f"of {batch} samples")
    c.put("checkpoint.every", every, "eval_interval", "always_save_checkpoint",
          why="it saves after evaluations")  # fmt: skip
    c.drop("device")
    if not c.read_switch("always_save_checkpoint"):
        c.put("checkpoint.keep_best", 1, "always_save_checkpoint")
        c.note(DIFFERS, "always_save_checkpoint = false: the best checkpoint is kept beside the "
               "newest")  # fmt: skip
    if c.read_switch("wandb_log"):
        project = c.read_text("wandb_project") or "owt"
        c.put("metrics.wandb", project, "wandb_log", "wandb_project")
    else:
        c.drop("wandb_log", "wandb_project")
