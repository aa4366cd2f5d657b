"""Talk with a model that was tuned to chat, in the terminal or on a page.

python tools/chat.py --checkpoint runs/tuned/checkpoints
python tools/chat.py --checkpoint runs/tuned/checkpoints --serve
"""

from __future__ import annotations

import argparse
import sys

from megaframe.checkpoint import ACCEPTED_PATHS
from megaframe.errors import UserError, report_errors
from megaframe.extensions import add_extension_option, load_named_extensions
from megaframe.inference.chat import Message
from megaframe.inference.chat_server import ChatServer
from megaframe.inference.generation import SamplingOptions, add_sampling_options
from megaframe.inference.library import load_model
from megaframe.inference.model import Model
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.http import LOOPBACK
from megaframe.io.untrusted import make_integer_parser

_LONGEST_LINE = 1 << 20
"""Characters of a line that is read."""


def main() -> None:
    """Load the model, and answer lines of the standard input or serve the page."""
    arguments = _parse_arguments()
    with report_errors():
        sampling = SamplingOptions(arguments.temperature, arguments.top_k, arguments.top_p)
        load_named_extensions(arguments.extension)
        model = load_model(arguments.checkpoint, ema=arguments.ema, tokenizer=arguments.tokenizer)
        assert model.chat_format is not None  # before anything is asked
        if arguments.serve:
            serve(model, arguments, sampling)
        else:
            converse(model, arguments, sampling)


def serve(model: Model, arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    """Print the address, and serve until interrupted."""
    server = ChatServer(
        model, tokens=arguments.tokens, sampling=sampling, host=arguments.host, port=arguments.port
    )
    print(f"serving on {server.address}", flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        print()


def converse(model: Model, arguments: argparse.Namespace, sampling: SamplingOptions) -> None:
    """Answer each line that is read, as one conversation."""
    system = arguments.system
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    while (line := read_line(arguments.echo)) is not None:
        try:
            if line:
                answer(model, arguments, sampling, messages, line)
        except UserError as error:  # the conversation goes on without this line
            print(f"error: {error}", file=sys.stderr)


def read_line(echo: bool) -> str | None:
    """Return the next line that a user writes; None at the end. With `echo` it is printed."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    try:
        line = sys.stdin.readline(_LONGEST_LINE)
    except UnicodeDecodeError as error:
        raise UserError(f"the standard input is not UTF-8: {error.reason}") from None
    if line and echo:
        print(f"> {line.strip()}", flush=True)
    return line.strip() if line else None


def answer(
    model: Model,
    arguments: argparse.Namespace,
    sampling: SamplingOptions,
    messages: list[Message],
    text: str,
) -> None:
    """Print an answer as it is sampled, and add it to the messages with what was asked."""
    asked: Message = {"role": "user", "content": text}
    pieces = []
    for piece in model.chat(
        [*messages, asked],
        tokens=arguments.tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=arguments.seed + len(messages),
    ):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print(flush=True)
    messages += [asked, {"role": "assistant", "content": "".join(pieces)}]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Talk with a model that was tuned to chat, by the chat template that lies "
        "beside its tokenizer. Each line of the standard input is answered."
    )
    parser.add_argument("--checkpoint", required=True, help=ACCEPTED_PATHS)
    add_extension_option(parser)
    parser.add_argument("--system", help="what the conversation begins with")
    positive = make_integer_parser(1, 10**6)
    parser.add_argument("--tokens", type=positive, default=200, help="of an answer, at most")
    add_sampling_options(parser)
    parser.add_argument(
        "--seed", type=make_integer_parser(0, 2**62), default=0, help="of the answers"
    )
    parser.add_argument("--ema", action="store_true", help="use averages of weights (optim.ema)")
    parser.add_argument("--tokenizer", help="KIND:PATH; default: the tokenizer of the run")
    parser.add_argument("--echo", action="store_true", help="print each line that is read")
    parser.add_argument("--serve", action="store_true", help="serve a page instead")
    parser.add_argument("--host", default=LOOPBACK, help=f"--serve: default {LOOPBACK}")
    port = make_integer_parser(0, 65535)
    parser.add_argument("--port", type=port, default=0, help="--serve: 0 takes a free one")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
