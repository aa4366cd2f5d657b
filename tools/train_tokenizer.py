"""Train a tokenizer on a corpus: `python tools/train_tokenizer.py --help`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from megaframe.data.preprocessing.corpus_files import (
    add_reading_options,
    list_corpus_files,
    list_readings,
)
from megaframe.data.preprocessing.train_tokenizer import (
    KINDS,
    ControlTokens,
    train_byte_bpe,
    train_sentencepiece,
)
from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output

_EPILOG = """\
Inputs are read as by preprocess_data.py. The same files give the same model.

examples:
  python tools/train_tokenizer.py --input wiki/*.jsonl.zst --vocab 32000 --output wiki
  python tools/train_tokenizer.py --input wiki.jsonl --vocab 32000 --output wiki --kind byte-bpe \
      --control "<|im_start|>,<|im_end|>" --answer-end "<|im_end|>" --template chatml.jinja
"""


def main() -> None:
    options = _parse_arguments()
    is_folder = options.kind == "byte-bpe"
    path = f"{options.output}/tokenizer.json" if is_folder else f"{options.output}.model"
    if os.path.exists(path) and not options.overwrite:
        raise UserError(f"{path} already exists; replace it with --overwrite")
    if options.vocab < 1 or options.megabytes <= 0:
        raise UserError(
            f"--vocab {options.vocab} and --megabytes {options.megabytes} must be above 0"
        )
    if not is_folder and (options.control or options.answer_end or options.template):
        raise UserError("--control, --answer-end and --template belong to --kind byte-bpe")
    files, notes = list_corpus_files(list_readings(options, options.input))
    for note in notes:
        print(note)
    begin = time.monotonic()
    if is_folder:
        characters = train_byte_bpe(
            files, options.output, options.vocab, options.megabytes, read_control_tokens(options)
        )
    else:
        characters = train_sentencepiece(
            files, options.output, options.vocab, options.kind, options.megabytes
        )
    seconds = time.monotonic() - begin
    print(
        f"{path}: {options.vocab} pieces ({options.kind}) from {characters / 1e6:,.1f} million "
        f"characters in {seconds:.1f} s"
    )


def read_control_tokens(options: argparse.Namespace) -> ControlTokens:
    """Return the control tokens that a command line asks for."""
    template = ""
    if options.template:
        try:
            template = Path(options.template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--template {options.template}: {error}") from None
    others = [name for name in options.control.split(",") if name]
    return ControlTokens(others=others, answer_end=options.answer_end, template=template)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a SentencePiece model on a corpus and write it to OUTPUT.model, or a "
        "byte-level BPE of Hugging Face's tokenizers, and write it to the folder OUTPUT.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files and folders")
    add("--vocab", type=int, required=True, help="number of pieces")
    add("--output", required=True, metavar="PREFIX", help="model file without its suffix; for "
        "byte-bpe a folder")  # fmt: skip
    add("--kind", choices=KINDS, default="bpe", help="bpe trains faster, unigram encodes faster; "
        "byte-bpe is a tokenizer.json, with control tokens for chats (default: bpe)")  # fmt: skip
    add("--control", default="", metavar="NAME,NAME", help="byte-bpe: tokens that no text "
        "contains, beside <|endoftext|>, such as <|im_start|>,<|im_end|>")  # fmt: skip
    add("--answer-end", default="", metavar="NAME", help="byte-bpe: the one that ends an answer of "
        "a chat")  # fmt: skip
    add("--template", metavar="FILE", help="byte-bpe: chat template that lies beside it")
    add("--megabytes", type=float, default=100.0, help="text to train on, taken from the files in "
        "turn (default: %(default)s million characters)")  # fmt: skip
    add_reading_options(parser)
    add("--overwrite", action="store_true", help="replace OUTPUT.model")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output(), report_errors():
        main()
