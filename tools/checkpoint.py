"""Inspect, verify, compare and convert checkpoints, without a GPU.

python tools/checkpoint.py inspect runs/demo/checkpoints
python tools/checkpoint.py verify runs/demo/checkpoints/step-00000300
python tools/checkpoint.py diff runs/a/checkpoints runs/b/checkpoints
python tools/checkpoint.py reshard runs/demo/checkpoints --to elsewhere --files 4
python tools/checkpoint.py export-hf runs/demo/checkpoints --to demo-hf --family llama
python tools/checkpoint.py export-peft runs/adapters --to demo-peft --family llama
python tools/checkpoint.py import-hf demo-hf --to runs/imported/checkpoints
python tools/checkpoint.py export-dcp runs/demo/checkpoints --to demo-dcp
python tools/checkpoint.py import-dcp demo-dcp --to runs/back/checkpoints
python tools/checkpoint.py average runs/a/checkpoints runs/b/checkpoints --to runs/ab
python tools/checkpoint.py select-layers runs/demo/checkpoints --layers 0-3,2-5 --to runs/deep
python tools/checkpoint.py grow-vocabulary runs/demo/checkpoints --vocab 50304 --to runs/more
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megaframe.checkpoint import (
    ACCEPTED_PATHS,
    Checkpoint,
    StorePath,
    list_latest_checkpoints,
    locate_checkpoint,
    open_checkpoint,
    parse_path,
)
from megaframe.checkpoint.inspect import compare_checkpoints, describe_folder, find_damage
from megaframe.checkpoint.merged_adapters import describe_rounding, open_model
from megaframe.checkpoint.reshard import reshard_checkpoint
from megaframe.checkpoint.starting_weights import StartingWeights
from megaframe.config import RunConfig
from megaframe.config import load as load_config
from megaframe.errors import UserError, report_errors
from megaframe.extensions import add_extension_option, load_named_extensions, load_with_extensions
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.untrusted import sanitize_text

EXIT_DIFFERENT = 1
"""Exit status if something is damaged, or two checkpoints differ."""
_STATE = "optimizer."


def main() -> None:
    """Run the subcommand."""
    arguments = _parse_arguments()
    with report_errors():
        load_named_extensions(arguments.extension)
        sys.exit(arguments.run(arguments))


def inspect(arguments: argparse.Namespace) -> int:
    """Show what a checkpoint contains."""
    with open_checkpoint(locate_checkpoint(arguments.path, "path")) as checkpoint:
        tensors = checkpoint.tensors.values()
        files = {piece.file for tensor in tensors for piece in tensor.slices}
        print(f"{checkpoint.path}: step {checkpoint.step}, {len(files)} files")
        for line in describe_folder(checkpoint.path.parent):
            print(line)
        _print(_make_summary_table(checkpoint))
        if arguments.tensors:
            _print(_make_tensor_table(checkpoint))
    return 0


def _make_summary_table(checkpoint: Checkpoint) -> Table:
    kinds: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, tensor in checkpoint.tensors.items():
        kind = "weights"
        if name.startswith(_STATE):
            kind = f"optimizer {name.removeprefix(_STATE).partition('/')[0]}"
        for column, amount in enumerate(
            (1, math.prod(tensor.shape), tensor.count_bytes(tensor.shape))
        ):
            kinds[kind][column] += amount
    table = Table(box=None)
    for title in ("", "tensors", "elements", "GB"):
        table.add_column(title, justify="left" if not title else "right")
    for kind, (tensors, elements, size) in kinds.items():
        table.add_row(sanitize_text(kind), f"{tensors:,}", f"{elements:,}", f"{size / 1e9:,.3f}")
    config: Any = checkpoint.state.get("config")
    for section in ("model", "parallel"):
        values = config.get(section) if isinstance(config, dict) else None
        if isinstance(values, dict):
            shown = ", ".join(f"{key}={value}" for key, value in values.items() if value)
            table.caption = f"{table.caption or ''}{section}: {sanitize_text(shown)}\n"
    return table


def _make_tensor_table(checkpoint: Checkpoint) -> Table:
    table = Table(box=None)
    for title in ("tensor", "shape", "type", "slices"):
        table.add_column(title, no_wrap=True)
    for name, tensor in checkpoint.tensors.items():
        sizes = str(list(tensor.shape)), tensor.dtype, str(len(tensor.slices))
        table.add_row(sanitize_text(name), *sizes)
    return table


def verify(arguments: argparse.Namespace) -> int:
    """Read everything, and list every file and tensor that is damaged. If the latest checkpoint of
    a folder is, its newest whole one is named, too."""
    checkpoints = list_latest_checkpoints(arguments.path, "path")
    problems = [checkpoints.lost] if checkpoints.lost else []
    print("".join(f"{problem}\n" for problem in problems), end="")
    for path in checkpoints.paths:
        damage = list(find_damage(path))
        if not damage:
            _print_whole(path)
            break
        print("\n  ".join([f"{path} is damaged:", *damage]))
        problems += damage
    else:
        print("no checkpoint is whole")
    return EXIT_DIFFERENT if problems else 0


def _print_whole(path: StorePath) -> None:
    with open_checkpoint(path) as checkpoint:
        slices = sum(len(tensor.slices) for tensor in checkpoint.tensors.values())
        tensors = len(checkpoint.tensors)
        print(f"{path}: step {checkpoint.step}, {tensors} tensors in {slices} slices are whole")


def diff(arguments: argparse.Namespace) -> int:
    """Compare all tensors of two checkpoints, which may have been written by different layouts."""
    table = Table(box=None)
    for title in ("tensor", "largest distance", "relative to largest"):
        table.add_column(title, no_wrap=True, justify="left" if title == "tensor" else "right")
    num_different = num_same = 0
    first_path, second_path = (
        locate_checkpoint(arguments.path, "path"),
        locate_checkpoint(arguments.other, "other"),
    )
    with open_checkpoint(first_path) as first, open_checkpoint(second_path) as second:
        for difference in compare_checkpoints(first, second):
            relative = (
                difference.distance / difference.largest
                if difference.largest
                else difference.distance
            )
            if difference.problem is None and relative <= arguments.tolerance:
                num_same += 1
                continue
            num_different += 1
            if difference.problem is not None:
                table.add_row(difference.name, difference.problem, "")
            else:
                table.add_row(difference.name, f"{difference.distance:.3g}", f"{relative:.3g}")
    if num_different:
        _print(table)
    print(f"{num_different} tensors differ, {num_same} are the same within {arguments.tolerance:g}")
    return EXIT_DIFFERENT if num_different else 0


def reshard(arguments: argparse.Namespace) -> int:
    """Write a checkpoint again with another number of files."""
    if arguments.files < 1:
        raise UserError(f"--files={arguments.files}: use 1 or more")
    with open_checkpoint(locate_checkpoint(arguments.path, "path")) as checkpoint:
        print(f"wrote {reshard_checkpoint(checkpoint, parse_path(arguments.to), arguments.files)}")
    return 0


def export_hf(arguments: argparse.Namespace) -> int:
    """Write the weights, and the tokenizer, as a folder that Hugging Face transformers loads."""
    from megaframe.checkpoint.convert.huggingface.model_folder import export_model

    path = locate_checkpoint(arguments.path, "path")
    with open_model(path) as checkpoint:
        notes = export_model(
            checkpoint, Path(arguments.to), arguments.dtype, arguments.tokenizer, arguments.family
        )
    with open_checkpoint(path) as checkpoint:
        notes += describe_rounding(checkpoint)
    print(f"wrote {arguments.to}")
    for note in notes:
        print(f"note: {note}")
    return 0


def export_peft(arguments: argparse.Namespace) -> int:
    """Write the adapters of a checkpoint as a folder that peft loads onto the exported base."""
    from megaframe.checkpoint.convert.huggingface.adapter_export import export_adapters

    with open_checkpoint(locate_checkpoint(arguments.path, "path")) as checkpoint:
        folder, options = Path(arguments.to), (arguments.dtype, arguments.family, arguments.base)
        export_adapters(checkpoint, folder, *options)
        notes = [*describe_rounding(checkpoint)]
    print(f"wrote {folder}")
    for note in notes:
        print(f"note: {note}")
    return 0


def import_hf(arguments: argparse.Namespace) -> int:
    """Write a model in the folder format of Hugging Face as a checkpoint of step 0."""
    from megaframe.checkpoint.convert.huggingface.model_folder import import_model

    return _print_written(import_model(Path(arguments.path), parse_path(arguments.to)))


def average(arguments: argparse.Namespace) -> int:
    """Write the average of the weights of checkpoints, as a checkpoint of step 0."""
    from megaframe.checkpoint.surgery import average_checkpoints

    with ExitStack() as opened:
        checkpoints = [
            opened.enter_context(open_model(locate_checkpoint(path, "path")))
            for path in (arguments.path, *arguments.others)
        ]
        return _print_written(
            average_checkpoints(
                checkpoints, parse_path(arguments.to), arguments.weights, ema=arguments.ema
            )
        )


def select_layers(arguments: argparse.Namespace) -> int:
    """Write a model of some layers of another, in any order and number, as a checkpoint of
    step 0."""
    from megaframe.checkpoint.surgery import select_layers

    layers = list(_read_ranges(arguments.layers))
    with open_model(locate_checkpoint(arguments.path, "path")) as checkpoint:
        return _print_written(select_layers(checkpoint, parse_path(arguments.to), layers))


def grow_vocabulary(arguments: argparse.Namespace) -> int:
    """Write a model with more words, whose rows are the mean of the others, as a checkpoint of
    step 0."""
    from megaframe.checkpoint.surgery import grow_vocabulary

    with open_model(locate_checkpoint(arguments.path, "path")) as checkpoint:
        return _print_written(
            grow_vocabulary(checkpoint, parse_path(arguments.to), arguments.vocab)
        )


def _read_ranges(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as 0-3,2,5.

    Raises:
        UserError: It is no such list.
    """
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None:
            raise UserError(f"--layers={text}: give layers and ranges of them, such as 0-3,2,5")
        yield from range(int(match[1]), int(match[2] or match[1]) + 1)


