"""Tokenize chats into a token file and a weight file: `python tools/preprocess_chat.py --help`."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from megaframe.errors import report_errors
from megaframe.inference.chat_files import ChatCounts, ChatJob, preprocess_chats
from megaframe.io.closed_output import allow_closed_output

_EPILOG = """\
Inputs have an object of JSON on each line, and may end in .gz or .zst: {"messages": [{"role":
"user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "tools": ...}, which the chat
template beside the tokenizer turns into text, or {"text": ..., "spans": [[first, end], ...]} with
the characters that count. Only what an assistant says is learnt; "weight": 0 in one of its messages
leaves that out, too.

example: python tools/preprocess_chat.py --input chats.jsonl \\
             --tokenizer hf:model/tokenizer.json --output data/chats
"""


def main() -> None:
    options = _parse_arguments()
    job = ChatJob(
        options.input,
        options.tokenizer,
        options.output,
        options.weighted,
        options.skip_broken,
        options.template,
    )
    columns = TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("tokenizing", total=None)

        def report(done: ChatCounts) -> None:
            shown = f"tokenizing {done.documents:,} chats, {done.tokens:,} tokens"
            progress.update(task, description=shown)

        counts = preprocess_chats(job, options.overwrite, report)
    for problem in counts.problems:
        print(f"left out: {problem}")
    line = (
        f"{job.output}: {counts.documents:,} chats, {counts.tokens:,} tokens, of which "
        f"{counts.counted:,} count ({counts.counted / counts.tokens:.1%})"
    )
    print(line + f"; {counts.broken:,} rows were left out" * bool(counts.broken))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokenize chats into OUTPUT.bin, OUTPUT.idx and the same of OUTPUT.weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files of chats")
    add("--tokenizer", required=True, metavar="hf:PATH", help="a tokenizer.json, with a chat "
        "template beside it")  # fmt: skip
    add("--output", required=True, metavar="PREFIX", help="token file without its suffix")
    add("--template", metavar="FILE", help="chat template, in place of that beside the tokenizer")
    add("--weighted", action="store_true", help="take weights other than 0 and 1")
    add("--skip-broken", action="store_true", help="leave out rows that cannot be used")
    add("--overwrite", action="store_true", help="replace the files if they are there")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output(), report_errors():
        main()
