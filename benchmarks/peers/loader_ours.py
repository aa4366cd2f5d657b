"""megaframe's Loader: whole steps of one data rank from one token file."""

from __future__ import annotations

import argparse
import json
import resource
import time
from importlib.metadata import version

from megaframe.config.data import DataConfig, DataSourceConfig
from megaframe.config.model import ModelConfig
from megaframe.config.schema import RunConfig, TrainConfig
from megaframe.data.loader import Loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--documents", action="store_true", help="reset and mask at documents")
    arguments = parser.parse_args()
    config = RunConfig(
        model=ModelConfig(vocab=50304),
        train=TrainConfig(seq=arguments.seq, global_batch=arguments.batch, microbatch=8),
        data=DataConfig(
            sources=(DataSourceConfig(path=arguments.prefix),),
            split=(1.0, 0.0, 0.0),
            prefetch=arguments.prefetch,
            reset_positions=arguments.documents,
            reset_attention=arguments.documents,
            mask_eod=arguments.documents,
        ),
    )
    start = time.perf_counter()
    loader = Loader(config, 0, 1)
    loader.next()
    opened = time.perf_counter() - start
    for _ in range(2000 // arguments.batch):
        loader.next()
    begin, samples = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < arguments.seconds:
        samples += loader.next().samples
    loader.close()
    print(
        json.dumps(
            {
                "samples_per_second": samples / passed,
                "open_seconds": opened,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "versions": {name: version(name) for name in ("numpy", "torch")},
            }
        )
    )


if __name__ == "__main__":
    main()
