"""Convert the settings of another trainer into a config: `python tools/migrate.py --help`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaframe.config.load import load
from megaframe.config.shipped import find_shipped_config
from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.untrusted import make_integer_parser, parse_json, parse_yaml, read_file
from megaframe.migration.config_text import format_config
from megaframe.migration.conversion import DECIDE, REFUSED, UNKNOWN, Conversion
from megaframe.migration.huggingface import migrate_huggingface
from megaframe.migration.megatron import migrate_megatron
from megaframe.migration.nanogpt import migrate_nanogpt
from megaframe.migration.torchtitan import find_model_name, migrate_torchtitan, parse_toml

_MOST_BYTES = 256_000
"""A file of settings has some thousand."""
_EPILOG = """\
FILE is what you train with there, and is read, never run: a shell script with Megatron-LM's flags,
torchtitan's TOML, a nanoGPT config in Python, or TrainingArguments as JSON or YAML. The config goes
to standard output. Its comments say where each key comes from, what is left to decide, and what has
no counterpart.

example: python tools/migrate.py megatron train_gpt.sh DATA_PATH=/data/wiki > config.yaml
         python pretrain_gpt.py --config config.yaml --dry-run --gpus 8
"""


def main() -> None:
    """Print the config."""
    options = _parse_arguments()
    path = Path(options.file)
    try:
        conversion = _MIGRATE[options.program](_read_text(path), options)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if re.fullmatch(r"[\w.-]{1,80}", path.stem) and conversion.get_value("run.dir") is None:
        conversion.put("run.dir", f"runs/{path.stem}", why="the name of the file")
    conversion.validate()
    print(format_config(conversion, path.name), end="")
    counts = {kind: len(conversion.notes[kind]) for kind in (REFUSED, DECIDE, UNKNOWN)}
    said = [f"{kind.lower()}: {count}" for kind, count in counts.items() if count]
    count = f"{len(conversion.keys)} keys"
    print("; ".join([count, *said, "the comments say more"]), file=sys.stderr)


def _read_text(path: Path) -> str:
    try:
        data = read_file(path, _MOST_BYTES)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("is not text in UTF-8") from None
    if "\0" in text:
        raise UserError("is not text: it has a NUL")
    return text


def _migrate_megatron(text: str, options: argparse.Namespace) -> Conversion:
    given = {}
    for word in options.given:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            raise UserError(f"{word!r} is not of the form NAME=VALUE, a variable of the script")
        given[name] = value
    return migrate_megatron(text, given, options.gpus)


def _migrate_nanogpt(text: str, options: argparse.Namespace) -> Conversion:
    return migrate_nanogpt(text)


def _migrate_torchtitan(text: str, options: argparse.Namespace) -> Conversion:
    table = parse_toml(text)
    name = find_model_name(table)
    model = _list_model_keys(load(name).model) if find_shipped_config(name) else {}
    return migrate_torchtitan(table, model, options.gpus)


def _migrate_huggingface(text: str, options: argparse.Namespace) -> Conversion:
    arguments = _parse_mapping(text, options.file)
    model: dict[str, Any] = {}
    if options.model is not None:
        from megaframe.checkpoint.convert.huggingface.families import get_family
        from megaframe.checkpoint.convert.huggingface.read_files import read_json

        config = read_json(Path(options.model))
        model = _list_model_keys(get_family(config.get("model_type")).read_model(config))
    return migrate_huggingface(arguments, model, options.gpus)


def _list_model_keys(model: Any) -> dict[str, Any]:
    keys: dict[str, Any] = model.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return keys


def _parse_mapping(text: str, name: str) -> Mapping[str, Any]:
    kind, parse = ("JSON", parse_json) if name.endswith(".json") else ("YAML", parse_yaml)
    try:
        content = parse(text.encode())
    except ValueError as error:
        raise UserError(f"it is not {kind}: {error}") from None
    if not isinstance(content, dict):
        raise UserError("it has no settings: name: value")
    return content


_MIGRATE: Mapping[str, Callable[[str, argparse.Namespace], Conversion]] = {
    "megatron": _migrate_megatron,
    "torchtitan": _migrate_torchtitan,
    "nanogpt": _migrate_nanogpt,
    "hf": _migrate_huggingface,
}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Convert the settings of another trainer into a config of megaframe.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("program", choices=[*_MIGRATE], help="the other trainer; hf: TrainingArguments")
    add("file", metavar="FILE", help="its file of settings")
    add("given", nargs="*", metavar="NAME=VALUE", help="megatron: variables that the script takes "
        "from elsewhere, or has otherwise; $1 is 1=VALUE")  # fmt: skip
    add("--model", metavar="FILE", help="hf: the model's config.json")
    add("--gpus", type=make_integer_parser(1, 10**7), metavar="N", help="number of GPUs, where a "
        "batch follows from it and the file does not say")  # fmt: skip
    options = parser.parse_args()
    if options.given and options.program != "megatron":
        parser.error(f"NAME=VALUE is for megatron, whose files have variables: {options.given[0]}")
    if options.model and options.program != "hf":
        parser.error("--model is for hf; elsewhere the file has the model")
    return options


if __name__ == "__main__":
    with allow_closed_output(), report_errors():
        main()
