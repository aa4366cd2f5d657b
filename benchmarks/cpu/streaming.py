"""Tokens that a core makes of text that is read as a stream, beside the tokenizer alone.

The library gets all texts in memory, by its fastest call, and its ids are thrown away. The stream
reads jsonl, cuts blocks and parts, encodes, sends the result as from a worker, and writes the
blocks. Both run in turns in one process, and processor time is measured, so that work beside it
counts little.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import ROOT

from megaframe.config.data import DataConfig, DataSourceConfig, StreamingConfig
from megaframe.data.indexed_dataset import choose_token_dtype
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.preprocessing.journal import EncodedDocuments
from megaframe.data.preprocessing.train_tokenizer import train_sentencepiece
from megaframe.data.streaming.block_files import TextBlockWriter, delete_block
from megaframe.data.streaming.block_parts import cut_shard
from megaframe.data.streaming.corpus import Corpus, find_corpus
from megaframe.data.tokenizer import Tokenizer, load_tokenizer

VOCAB = 8192


def make_corpus(folder: Path, megabytes: float) -> list[str]:
    """Write the demo corpus, train a tokenizer on it, and return its texts."""
    path = folder / "corpus.jsonl"
    tool = str(ROOT / "tools" / "demo_corpus.py")
    command = [sys.executable, tool, "--output", str(path), "--megabytes", str(megabytes)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    texts = [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]
    train_sentencepiece([CorpusFile(str(path))], str(folder / "tokenizer"), VOCAB, "bpe", megabytes)
    return texts


def stream(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> int:
    """Make all blocks as a producer and its workers do, in this process; return their tokens."""
    tokens, writer = 0, None
    for shard in range(len(corpus.list_shards())):
        for part in cut_shard(corpus, shard):
            made = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(part)).make()))
            assert isinstance(made, EncodedDocuments)
            prefix = str(folder / part.block.stem)
            writer = writer or TextBlockWriter(prefix, choose_token_dtype(tokenizer.vocab_size))
            writer.append(made)
            tokens += made.tokens.size
            if part.ends_block:
                writer.finish(is_last=part.ends_shard)
                writer = None
                delete_block(prefix)
    return tokens


def measure(call: Callable[[], int]) -> float:
    """Return the tokens of a call per second of processor time."""
    begin = time.process_time()
    tokens = call()
    return tokens / (time.process_time() - begin)


def encode_alone(tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """Return how many tokens the texts have, with their ends."""
    return sum(ids.size + 1 for ids in tokenizer.encode_batch(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = make_corpus(folder, options.megabytes)
        given = f"sentencepiece:{folder}/tokenizer.model"
        tokenizer = load_tokenizer(given)
        data = DataConfig(tokenizer=given, streaming=StreamingConfig())
        corpus = find_corpus(DataSourceConfig(path=f"{folder}/corpus.jsonl"), data)
        alone: list[float] = []
        streamed: list[float] = []
        for _ in range(options.rounds):
            alone.append(measure(lambda: encode_alone(tokenizer, texts)))
            streamed.append(measure(lambda: stream(corpus, tokenizer, folder)))
        ratios = [ours / theirs for ours, theirs in zip(streamed, alone, strict=True)]
        print(f"tokenizer alone  {np.median(alone):12,.0f} tokens per second of a core")
        print(f"stream           {np.median(streamed):12,.0f}")
        low, high = min(ratios), max(ratios)
        print(f"ratio            {np.median(ratios):12.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
