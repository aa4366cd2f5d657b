"""Token files written and read by megatron-core, for a byte-for-byte comparison.

Runs under an interpreter that has megatron-core, exchanges `.npz` files, and imports nothing of
megaframe.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder


def write(arrays: dict[str, np.ndarray], prefix: str, vocab: int) -> None:
    """Write each document as one sequence, in the dtype that megatron-core uses for this vocabulary
    size."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab))
    ends = np.cumsum(arrays["lengths"])
    for end, length in zip(ends.tolist(), arrays["lengths"].tolist(), strict=True):
        tokens = arrays["tokens"][end - length : end].astype(np.int64)
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")


def read(prefix: str) -> dict[str, Any]:
    dataset = IndexedDataset(prefix)
    sequences = [dataset[number] for number in range(len(dataset))]
    return {
        "tokens": np.concatenate(sequences),
        "lengths": np.array([sequence.size for sequence in sequences]),
        "documents": np.asarray(dataset.document_indices),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("write", "read"))
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--arrays", required=True, help=".npz file: in for write, out for read")
    parser.add_argument("--vocab", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    if arguments.action == "write":
        write(dict(np.load(arguments.arrays)), arguments.prefix, arguments.vocab)
    else:
        np.savez(arguments.arrays, **read(arguments.prefix))
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
