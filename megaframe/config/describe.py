"""What `--explain` and `--help` print about keys, and the message about unknown options."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from megaframe.config.keys import (
    ConfigKey,
    drop_kind,
    get_config_keys,
    list_all_item_keys,
    list_item_keys,
    suggest_keys,
)
from megaframe.errors import UserError

WIDTH = 100
COMMON = (
    "run.dir",
    "model.layers",
    "model.hidden",
    "model.heads",
    "parallel.auto",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.zero",
    "train.steps",
    "train.seq",
    "train.global_batch",
    "train.microbatch",
    "train.precision",
    "train.eval_every",
    "optim.lr",
    "optim.warmup",
    "data.sources",
    "data.tokenizer",
    "checkpoint.every",
    "checkpoint.resume",
    "metrics.wandb",
)
"""The keys that people change, in the order of the schema: few enough for one screen."""


def describe_unknown_options(arguments: Sequence[str], options: Iterable[str]) -> str:
    """Return the message about options of a command line that do not exist.

    Args:
        arguments: These options as they were typed, perhaps with a value; the value is not
            repeated.
        options: Those that exist.
    """
    existing = [*options]
    lines: list[str] = []
    for option in (text.partition("=")[0] for text in arguments):
        name = option.lstrip("-").replace("-", "_")
        close = get_close_matches(option.replace("_", "-"), existing, 1, 0.8)
        if name in get_config_keys():
            lines.append(f"{option}: write {name}=VALUE")
        else:
            lines.append(
                f"{option}: {f'did you mean {close[0]}?' if close else suggest_keys(name)}"
            )
    plural = "s" if len(lines) > 1 else ""
    return "\n  ".join(
        [f"unknown option{plural}; keys are given without dashes: section.key=value", *lines]
    )


def explain(name: str) -> str:
    """Return what `--explain` prints for a key, or for each key of a section.

    If there is no such key, raises `UserError` with a suggestion.
    """
    key = get_config_keys().get(name)
    if key is None:
        items = [
            item
            for item in list_all_item_keys()
            if f"{drop_kind(item.name)}.".startswith(f"{name}.")
        ]
        if not items:
            raise UserError(f"{name} is not a config key; {suggest_keys(name)}")
        return "\n\n".join(map(_explain_key, items))
    if key.section:
        inner = [
            k for k in get_config_keys().values() if k.name.startswith(f"{name}.") and not k.section
        ]
        parts = [key.text] if key.text else []
        return "\n\n".join(["\n".join([name, *parts]), *(_explain_key(k) for k in inner)])
    return "\n\n".join(map(_explain_key, [key, *list_item_keys(key)]))


def _explain_key(key: ConfigKey) -> str:
    default = "Required." if key.field.is_required() else f"Default: {key.default}."
    lines = [key.text, f"Takes {key.allowed}.", default]
    wrapped = (textwrap.fill(line, WIDTH - 2, break_on_hyphens=False) for line in lines)
    return "\n".join([key.name, textwrap.indent("\n".join(wrapped), "  ")])


def describe_common_keys() -> str:
    """Return what `--help` prints about keys: those of `COMMON`, one line each."""
    chosen = [get_config_keys()[name] for name in COMMON]
    return "\n".join(
        head + textwrap.shorten(_take_first_sentence(key), WIDTH - len(head), placeholder=" ...")
        for head, key in zip(_align_heads(chosen), chosen, strict=True)
    )


def describe_all_keys() -> str:
    """Return what `--help all` prints about keys: all of them by section, each with its default,
    the first sentence of its documentation and the values that it takes."""
    blocks: dict[str, list[ConfigKey]] = {}
    for key in get_config_keys().values():
        blocks.setdefault(key.name.partition(".")[0], []).append(key)
    return "\n\n".join(_describe_section(*block) for block in blocks.values())


def _describe_section(section: ConfigKey, *inner: ConfigKey) -> str:
    """Return one section's part of the listing."""
    leaves = [key for key in inner if not key.section]
    lines = [f"{section.name}: {section.text}"]
    for head, key in zip(_align_heads(leaves), leaves, strict=True):
        text = f"{head}{_take_first_sentence(key)} Takes {key.allowed}."
        indent = " " * len(head)
        lines.append(textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(lines)


def _align_heads(leaves: Sequence[ConfigKey]) -> Iterator[str]:
    """Yield name and default of each key, in aligned columns."""
    name_width = max(len(key.name) for key in leaves) + 2
    default_width = max(len(key.default) for key in leaves) + 2
    for key in leaves:
        yield f"  {key.name:{name_width}}{key.default:{default_width}}"


def _take_first_sentence(key: ConfigKey) -> str:
    """Return the first sentence of a key's documentation."""
    return re.split(r"(?<=\.)\s", key.text, maxsplit=1)[0]
