"""Checkpoints to evaluate, and tools/evaluate.py as it is called."""

import sys

import numpy as np
from programs import load_program

from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
    load_program("tools/evaluate.py").main()


def write(prefix, documents):
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for document in documents:
            writer.append(np.array(document, np.uint16))
    return str(prefix)


def make_numbers(seed, length, below):
    return np.random.default_rng(seed).integers(0, below, length)
