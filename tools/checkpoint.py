"""Inspect, verify, compare and convert checkpoints, without a GPU.

python tools/checkpoint.py inspect runs/demo/checkpoints
python tools/checkpoint.py verify runs/demo/checkpoints/step-00000300
python tools/checkpoint.py diff runs/a/checkpoints runs/b/checkpoints
python tools/checkpoint.py reshard runs/demo/checkpoints --to elsewhere --files 4
python tools/checkpoint.py export-hf runs/demo/checkpoints --to demo-hf --tokenizer KIND:PATH
python tools/checkpoint.py import-hf demo-hf --to runs/imported/checkpoints
python tools/checkpoint.py export-dcp runs/demo/checkpoints --to demo-dcp
python tools/checkpoint.py import-dcp demo-dcp --to runs/back/checkpoints
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megaframe.checkpoint import (
    ACCEPTED_PATHS,
    Checkpoint,
    locate_checkpoint,
    open_checkpoint,
    parse_path,
)
from megaframe.checkpoint.inspect import compare_checkpoints, find_damage
from megaframe.checkpoint.reshard import reshard_checkpoint
from megaframe.config import load as load_config
from megaframe.errors import UserError, report_errors
from megaframe.io.untrusted import sanitize_text

EXIT_DIFFERENT = 1
"""Exit status if something is damaged, or two checkpoints differ."""
_STATE = "optimizer."


def main() -> None:
    """Run the subcommand."""
    given = _arguments()
    with report_errors():
        sys.exit(given.run(given))


def inspect(given: argparse.Namespace) -> int:
    """Show what a checkpoint contains."""
    with open_checkpoint(locate_checkpoint(given.path, "path")) as checkpoint:
        tensors = checkpoint.tensors.values()
        files = {piece.file for tensor in tensors for piece in tensor.slices}
        print(f"{checkpoint.path}: step {checkpoint.step}, {len(files)} files")
        _print(_summary(checkpoint))
        if given.tensors:
            _print(_tensors(checkpoint))
    return 0


def _summary(checkpoint: Checkpoint) -> Table:
    kinds: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, tensor in checkpoint.tensors.items():
        kind = "weights"
        if name.startswith(_STATE):
            kind = f"optimizer {name.removeprefix(_STATE).partition('/')[0]}"
        for column, more in enumerate((1, math.prod(tensor.shape), tensor.bytes_of(tensor.shape))):
            kinds[kind][column] += more
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


def _tensors(checkpoint: Checkpoint) -> Table:
    table = Table(box=None)
    for title in ("tensor", "shape", "type", "slices"):
        table.add_column(title, no_wrap=True)
    for name, tensor in checkpoint.tensors.items():
        sizes = str(list(tensor.shape)), tensor.dtype, str(len(tensor.slices))
        table.add_row(sanitize_text(name), *sizes)
    return table


def verify(given: argparse.Namespace) -> int:
    """Read everything, and list every file and tensor that is damaged."""
    path = locate_checkpoint(given.path, "path")
    whole = True
    for problem in find_damage(path):
        whole = False
        print(problem)
    if not whole:
        return EXIT_DIFFERENT
    with open_checkpoint(path) as checkpoint:
        slices = sum(len(tensor.slices) for tensor in checkpoint.tensors.values())
        tensors = len(checkpoint.tensors)
        print(f"{path}: step {checkpoint.step}, {tensors} tensors in {slices} slices are whole")
    return 0


def diff(given: argparse.Namespace) -> int:
    """Compare all tensors of two checkpoints, which may have been written by different layouts."""
    table = Table(box=None)
    for title in ("tensor", "largest distance", "relative to largest"):
        table.add_column(title, no_wrap=True, justify="left" if title == "tensor" else "right")
    different = same = 0
    one_path, other_path = (
        locate_checkpoint(given.path, "path"),
        locate_checkpoint(given.other, "other"),
    )
    with open_checkpoint(one_path) as one, open_checkpoint(other_path) as other:
        for found in compare_checkpoints(one, other):
            relative = found.distance / found.largest if found.largest else found.distance
            if found.what is None and relative <= given.tolerance:
                same += 1
                continue
            different += 1
            if found.what is not None:
                table.add_row(found.name, found.what, "")
            else:
                table.add_row(found.name, f"{found.distance:.3g}", f"{relative:.3g}")
    if different:
        _print(table)
    print(f"{different} tensors differ, {same} are the same within {given.tolerance:g}")
    return EXIT_DIFFERENT if different else 0


def reshard(given: argparse.Namespace) -> int:
    """Write a checkpoint again with another number of files."""
    if given.files < 1:
        raise UserError(f"--files={given.files}: use 1 or more")
    with open_checkpoint(locate_checkpoint(given.path, "path")) as checkpoint:
        print(f"wrote {reshard_checkpoint(checkpoint, parse_path(given.to), given.files)}")
    return 0


def export_hf(given: argparse.Namespace) -> int:
    """Write the weights, and the tokenizer, as a folder that Hugging Face transformers loads."""
    from megaframe.checkpoint.convert.huggingface.model_folder import export_model

    with open_checkpoint(locate_checkpoint(given.path, "path")) as checkpoint:
        notes = export_model(checkpoint, Path(given.to), given.dtype, given.tokenizer)
    print(f"wrote {given.to}")
    for note in notes:
        print(f"note: {note}")
    return 0


def import_hf(given: argparse.Namespace) -> int:
    """Write a model in the folder format of Hugging Face as a checkpoint of step 0."""
    from megaframe.checkpoint.convert.huggingface.model_folder import import_model

    print(f"wrote {import_model(Path(given.path), parse_path(given.to))}")
    return 0


def export_dcp(given: argparse.Namespace) -> int:
    """Write all tensors, and the state of the run, as a folder of torch.distributed.checkpoint."""
    from megaframe.checkpoint.convert import dcp

    with open_checkpoint(locate_checkpoint(given.path, "path")) as checkpoint:
        dcp.export_checkpoint(checkpoint, Path(given.to))
    print(f"wrote {given.to}")
    return 0


def import_dcp(given: argparse.Namespace) -> int:
    """Write a folder of torch.distributed.checkpoint as a checkpoint; tensors keep their names."""
    from megaframe.checkpoint.convert import dcp

    config = load_config(given.config) if given.config else None
    done = dcp.import_checkpoint(Path(given.path), parse_path(given.to), config)
    print(f"wrote {done.path}")
    if done.left_out:
        more = f" and {len(done.left_out) - 5} more" if len(done.left_out) > 5 else ""
        print(f"left out, not floating-point numbers: {', '.join(done.left_out[:5])}{more}")
    if not done.has_state:
        print(
            "the folder has no run state; give --config for a checkpoint that runs can start from"
        )
    return 0


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


_FOLDERS = {import_hf: "a model's folder", import_dcp: "a folder of torch.distributed.checkpoint"}
"""Help for the argument of commands that do not read a checkpoint."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run in (
        inspect, verify, diff, reshard, export_hf, import_hf, export_dcp, import_dcp,
    ):  # fmt: skip
        assert run.__doc__ is not None
        name = run.__name__.replace("_", "-")
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
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
        if run in (reshard, import_hf, import_dcp):
            command.add_argument(
                "--to", required=True, help="folder for the new checkpoint; path or URL"
            )
        if run in (export_hf, export_dcp):
            command.add_argument("--to", required=True, help="the folder to write")
        if run is import_dcp:
            command.add_argument(
                "--config", metavar="FILE", help="YAML of the run whose weights they are"
            )
        if run is export_hf:
            command.add_argument(
                "--dtype",
                choices=("fp64", "fp32", "bf16", "fp16"),
                help="type of the weights; default: the precision of the run",
            )
            command.add_argument(
                "--tokenizer",
                help="KIND:PATH, bytes or none; default: the tokenizer of the run, if its file is "
                "in the run folder",
            )
    return parser.parse_args()


if __name__ == "__main__":
    main()
