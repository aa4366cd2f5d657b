"""Start a run on a Ray cluster, with Ray Train.

python tools/launch/ray_train.py --ranks 16 --gpus -- --config RUN.yaml checkpoint.resume=latest

Ray places and watches one worker per rank, and restarts all of them if one is lost. A worker starts
`pretrain_gpt.py` as a separate process, as `torchrun` would. Signals, hangs and exit statuses
therefore mean the same as elsewhere (docs/guides/faults.md), and a rank that crashes does not take
its worker with it. SIGTERM to this program reaches all ranks, which save and exit. Ray numbers
workers node by node, so tensor groups are inside nodes. All nodes need the same files at the same
paths, and `run.dir` on shared storage. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaframe.config import RunConfig
from megaframe.distributed.ray_cluster import connect_to_ray
from megaframe.errors import EXIT_USER_ERROR, UserError, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.regular_file import write_file
from megaframe.run_queue.run_process import ENTRY, make_parent_death_prefix, parse_ranks, parse_run

ENDED = "ray-status"
"""File in the run folder in which the first rank's worker leaves the status for this program."""
LEAVE = "ray-leave"
"""File in the run folder that this program makes when it gets SIGTERM; the workers look for it."""
ASKED_TO_LEAVE = (138, 143)
"""Exit statuses of a run that was asked to leave and has saved."""
LOOK_SECONDS = 0.5


def main() -> None:
    """Check the command line, run the ranks, and exit with the status of the run."""
    arguments = parse_arguments()
    with report_errors():
        config, words = parse_run(arguments.run)
        if arguments.failures and config.checkpoint.resume is None:
            raise UserError(
                f"a run that is started again (--failures {arguments.failures}) would start from "
                "scratch; set checkpoint.resume=latest"
            )
        ranks = parse_ranks(arguments.ranks)
        if ranks[0] < ranks[1] and not config.faults.elastic:
            raise UserError(f"--ranks {arguments.ranks} needs faults.elastic=true")
        connect_to_ray(arguments.address)
        resource = "GPU" if arguments.gpus else "CPU"
        if not arguments.wait:
            check_resources(ranks, {resource: 1.0})
        status = train(config, words, ranks, resource, arguments.failures)
    sys.exit(status)


def check_resources(ranks: tuple[int, int], of_a_rank: dict[str, float]) -> None:
    """Raise `UserError` if the cluster is too small, because Ray would wait for ever.

    Args:
        ranks: Fewest and most ranks; the fewest must have room.
        of_a_rank: Resources of one rank.
    """
    import ray

    available = ray.cluster_resources()
    for resource, count in of_a_rank.items():
        if available.get(resource, 0.0) < ranks[0] * count:
            raise UserError(
                f"{ranks[0]} ranks need {ranks[0] * count:g} {resource} and the cluster has "
                f"{available.get(resource, 0.0):g}; ask for fewer, add nodes, or give --wait"
            )


def train(
    config: RunConfig, words: Sequence[str], ranks: tuple[int, int], resource: str, failures: int
) -> int:
    """Run the ranks to the end and return the status of the run.

    Args:
        config: The run.
        words: The command line of the entry.
        ranks: Fewest and most ranks.
        resource: What a rank takes, GPU or CPU.
        failures: How often ranks may be restarted.

    Raises:
        UserError: If ranks fail more often.
    """
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    least, most = ranks
    storage = Path(config.run.dir).absolute()
    ended, leave = storage / ENDED, storage / LEAVE
    for left_over in (ended, leave):
        left_over.unlink(missing_ok=True)
    # Ray's own handler would end this program, and all ranks with it before they have saved.
    signal.signal(signal.SIGTERM, lambda *_: write_file(leave, "SIGTERM\n"))
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={
            "words": list(words),
            "folder": str(Path.cwd()),
            "ended": str(ended),
            "leave": str(leave),
            "launcher": f"{socket.gethostname()}:{os.getpid()}",
        },
        # gloo suffices: Ray's own process group only sends a port, and is closed before the run.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=most if least == most else (least, most),
            use_gpu=resource == "GPU",
            placement_strategy="PACK",
        ),
        run_config=ray.train.RunConfig(
            name="ray",
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        reasons = [line for line in str(error).splitlines() if "ended with status" in line]
        raise UserError(
            f"the run failed {failures + 1} times (--failures {failures}): "
            f"{reasons[0].strip() if reasons else str(error).splitlines()[0]}"
        ) from None
    return int(ended.read_text())


def train_rank(settings: dict[str, Any]) -> None:
    """Run one worker's rank to the end. If it fails, raise `RuntimeError`, upon which Ray restarts
    all workers. A status with which a restart is of no use (success, a user's mistake, asked to
    leave) is written to the file `ended` instead."""
    import ray.train
    import torch
    import torch.distributed as dist

    rank = ray.train.get_context().get_world_rank()
    port = torch.tensor(find_free_port() if rank == 0 else 0)
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    environment = {
        **os.environ,
        "MASTER_PORT": str(int(port)),
        "MEGAFRAME_LAUNCHER": settings["launcher"],
    }
    run_rank(rank, settings, environment)


def run_rank(rank: int, settings: dict[str, Any], environment: dict[str, str]) -> None:
    """Run a rank as a process; what its exit status leads to is said by `train_rank`."""
    command = [*make_parent_death_prefix("KILL"), sys.executable, ENTRY, *settings["words"]]
    process = subprocess.Popen(command, env=environment, cwd=settings["folder"])
    status = wait_or_ask(process, Path(settings["leave"]))
    if status not in (0, EXIT_USER_ERROR, *ASKED_TO_LEAVE):
        raise RuntimeError(f"rank {rank} ended with status {status}")
    if rank == 0:
        write_file(settings["ended"], str(status))


def wait_or_ask(process: subprocess.Popen[bytes], leave: Path) -> int:
    """Return the exit status of a rank, which is asked to save and exit once a file is there."""
    is_asked = False
    while True:
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            if not is_asked and leave.exists():
                process.terminate()
                is_asked = True


def find_free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1", metavar="N|MIN:MAX", help="MIN:MAX is elastic")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank, else a CPU")
    parser.add_argument("--failures", type=int, default=100, help="starts after the first one")
    parser.add_argument("--address", default="auto", help="of the cluster; local makes one here")
    parser.add_argument("--wait", action="store_true", help="for nodes that are not there yet")
    parser.add_argument("run", nargs="*", metavar="-- ...", help="as of pretrain_gpt.py")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
