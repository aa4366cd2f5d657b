"""Evaluate a checkpoint on held-out text, and on tasks of lm-evaluation-harness.

python tools/evaluate.py --checkpoint runs/demo/checkpoints --text held-out.jsonl
python tools/evaluate.py --checkpoint runs/demo/checkpoints --split validation
python tools/evaluate.py --checkpoint runs/demo/checkpoints --tasks mine --include my-tasks/
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from megaframe.checkpoint import ACCEPTED_PATHS
from megaframe.data.preprocessing.corpus_files import add_reading_options, list_readings
from megaframe.data.split_advice import SPLITS
from megaframe.data.token_file_record import TokenizerRecord, record_tokenizer
from megaframe.data.tokenizer import Tokenizer, import_library
from megaframe.data.training_shares import divide_for_evaluation
from megaframe.errors import UserError, report_errors
from megaframe.extensions import add_extension_option, load_named_extensions
from megaframe.inference.chat import find_chat_format
from megaframe.inference.evaluation import Score, read_sequence, read_split, score
from megaframe.inference.generation import load_run_tokenizer, load_stage, read_run_tokenizer
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.progress import Progress
from megaframe.pipeline_parallel.stage import Stage

_EPILOG = """\
A text is a file or folder as for preprocess_data.py, or a token file, PREFIX.bin, of which all
but the first token count. Bits per byte need a tokenizer, and compare models of different ones.

