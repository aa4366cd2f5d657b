"""Train a SentencePiece tokenizer on a corpus: `python tools/train_tokenizer.py --help`."""

from __future__ import annotations

import argparse
import os
import time

from megaframe.data.preprocessing.corpus_files import (
    add_reading_options,
    list_corpus_files,
    list_readings,
)
from megaframe.data.preprocessing.train_tokenizer import KINDS, train_sentencepiece
from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output

_EPILOG = """\
Inputs are read as by preprocess_data.py. The same files give the same model.

example: python tools/train_tokenizer.py --input wiki/*.jsonl.zst --vocab 32000 --output wiki
"""


def main() -> None:
    options = _parse_arguments()
    path = f"{options.output}.model"
    if os.path.exists(path) and not options.overwrite:
        raise UserError(f"{path} already exists; replace it with --overwrite")
    if options.vocab < 1 or options.megabytes <= 0:
        raise UserError(
            f"--vocab {options.vocab} and --megabytes {options.megabytes} must be above 0"
        )
    files, notes = list_corpus_files(list_readings(options, options.input))
    for note in notes:
        print(note)
    begin = time.monotonic()
    characters = train_sentencepiece(
        files, options.output, options.vocab, options.kind, options.megabytes
    )
    seconds = time.monotonic() - begin
    print(
        f"{path}: {options.vocab} pieces ({options.kind}) from {characters / 1e6:,.1f} million "
        f"characters in {seconds:.1f} s"
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a SentencePiece model on a corpus and write it to OUTPUT.model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files and folders")
    add("--vocab", type=int, required=True, help="number of pieces")
    add("--output", required=True, metavar="PREFIX", help="model file without its suffix")
    add("--kind", choices=KINDS, default="bpe", help="bpe trains faster, unigram encodes faster "
        "(default: bpe)")  # fmt: skip
    add("--megabytes", type=float, default=100.0, help="text to train on, taken from the files in "
        "turn (default: %(default)s million characters)")  # fmt: skip
    add_reading_options(parser)
    add("--overwrite", action="store_true", help="replace OUTPUT.model")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output(), report_errors():
        main()
