"""Checkpoints to evaluate, and tools/evaluate.py as it is called."""

import importlib.util
import sys

import numpy as np
from repo_copy import ROOT

from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter


def load_tool():
    spec = importlib.util.spec_from_file_location("evaluate_tool", ROOT / "tools/evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
    load_tool().main()


def write(prefix, documents):
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for document in documents:
            writer.append(np.array(document, np.uint16))
    return str(prefix)


def make_numbers(seed, length, below):
    return np.random.default_rng(seed).integers(0, below, length)
