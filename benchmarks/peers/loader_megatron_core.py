"""megatron-core's GPTDataset, read sample by sample as its sampler does.

This is the peer's fastest way: nothing is collated into batches, positions and loss masks come from
its cache, and no attention mask is made. Its index is built before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import warnings
from importlib.metadata import version

import numpy as np

warnings.filterwarnings("ignore")

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402


class TokenizerStub:
    """The parts of a tokenizer that the dataset uses."""

    eod, pad, vocab_size = 0, -1, 50304

    @property
    def unique_identifiers(self) -> dict[str, str]:
        return {"class": "benchmark"}


def make_dataset(prefix: str, seq: int, samples: int, cache: str) -> GPTDataset:
    """Return the training samples of one token file."""
    file = IndexedDataset(prefix, mmap=True)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=TokenizerStub(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    documents = GPTDataset.numel_low_level_dataset(file)
    indices = np.arange(documents, dtype=np.int32)
    return GPTDataset(file, prefix, indices, samples, Split.train, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--samples", type=int, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        samples = make_dataset(arguments.prefix, arguments.seq, arguments.samples, cache)
        opened = time.perf_counter() - start
        for number in range(2000):
            samples[number]
        begin, read = time.perf_counter(), 0
        while (passed := time.perf_counter() - begin) < arguments.seconds:
            for number in range(2000 + read, 2500 + read):
                samples[number % len(samples)]
            read += 500
    print(
        json.dumps(
            {
                "samples_per_second": read / passed,
                "open_seconds": opened,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "versions": {name: version(name) for name in ("megatron-core", "numpy", "torch")},
            }
        )
    )


if __name__ == "__main__":
    main()