def _print_written(weights: StartingWeights) -> int:
    print(f"wrote {weights.checkpoint}")
    if weights.config_file is not None:
        print(f"wrote {weights.config_file}; train on with")
        print(f"  pretrain_gpt.py --config {weights.config_file} data.sources=[PATH]")
    for note in weights.notes:
        print(f"note: {note}")
    return 0


def export_dcp(arguments: argparse.Namespace) -> int:
    """Write all tensors, and the state of the run, as a folder of torch.distributed.checkpoint."""
    from megaframe.checkpoint.convert import dcp

    with open_checkpoint(locate_checkpoint(arguments.path, "path")) as checkpoint:
        dcp.export_checkpoint(checkpoint, Path(arguments.to))
    print(f"wrote {arguments.to}")
    return 0


def import_dcp(arguments: argparse.Namespace) -> int:
    """Write a folder of torch.distributed.checkpoint as a checkpoint; tensors keep their names."""
    from megaframe.checkpoint.convert import dcp

    config = _load_own_config(arguments)
    result = dcp.import_checkpoint(Path(arguments.path), parse_path(arguments.to), config)
    print(f"wrote {result.path}")
    if result.left_out:
        more = f" and {len(result.left_out) - 5} more" if len(result.left_out) > 5 else ""
        print(f"left out, not floating-point numbers: {', '.join(result.left_out[:5])}{more}")
    if not result.has_state:
        print(
            "the folder has no run state; give --config for a checkpoint that runs can start from"
        )
    return 0


