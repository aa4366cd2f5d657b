"""Sample text from a checkpoint.

python tools/generate.py --checkpoint runs/demo/checkpoints --prompt "def main("
python tools/generate.py --checkpoint runs/demo/checkpoints --prompts questions.txt --batch 32
python tools/generate.py --checkpoint runs/tuned/checkpoints --chat --prompt "What is a tuple?"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from megaframe.checkpoint import ACCEPTED_PATHS
from megaframe.errors import UserError, report_errors
from megaframe.extensions import add_extension_option, load_named_extensions
from megaframe.inference.chat import Message
from megaframe.inference.generation import SamplingOptions, StreamedText, add_sampling_options
from megaframe.inference.library import load_model
from megaframe.inference.model import Model
from megaframe.inference.prompts import read_prompts
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.progress import Progress

_LARGEST_SEED = 2**63 - 1


def main() -> None:
    """Load the model, sample from it, and print the text as it is sampled."""
    arguments = _parse_arguments()
    with report_errors():
        check(arguments)
        prompts = list_prompts(arguments)
        if arguments.chat and not prompts:
            raise UserError(
                "--chat answers prompts; give one with --prompt, or use tools/chat.py to talk"
            )
        load_named_extensions(arguments.extension)
        model = load_model(arguments.checkpoint, ema=arguments.ema, tokenizer=arguments.tokenizer)
        generate(model, arguments, prompts or [None])


def list_prompts(arguments: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line, and then those of files."""
    return [*arguments.prompt, *(p for path in arguments.prompts for p in read_prompts(path))]


def generate(model: Model, arguments: argparse.Namespace, prompts: Sequence[str | None]) -> None:
    """Print a text for each sample of each prompt, one after the other."""
    samples = range(arguments.samples)
    count = len(prompts) * len(samples)
    asked = [(prompt, number) for prompt in prompts for number in samples]
    options = {
        "tokens": arguments.tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "seeds": [arguments.seed + number for _, number in asked],
        "batch": arguments.batch,
    }
    # On a terminal the text itself shows how far it is.
    shown = not sys.stdout.isatty()
    name = "text" if count == 1 else f"{count} texts"
    with Progress(name, is_shown=shown, says_speed=count > 1) as progress:
        if arguments.chat:
            chats = [[*begin_chat(arguments), make_question(str(prompt))] for prompt, _ in asked]
            pieces = model.chat_batch(chats, **options, report=progress.report)
        else:
            texts = [prompt for prompt, _ in asked]
            pieces = model.generate_batch(texts, **options, report=progress.report)
        print_in_order(pieces, list_titles(len(prompts), arguments))


def list_titles(prompts: int, arguments: argparse.Namespace) -> list[str]:
    """Return the lines that texts begin with; none for a single one."""
    titles = []
    for prompt in range(1, prompts + 1):
        for sample in range(arguments.samples):
            parts = [f"prompt {prompt} of {prompts}"] * (prompts > 1)
            seed = f"sample {sample + 1} of {arguments.samples}, seed {arguments.seed + sample}"
            parts += [seed] * (arguments.samples > 1)
            titles.append(f"--- {', '.join(parts)}\n" if parts else "")
    return titles


def print_in_order(pieces: Iterator[StreamedText], titles: Sequence[str]) -> None:
    """Print texts that are sampled together one after the other, the first one as it is sampled."""
    waiting = [[title] for title in titles]
    ended, first = set[int](), 0
    for number, text, is_last in pieces:
        waiting[number].append(text)
        if is_last:
            waiting[number].append("\n")
            ended.add(number)
        while first < len(waiting):
            print("".join(waiting[first]), end="", flush=True)
            waiting[first].clear()
            if first not in ended:
                break
            first += 1


def begin_chat(arguments: argparse.Namespace) -> list[Message]:
    """Return the messages before those of the user."""
    system = arguments.system
    return [] if system is None else [{"role": "system", "content": system}]


def make_question(text: str) -> Message:
    """Return the message of a user."""
    return {"role": "user", "content": text}


def check(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for numbers on the command line that are out of range."""
    SamplingOptions(arguments.temperature, arguments.top_k, arguments.top_p)
    for name in ("tokens", "samples", "batch"):
        if (number := getattr(arguments, name)) < 1:
            raise UserError(f"--{name} {number} is too few; use 1 or more")
    if arguments.chat and arguments.samples > 1:
        raise UserError(f"--samples {arguments.samples} has no meaning with --chat; leave it out")
    if arguments.system is not None and not arguments.chat:
        raise UserError("--system begins a chat; add --chat")
    last = _LARGEST_SEED - arguments.samples + 1
    if not 0 <= arguments.seed <= last:
        raise UserError(f"--seed {arguments.seed} is not in range; use 0 to {last}")
    if arguments.samples > 1 and arguments.temperature == 0:
        raise UserError(
            f"--samples {arguments.samples} would be the same text each time, because "
            "--temperature 0 takes the most likely token; use a temperature above 0"
        )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sample text from a checkpoint.")
    parser.add_argument("--checkpoint", required=True, help=ACCEPTED_PATHS)
    add_extension_option(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="text to continue; default: a new document. May be given several times",
    )
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help='more of them: one a line, or in a .jsonl file an object {"prompt": TEXT} a line',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer each prompt by the chat template that lies beside the tokenizer",
    )
    parser.add_argument("--system", help="--chat: what the conversation begins with")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens to sample")
    parser.add_argument("--samples", type=int, default=1, help="texts of each prompt")
    parser.add_argument(
        "--batch",
        type=int,
        default=16,
        help="texts of which each pass computes a token, at most; they need memory for their past",
    )
    add_sampling_options(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first sample; the next has the next one"
    )
    parser.add_argument(
        "--ema", action="store_true", help="use the average of the weights (optim.ema)"
    )
    parser.add_argument("--tokenizer", help="KIND:PATH; default: the tokenizer of the run")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
