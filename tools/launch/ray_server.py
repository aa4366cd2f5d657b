"""Run a parameter server for islands that are runs of their own, on a Ray cluster.

python tools/launch/ray_server.py --folder runs/server --shards 2 -- --config RUN.yaml \\
    sync.server=outer sync.islands=2

The config is that of the islands. Each shard has its part of the synchronised weights and of the
state of the outer optimizer, and writes it to the folder after every change; so the same command
continues, and a shard that dies comes back by itself. Islands are started separately, wherever the
cluster has a node (docs/guides/islands.md). The server ends when it is interrupted. Needs the extra
`ray`.
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from megaframe.config import RunConfig
from megaframe.data.vocabulary_size import find_vocab_size
from megaframe.distributed.ray_cluster import connect_to_ray
from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.optim.parameter_server.ray_actors import NAMESPACE, start_actors
from megaframe.run_queue.run_process import parse_run
from megaframe.validate.sync import find_sync_mistakes

_NOTES_EVERY = 0.5
"""Seconds between two looks at who came or went."""


def main() -> None:
    """Start the server, and say who comes and goes until it is interrupted."""
    arguments = parse_arguments()
    with report_errors():
        config = parse_run(arguments.run)[0]
        check_server(config, arguments.shards)
        connect_to_ray(arguments.address, NAMESPACE)
        if config.model.vocab is None:
            vocab = find_vocab_size(config.model, config.data)
            config = config.replace(model={"vocab": vocab})
        take_notes = start_actors(config, Path(arguments.folder), arguments.shards)
        take_notes()  # answered once the coordinator runs
        print(
            f"server {config.sync.server} waits for islands 0 to {config.sync.islands - 1}",
            flush=True,
        )
        is_over = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: is_over.set())
        while not is_over.wait(_NOTES_EVERY):
            for line in take_notes():
                print(line, flush=True)


def check_server(config: RunConfig, shards: int) -> None:
    """Raise `UserError` for what no server can have."""
    mistakes = [*find_sync_mistakes(config)]
    if config.sync.server is None:
        mistakes.append("sync.server is missing; give the name by which islands find the server")
    if shards < 1:
        mistakes.append(f"--shards {shards} is less than 1")
    if mistakes:
        raise UserError("\n  ".join(["the server cannot start", *mistakes]))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="of the server's files")
    parser.add_argument("--shards", type=int, default=1, help="actors that divide the weights")
    parser.add_argument("--address", default="auto", help="of the cluster; local makes one here")
    parser.add_argument("run", nargs="*", metavar="-- ...", help="as of pretrain_gpt.py")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
