"""Run one node's part of a run: check the node and the config, and start the node's ranks.

PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_RDZV_ENDPOINT=node1:29400 \\
    python tools/launch/node.py --config RUN.yaml [section.key=value ...]

All launchers in this folder run this on each node. It is `torchrun` with c10d rendezvous and
defaults that suit a run; its options are set by their PET_ variables. `torchrun` restarts the ranks
after any failure, and turns it into status 1. This does not restart them after a mistake of the
user, and exits with the status of the rank that failed first, so that a scheduler can tell whether
another try may succeed (docs/guides/faults.md). `torchrun` gives a node consecutive
ranks, and the tensor axis varies fastest, so tensor groups are inside nodes.
"""

from __future__ import annotations

import argparse
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path

from megaframe.config import RunConfig
from megaframe.config.registry import Registry, use_registry
from megaframe.errors import EXIT_USER_ERROR, UserError, report_errors
from megaframe.extensions import load_with_extensions
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.local_rendezvous import describe_listener, is_port_in_use

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRY = str(ROOT / "pretrain_gpt.py")
EXIT_SICK = 4
"""Exit status if this node is not fit to run; another one may be."""
USUAL = {
    "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ID": "megaframe",
    "PET_MAX_RESTARTS": "20",
    # Slurm sends SIGUSR1 ahead of its time limit.
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    # Long enough for two steps and a save when a run is asked to leave.
    "PET_SHUTDOWN_TIMEOUT": "300",
}
"""Defaults for variables that the environment does not set."""
_PORT = 29400
_ANY_PORT, _LAST_PORT = 0, 65535


def main() -> None:
    """Check config, data and node, and start the ranks; exit with the status of the run."""
    arguments = parse_arguments()
    words = [*(["--config", arguments.config] if arguments.config else []), *arguments.overrides]
    os.environ.update(make_launcher_defaults(os.environ))
    if arguments.launch_only:
        sys.exit(launch([ENTRY, *words]))
    with report_errors():
        config = load_with_extensions(arguments.config, arguments.overrides)
        if config.checkpoint.resume is None and os.environ["PET_MAX_RESTARTS"] != "0":
            raise UserError(
                f"ranks that are started again (PET_MAX_RESTARTS={os.environ['PET_MAX_RESTARTS']}) "
                "would start from scratch; set checkpoint.resume=latest"
            )
        check_port(os.environ)
        nodes, ranks = os.environ["PET_NNODES"], os.environ["PET_NPROC_PER_NODE"]
        world = compute_largest_world(nodes, ranks)
        local_world = compute_largest_world("1", ranks)
        check_data(config)
    if arguments.look:
        sys.exit(0 if check_node(Path(config.run.dir)) else EXIT_SICK)
    if status := run_dry_run(words, world, local_world):
        sys.exit(status)
    if arguments.doctor and not check_node(Path(config.run.dir)):
        sys.exit(EXIT_SICK)
    sys.exit(launch([ENTRY, *words]))


