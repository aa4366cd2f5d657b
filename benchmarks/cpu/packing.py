"""What the plan of best-fit packing takes when a run starts, and the padding that it leaves:
`python benchmarks/cpu/packing.py`. The lengths of documents are lognormal, about those of web
texts."""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc

import numpy as np

from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.data.packed_dataset import PackedDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--seq", type=int, nargs="+", default=[2048, 8192])
    options = parser.parse_args()
    lengths = np.random.default_rng(0).lognormal(6, 1.2, options.documents).astype(np.int64) + 1
    with tempfile.TemporaryDirectory() as folder:
        with IndexedDatasetWriter(f"{folder}/tokens", np.dtype("u1")) as writer:
            writer.append_batch(np.zeros(lengths.sum(), np.uint8), lengths)
        for seq in options.seq:
            print(f"seq {seq}: {measure(f'{folder}/tokens', seq, options.documents)}")


def measure(prefix: str, seq: int, documents: int) -> str:
    """Return what packing a token file takes, in words."""
    begin = time.monotonic()
    dataset = PackedDataset(prefix, "train", (1.0, 0.0, 0.0), seq, 256)
    seconds = time.monotonic() - begin
    del dataset
    tracemalloc.start()
    dataset = PackedDataset(prefix, "train", (1.0, 0.0, 0.0), seq, 256)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (
        f"{documents:,} documents in {dataset.windows:,} samples, {dataset.measure_padding():.3%} "
        f"padding, {seconds:.2f} s, {size / documents:.0f} bytes a document, "
        f"{peak / documents:.0f} while it is made"
    )


if __name__ == "__main__":
    main()
