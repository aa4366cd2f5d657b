"""Corpora that are read as streams, and the samples that loaders read from them."""

import json
import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megaframe.config.model import ModelConfig
from megaframe.config.schema import RunConfig
from megaframe.data.loader import Loader

BLOCK = 1 << 16
"""Bytes of text of a block: the fewest that a config takes."""
SEQ, BATCH = 256, 8


def make_texts(count, seed=0, longest=300):
    """Return texts, each with its own number, without two that are equal."""
    draw = random.Random(seed)
    letters = "abcdefgh é\n"
    return [
        f"{seed}.{number} " + "".join(draw.choices(letters, k=draw.randint(5, longest)))
        for number in range(count)
    ]


def write_lines(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_corpus(folder, files=5, texts=900):
    """Write files of JSON lines, each of two to three blocks; return the texts of each file."""
    written = {f"part{n}.jsonl": make_texts(texts + 50 * n, seed=n) for n in range(files)}
    for name, lines in written.items():
        write_lines(Path(folder) / name, lines)
    return written


def configure(folder, *paths, streaming=None, train=None, seed=1, **data):
    sources = [path if isinstance(path, dict) else {"path": str(path)} for path in paths]
    keys = {"cache": str(Path(folder) / "cache"), "shuffle_bytes": BLOCK, "workers": 1}
    return RunConfig(
        run={"dir": str(Path(folder) / "run"), "seed": seed},
        model=ModelConfig(vocab=512),
        train={"seq": SEQ, "global_batch": BATCH, "microbatch": 1, **(train or {})},
        data={
            "sources": sources,
            "tokenizer": "bytes",
            "split": (0.9, 0.1, 0.0),
            "prefetch": 0,
            "streaming": {**keys, **(streaming or {})},
            **data,
        },
    )


@contextmanager
def open_loader(config, rank=0, ranks=1, state=None):
    loader = Loader(config, rank, ranks)
    try:
        if state is not None:
            loader.load(state)
        yield loader
    finally:
        loader.close()


def list_rows(step):
    """Return the number and all tokens of each sample of a step, sorted by number."""
    return sorted(
        (int(number), tuple(tokens.tolist()))
        for microbatch in step.microbatches
        for number, tokens in zip(microbatch.samples_B, microbatch.tokens_BS, strict=True)
    )


def take_rows(config, steps, rank=0, ranks=1, state=None):
    """Return the samples of some steps of a rank, and the state after them."""
    with open_loader(config, rank, ranks, state) as loader:
        taken = [loader.next() for _ in range(steps)]
        return [row for step in taken for row in list_rows(step)], taken[-1].state


def encode(texts):
    """Return the tokens of texts, each with the end of a document, as one array."""
    return np.concatenate([[*text.encode(), 256] for text in texts])


@contextmanager
def watch_size(folder):
    """Yield a list that gets the bytes of all files below a folder, again and again."""
    sizes, ended = [], threading.Event()

    def look():
        while not ended.is_set():
            total = 0
            for path in Path(folder).rglob("*"):
                try:
                    total += path.stat().st_size if path.is_file() else 0
                except OSError:
                    continue
            sizes.append(total)
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()
