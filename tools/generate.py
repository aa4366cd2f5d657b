"""Sample text from a checkpoint.

python tools/generate.py --checkpoint runs/demo/checkpoints --prompt "def main("
"""

from __future__ import annotations

import argparse
import sys

import torch

from megaframe.checkpoint import place
from megaframe.errors import reported
from megaframe.sampling import load_model, sample, tokenizer_of


def main() -> None:
    """Load the model, sample from it, and print the text as it is sampled."""
    arguments = _arguments()
    with reported():
        config, stage = load_model(place(arguments.checkpoint), ema=arguments.ema)
        tokenizer = tokenizer_of(config, arguments.tokenizer)
        generator = torch.Generator().manual_seed(arguments.seed)
        ids = tokenizer.encode(arguments.prompt)
        start = [int(token) for token in ids] or [tokenizer.eod]
        shown = ""
        for ids in sample(
            stage,
            start,
            tokens=arguments.tokens,
            context=config.train.seq,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            stop=tokenizer.eod,
            generator=generator,
        ):
            # Decode the whole text each time, because a token may be a part of a character.
            text = tokenizer.decode(ids)
            if not text.endswith("�"):
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
        print()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sample text from a checkpoint.")
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="a checkpoint, or a folder of them, whose latest is used; path or URL",
    )
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens to sample")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample from the K most likely; 0: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument(
        "--ema", action="store_true", help="use the average of the weights (optim.ema)"
    )
    parser.add_argument("--tokenizer", help="KIND:PATH; default: the tokenizer of the run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