Tasks come from the YAML files under --include, or from the harness; their data must be on this
machine. A task file can name Python code to run: only run task files from sources you trust.
"""


def main() -> None:
    """Load the model, score the texts and tasks, and print the results."""
    arguments = _parse_arguments()
    with report_errors():
        if not (arguments.text or arguments.split or arguments.tasks):
            raise UserError(
                "nothing to evaluate on; give --text FILE, --split NAME or --tasks NAME"
            )
        if arguments.data_split and not arguments.split:
            raise UserError("--data-split divides what --split names; give --split as well")
        if arguments.tasks:
            import_library("lm_eval", "evaluate")
        load_named_extensions(arguments.extension)
        stage = load_stage(
            arguments.checkpoint,
            ema=arguments.ema,
            precision=arguments.precision,
            device=arguments.device,
        )
        record = read_run_tokenizer(arguments.checkpoint)
        context = arguments.context or stage.config.train.seq
        results: dict[str, Any] = {}
        if arguments.text or arguments.split:
            results["text"] = _on_texts(arguments, stage, context, record)
        if arguments.tasks:
            results["tasks"] = _on_tasks(arguments, stage, context, record)
        if arguments.json:
            print(json.dumps(results, default=str))


def _on_texts(
    arguments: argparse.Namespace, stage: Stage, context: int, record: TokenizerRecord | None
) -> dict[str, Any]:
    """Score each file and each source of the split, and if there are several, all together. Return
    the numbers by name."""
    config = stage.config
    named = arguments.tokenizer or config.data.tokenizer
    tokenizer: Tokenizer | None = None
    if named:
        tokenizer = load_run_tokenizer(config.data, config.model, named, record)
        record = record_tokenizer(named, tokenizer)
    total, shown = Score(), {}
    files = (
        (given.path, read_sequence(given, tokenizer, config.data, record))
        for given in list_readings(arguments, arguments.text, "--text")
    )
    split = arguments.split
    if arguments.data_split:
        data = divide_for_evaluation(config.data, tuple(arguments.data_split))
        config = config.model_copy(update={"data": data})
    sources = (
        read_split(config.model, config.train, config.data, split, tokenizer, record)
        if split
        else ()
    )
    for name, passage in chain(files, sources):
        with Progress(name) as progress:
            (text_score,) = score(
                stage,
                [passage],
                context=context,
                stride=context if arguments.stride is None else arguments.stride,
                batch=arguments.batch,
                data=config.data,
                report=progress.report,
            )
        total += text_score
        shown[name] = _to_json(text_score)
        if not arguments.json:
            print(_format_line(name, text_score))
    if shown and not total.tokens:
        names = ", ".join(shown)
        raise UserError(f"{names}: data.mask_eod of the run leaves no token that counts")
    if len(shown) > 1:
        shown["all"] = _to_json(total)
        if not arguments.json:
            print(_format_line("all", total))
    return shown


def _on_tasks(
    arguments: argparse.Namespace, stage: Stage, context: int, record: TokenizerRecord | None
) -> dict[str, Any]:
    # The harness imports a package `evaluate`, which this file must not shadow.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != folder]
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        os.environ.setdefault(name, "1")  # must be set before the libraries are imported
    from megaframe.inference.lm_eval import LocalModel, TaskOptions, evaluate_tasks

    data, names = stage.config.data, arguments.tasks.split(",")
    tasks = TaskOptions(names, arguments.include, arguments.shots, arguments.limit)
    tokenizer = load_run_tokenizer(data, stage.config.model, arguments.tokenizer, record)
    named = arguments.tokenizer or data.tokenizer
    chat = find_chat_format(named, tokenizer) if arguments.chat else None
    results = evaluate_tasks(LocalModel(stage, context, arguments.batch), tokenizer, tasks, chat)
    if not arguments.json:
        for task, metrics in results.items():
            for name, value in metrics.items():
                if isinstance(value, float):
                    print(f"{task}  {name.removesuffix(',none')}  {value:.4f}")
    return results


def _to_json(score: Score) -> dict[str, Any]:
    return {
        "tokens": score.tokens,
        "loss": score.loss if score.tokens else None,
        "perplexity": score.perplexity if score.tokens else None,
        "bits_per_byte": score.bits_per_byte,
    }


def _format_line(name: str, score: Score) -> str:
    if not score.tokens:
        return f"{name}  tokens 0  loss n/a  (data.mask_eod of the run masks all)"
    line = f"{name}  tokens {score.tokens:,}  loss {score.loss:.4f}"
    line += f"  perplexity {score.perplexity:.4g}"
    bits = score.bits_per_byte
    return line if bits is None else f"{line}  bits per byte {bits:.4f}"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Evaluate a checkpoint on held-out text and on tasks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_extension_option(parser)
    add("--checkpoint", required=True, help=ACCEPTED_PATHS)
    add("--text", nargs="+", default=(), metavar="PATH", help="held-out text, or token files")
    add("--split", choices=SPLITS[1:], help="the run's own documents of this part of data.split")
    add(
        "--data-split",
        type=float,
        nargs=3,
        metavar=("TRAIN", "VALIDATION", "TEST"),
        help="for --split: shares in place of data.split; the first is at least that of the run",
    )
    add(
        "--context", type=_parse_positive, help="tokens of a window (default: train.seq of the run)"
    )
    add("--stride", type=_parse_positive, help="new tokens that each window scores, 1 to the "
        "context (default: the context); fewer have more context and cost more")  # fmt: skip
    add(
        "--precision",
        choices=("fp32", "bf16", "fp64"),
        help="of matrix products (default: the run's)",
    )
    add("--batch", type=_parse_positive, default=8, help="windows at a time (default: %(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu; cuda is untested")
    add("--ema", action="store_true", help="use the average of the weights (optim.ema)")
    add("--tokenizer", help="KIND:PATH; default: the tokenizer of the run")
    add_reading_options(parser, "--text")
    add("--tasks", metavar="NAME,NAME", help="tasks of lm-evaluation-harness")
    add("--include", metavar="FOLDER", help="YAML files of tasks, in place of the harness's own")
    add("--shots", type=int, help="examples before each question (default: as the task says)")
    add("--limit", type=_parse_positive, help="questions of each task (default: all)")
    add("--chat", action="store_true", help="ask each question of a task as a user of a chat does")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def _parse_positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few; use 1 or more")
    return number


if __name__ == "__main__":
    with allow_closed_output():
        main()