def make_launcher_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the PET_ variables to set where `environment` does not."""
    defaults = {name: value for name, value in USUAL.items() if not environment.get(name)}
    nodes = environment.get("PET_NNODES") or USUAL["PET_NNODES"]
    if not environment.get("PET_RDZV_ENDPOINT"):
        # Some launchers give the first node's address in the variables of the static rendezvous.
        first = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR") or "localhost"
        port = environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT")
        if not port:
            port = str(_PORT if nodes != "1" else _ANY_PORT)  # nobody else needs to know it
        defaults["PET_RDZV_ENDPOINT"] = f"{first}:{port}"
    return defaults


def check_port(environment: Mapping[str, str]) -> None:
    """Look whether another program listens where the nodes should meet.

    Raises:
        UserError: One does, and it is no other node of this run, because there is none.
    """
    endpoint = environment["PET_RDZV_ENDPOINT"]
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit() or int(port) > _LAST_PORT or not is_port_in_use(host, int(port)):
        return
    text = f"{endpoint} (PET_RDZV_ENDPOINT): {describe_listener(int(port))} listens there already"
    if environment["PET_NNODES"] == "1":
        raise UserError(f"{text}; give another port, or none: a single node then takes a free one")
    print(f"note: {text}; if it is not a node of this run, give another port", file=sys.stderr)


def compute_largest_world(nodes: str, ranks: str) -> int:
    """Return the largest possible number of ranks.

    Args:
        nodes: N or MIN:MAX.
        ranks: Per node, a number, auto, gpu or cpu.

    Raises:
        UserError: For anything else.
    """
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    try:
        most = parse_min_max_nnodes(nodes)[1]
    except (ValueError, RuntimeError):
        raise UserError(f"PET_NNODES={nodes} is neither a number nor two, such as 2:4") from None
    try:
        return most * determine_local_world_size(ranks)
    except ValueError:
        raise UserError(
            f"PET_NPROC_PER_NODE={ranks} is neither a number nor auto, gpu or cpu; gpu needs one"
        ) from None


def run_dry_run(words: Sequence[str], world: int, local_world: int) -> int:
    """Return the status of a dry run on `world` ranks, `local_world` of them on each node: 2 for a
    mistake in the config, which it prints. It is forked, because this process has imported torch,
    which takes most of the time of one that starts anew."""
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local_world), "RANK": "0"}
    process = get_context("fork").Process(target=_run_entry, args=(["--dry-run", *words], sizes))
    process.start()
    process.join()
    assert process.exitcode is not None, "it has ended"
    return process.exitcode


def _run_entry(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run the entry in this process, without its output."""
    os.environ.update(variables)
    sys.argv = [ENTRY, *words]
    # It loads the extensions itself.
    with redirect_stdout(io.StringIO()), use_registry(Registry()):
        runpy.run_path(ENTRY, run_name="__main__")


def check_data(config: RunConfig) -> None:
    """Raise `UserError` if the tokenizer or the sources of a run cannot be used on this node."""
    from megaframe.data.loader import Loader
    from megaframe.data.vocabulary_size import find_vocab_size

    vocab = find_vocab_size(config.model, config.data)
    Loader(config.replace(model={"vocab": vocab}), 0, 1)


def check_node(folder: Path) -> bool:
    """Return whether this node is fit to run, by tools/doctor.py; if it is not, print what that
    found.

    Args:
        folder: Where runs are written.
    """
    command = [sys.executable, str(ROOT / "tools/doctor.py"), "--folder", str(folder)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        print(completed.stdout + completed.stderr, end="", flush=True)
        name = os.uname().nodename
        print(f"error: node {name} is not fit to run (tools/doctor.py)", file=sys.stderr)
    return completed.returncode == 0


def launch(command: Sequence[str]) -> int:
    """Run the ranks of this node under torchrun, restarts included, and return the status of the
    run."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
    )
    from torch.distributed.launcher import api
    from torch.distributed.run import determine_local_world_size, parse_args, run

    class Agent(LocalElasticAgent):
        """The agent of torchrun, which has no option for which failures it restarts."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            if any(failed.exitcode == EXIT_USER_ERROR for failed in result.failures.values()):
                self._remaining_restarts = 0
            return result

    api.LocalElasticAgent = Agent  # type: ignore[misc]
    # What torchrun sets for several ranks, with four lines of warning.
    if determine_local_world_size(os.environ["PET_NPROC_PER_NODE"]) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        run(parse_args(list(command)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return report_failure(rank, failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousClosedError, RendezvousConnectionError):
        # The status of that node says why, and should prevail where a launcher takes the largest.
        print(
            f"error: another node has ended the run, {os.environ['PET_RDZV_ENDPOINT']} "
            "(PET_RDZV_ENDPOINT) cannot be reached, or another program listens there",
            file=sys.stderr,
            flush=True,
        )
        return 1
    return 0


def report_failure(rank: int, status: int) -> int:
    """Print and return a rank's status as a shell reports it: 128 plus the number for a signal."""
    exit_status = status if status >= 0 else 128 - status
    print(f"rank {rank} failed first, with status {exit_status}", file=sys.stderr, flush=True)
    return exit_status


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="as of pretrain_gpt.py")
    doctor = parser.add_mutually_exclusive_group()
    doctor.add_argument("--look", action="store_true", help="only check the node")
    doctor.add_argument(
        "--no-doctor", dest="doctor", action="store_false", help="do not check the node"
    )
    doctor.add_argument(
        "--launch-only", action="store_true", help="check nothing: who starts this has done so"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
