"""Tokenize a corpus into a token file: `python tools/preprocess_data.py --help`."""

from __future__ import annotations

import argparse
import os
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megaframe.config.data import DataConfig, DataSourceConfig, StreamingConfig
from megaframe.data.preprocessing.corpus_files import (
    add_reading_options,
    list_corpus_files,
    list_readings,
)
from megaframe.data.preprocessing.journal import CorpusCounts
from megaframe.data.preprocessing.preprocess import PreprocessJob, PreprocessResult, preprocess
from megaframe.data.streaming.corpus import find_corpus
from megaframe.data.streaming.prepare_blocks import prepare_blocks
from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.untrusted import make_integer_parser

_EPILOG = """\
Inputs are jsonl (.jsonl .json .ndjson), .csv and .tsv whose first row names the columns, plain
text (.txt .text), each also as .gz or .zst, and .parquet. A folder stands for all such files below
it, in the order of their paths; with --format, for all files. A plain text file is one document, or
one per paragraph with --split-blank-lines.
URLs such as s3://, gs://, https:// and hf:// are read as they are.
A run that was interrupted continues when the same command is given again.
With --blocks OUTPUT is a folder that data.sources may name in place of the input, which has the
same samples as the input when it is tokenised while a run trains.

example: python tools/preprocess_data.py --input wiki/*.jsonl.zst \\
             --tokenizer sentencepiece:wiki.model --output data/wiki
"""


def main() -> None:
    options = _parse_arguments()
    if options.workers < 1:
        raise UserError(f"--workers {options.workers} is too few; use 1 or more")
    if options.blocks:
        _prepare_blocks(options)
        return
    files, notes = list_corpus_files(list_readings(options, options.input))
    for note in notes:
        print(note)
    job = PreprocessJob(
        tuple(files), options.tokenizer, options.output, not options.no_eod, options.deduplicate
    )
    begin = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("tokenizing", total=None)

        def report(done: CorpusCounts, disk_bytes: int) -> None:
            shown = f"tokenizing {done.documents:,} documents, {done.tokens:,} tokens"
            progress.update(task, description=shown, total=disk_bytes, completed=done.disk_bytes)

        result = preprocess(job, options.workers, options.overwrite, report)
    print(_format_summary(job, result, time.monotonic() - begin))


def _prepare_blocks(options: argparse.Namespace) -> None:
    if len(options.input) > 1 or options.no_eod or options.overwrite or options.deduplicate:
        raise UserError(
            "--blocks takes one --input, and none of --no-eod, --overwrite and --deduplicate: the "
            "blocks are those that a run makes of the text"
        )
    reading = list_readings(options, options.input)[0].reading
    source = DataSourceConfig(
        path=options.input[0],
        key=reading.key,
        format=reading.format,
        split_blank_lines=reading.split_blank_lines,
        where=reading.where,
    )
    streaming = StreamingConfig(
        shuffle_bytes=options.shuffle_bytes, skip_broken=reading.skip_broken
    )
    data = DataConfig(tokenizer=options.tokenizer, streaming=streaming)
    corpus = find_corpus(source, data)
    if corpus.kind != "text":
        raise UserError(f"{corpus.root} has tokens, and --blocks takes text")
    done = prepare_blocks(corpus, options.output, options.workers)
    filtered = f"; {done.filtered:,} rows left out by --where" if done.filtered else ""
    broken = f"; {done.broken:,} broken rows left out" if done.broken else ""
    print(
        f"{options.output}: {done.documents:,} documents, {done.tokens:,} tokens from "
        f"{done.size / 1e6:,.1f} MB in {len(corpus.list_shards())} shards{filtered}{broken}"
    )


def _format_summary(job: PreprocessJob, result: PreprocessResult, seconds: float) -> str:
    total, resumed = result.total, result.resumed
    megabytes = (total.size - resumed.size) / 1e6
    line = (
        f"{job.output}: {total.documents:,} documents, {total.tokens:,} tokens from "
        f"{total.size / 1e6:,.1f} MB; {megabytes:,.1f} MB in {seconds:.1f} s, "
        f"{megabytes / seconds:.1f} MB/s"
    )
    if resumed.documents:
        line += f"; {resumed.documents:,} documents were done by an earlier run"
    if total.empty:
        line += f"; {total.empty:,} empty documents left out"
    if total.duplicates:
        line += f"; {total.duplicates:,} duplicates left out"
    if total.filtered:
        line += f"; {total.filtered:,} rows left out by --where"
    if total.broken:
        line += f"; {total.broken:,} broken rows left out"
        line += "".join(f"\n  {named}" for named in result.broken)
    return line


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokenize a corpus into OUTPUT.bin and OUTPUT.idx, Megatron's token file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files and folders, in the "
        "order of documents")  # fmt: skip
    add("--tokenizer", required=True, metavar="KIND:PATH", help="sentencepiece:, hf:, tiktoken: "
        "and a path, or just bytes")  # fmt: skip
    add("--output", required=True, metavar="PREFIX", help="token file without its suffix")
    add("--workers", type=int, default=_count_cores(), help="processes (default: %(default)s)")
    add_reading_options(parser)
    add("--blocks", action="store_true", help="write a folder of blocks")
    add("--shuffle-bytes", type=make_integer_parser(1 << 16, 1 << 40), default=64 << 20,
        metavar="BYTES", help="text of a block (default: %(default)s)")  # fmt: skip
    add("--no-eod", action="store_true", help="do not end documents with the tokenizer's EOD")
    add("--deduplicate", action="store_true", help="keep only the first of documents with the same "
        "tokens; takes up to 72 bytes of memory for each")  # fmt: skip
    add("--overwrite", action="store_true", help="replace OUTPUT and another unfinished run of it")
    return parser.parse_args()


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    with allow_closed_output():
        try:
            with report_errors():
                main()
        except KeyboardInterrupt:
            print("interrupted; give the same command again to continue", file=sys.stderr)
            sys.exit(130)
