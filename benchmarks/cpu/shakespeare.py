"""Character-level tinyshakespeare with nanoGPT's published CPU settings, compared with nanoGPT
itself.

nanoGPT's README reports a validation loss of 1.88. The loss here is that of the whole validation
text. Tokens per second are over all training steps except the first and the last.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from harness import (
    PEERS,
    Contender,
    add_common_arguments,
    format_table,
    run_alternately,
    summarise,
    write_results,
)
from shakespeare_settings import SETTINGS

PUBLISHED_LOSS = 1.88
TITLE = "tinyshakespeare"


def make_contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Return ours, as nanoGPT's model and with our default positions, and nanoGPT if it was
    given."""
    common = ("--text", str(arguments.text.resolve()), "--steps", str(arguments.steps))
    chosen = []
    if not arguments.without_ours:
        script = str(PEERS / "shakespeare_ours.py")
        command: tuple[str, ...] = (sys.executable, script, *common)
        chosen.append(Contender("megaframe", command, ours=True))
        rotary = (*command, "--position", "rotary")
        chosen.append(Contender("megaframe, rotary", rotary, ours=True))
    if arguments.nanogpt:
        script = str(PEERS / "shakespeare_nanogpt.py")
        checkout = str(arguments.nanogpt.resolve())
        command = (sys.executable, script, *common, "--nanogpt", checkout)
        chosen.append(Contender("nanoGPT", command))
    else:
        print("nanoGPT is left out: --nanogpt PATH gives a checkout of it")
    return chosen


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = add_common_arguments(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="tinyshakespeare's input.txt")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="training steps")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--without-ours", action="store_true", help="run nanoGPT only")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    chosen = make_contenders(arguments)
    if not chosen:
        sys.exit("nothing to run: give --nanogpt PATH, or leave out --without-ours")
    outcomes = run_alternately(chosen, arguments.rounds, arguments.threads)
    lines = summarise(chosen, outcomes)
    print(format_table(lines))
    print(f"nanoGPT's README reports a validation loss of {PUBLISHED_LOSS}")
    for line in lines:
        seconds = arguments.steps * SETTINGS.tokens_per_step / line.speed.median
        print(f"{line.name}: {seconds:.1f} s for {arguments.steps} steps")
    if arguments.write:
        config = {**asdict(SETTINGS), "steps": arguments.steps, "rounds": arguments.rounds}
        write_results(arguments.write, config, arguments.threads, {TITLE: (lines, outcomes)})


if __name__ == "__main__":
    main()