def _load_own_config(arguments: argparse.Namespace) -> RunConfig | None:
    """Return what `--config` names, with its extensions, unless the command line names some."""
    if not arguments.config:
        return None
    load = load_config if arguments.extension else load_with_extensions
    return load(arguments.config)


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


_FOLDERS = {import_hf: "a model's folder", import_dcp: "a folder of torch.distributed.checkpoint"}
"""Help for the argument of commands that do not read a checkpoint."""


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run in (
        inspect, verify, diff, reshard, export_hf, export_peft, import_hf, export_dcp, import_dcp,
        average, select_layers, grow_vocabulary,
    ):  # fmt: skip
        assert run.__doc__ is not None
        name = run.__name__.replace("_", "-")
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run, extension=[])
        add_extension_option(command)
        command.add_argument("path", help=_FOLDERS.get(run, ACCEPTED_PATHS))
        if run is inspect:
            command.add_argument("--tensors", action="store_true", help="list all tensors")
        if run is diff:
            command.add_argument("other", help="the checkpoint to compare with")
            command.add_argument(
                "--tolerance",
                type=float,
                default=0.0,
                help="tolerance, relative to a tensor's largest element",
            )
        if run is reshard:
            command.add_argument("--files", type=int, required=True, help="number of files")
        if run is average:
            command.add_argument("others", nargs="*", help="further checkpoints of this model")
            command.add_argument(
                "--weights",
                type=float,
                nargs="+",
                help="how much each checkpoint counts; default: all alike",
            )
            command.add_argument(
                "--ema", action="store_true", help="of the averages that optim.ema keeps"
            )
        if run is select_layers:
            command.add_argument(
                "--layers", required=True, help="layers of the old model, such as 0-3,2-5"
            )
        if run is grow_vocabulary:
            command.add_argument("--vocab", type=int, required=True, help="size of the vocabulary")
        if run in (reshard, import_hf, import_dcp, average, select_layers, grow_vocabulary):
            command.add_argument(
                "--to", required=True, help="folder for the new checkpoint; path or URL"
            )
        if run in (export_hf, export_peft, export_dcp):
            command.add_argument("--to", required=True, help="the folder to write")
        if run is import_dcp:
            command.add_argument(
                "--config", metavar="FILE", help="YAML of the run whose weights they are"
            )
        if run in (export_hf, export_peft):
            command.add_argument(
                "--family",
                metavar="MODEL_TYPE",
                help="family of transformers to write; default: model.family of the run",
            )
            command.add_argument(
                "--dtype",
                choices=("fp64", "fp32", "bf16", "fp16"),
                help="type of the weights; default: the precision of the run",
            )
        if run is export_peft:
            command.add_argument(
                "--base", help="folder or name of the exported base, noted for whoever loads it"
            )
        if run is export_hf:
            command.add_argument(
                "--tokenizer",
                help="KIND:PATH, bytes or none; default: the tokenizer of the run, if its file is "
                "in the run folder",
            )
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
