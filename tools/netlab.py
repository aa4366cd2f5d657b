"""Run a command on several emulated hosts on this machine, connected by links of a given rate.

python tools/netlab.py --hosts 2 --ranks 2 --link 200mbit -- pretrain_gpt.py --config RUN.yaml

Hosts are network namespaces (`tools/network_lab`), so placement, overlap, compression, lost links
and slow hosts can be measured without a cluster. If the first word of the command is a Python file,
it is started through `torchrun` on each host. Any other command is started as it is, with the
variables that `torchrun` needs in its environment. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from network_lab import HostsResult, Link, LinkOutage, emulate_hosts, run_on_hosts
from network_lab.hosts import check_links, check_rate

from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.errors import UserError, report_errors
from megaframe.extensions import load_with_extensions
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.regular_file import write_file
from megaframe.io.run_files import METRICS_FILE

ENTRY = "pretrain_gpt.py"
SUMMARY = "summary.json"
_SLOW = re.compile(r"([0-9]+)=(.+)")
_DROP = re.compile(r"([0-9]+)@([0-9.]+)(?::([0-9.]+))?")
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the command on the hosts, and exit with the status of the first host that failed."""
    arguments = parse_arguments()
    with report_errors():
        links = parse_links(arguments)
        outages = [parse_outage(text, len(links)) for text in arguments.drop]
        check_links(links)
        run = find_run_folder(arguments.command)
        command = prepend_launcher(arguments.command, arguments.max_restarts)
        for number in _SIGNALS:
            signal.signal(
                number, _exit_on_signal
            )  # exit in an orderly way, so that hosts are removed
        began = time.time()
        with emulate_hosts(links) as hosts:
            result = run_on_hosts(
                hosts, command, ranks=arguments.ranks, folder=arguments.folder, outages=outages
            )
        steps = summarize_steps(run, began) if run is not None else {}
        summary = {"links": [asdict(link) for link in links], **asdict(result), **steps}
        path, text = arguments.folder / SUMMARY, json.dumps(summary, indent=2) + "\n"
        write_file(path, text, inside=arguments.folder)
        print(format_report(links, result, steps))
        print(f"output of every host and {SUMMARY}: {arguments.folder}")
    # A negative status is a signal, which a shell reports as 128 plus its number.
    sys.exit(result.status if result.status >= 0 else 128 - result.status)


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def parse_links(arguments: argparse.Namespace) -> list[Link]:
    """Return the link of each host.

    Raises:
        UserError: For unknown hosts and invalid rates.
    """
    if arguments.hosts < 1 or arguments.ranks < 1:
        asked = f"--hosts {arguments.hosts} --ranks {arguments.ranks}"
        raise UserError(f"{asked}: both are 1 or more")
    check_rate(arguments.link)
    links = [Link(arguments.link, arguments.latency)] * arguments.hosts
    for text in arguments.slow:
        match = _SLOW.fullmatch(text)
        if not match:
            raise UserError(f"--slow {text} is not HOST=RATE, such as 1=50mbit")
        check_rate(match[2])
        links[_parse_host(f"--slow {text}", match[1], len(links))] = Link(
            match[2], arguments.latency
        )
    return links


def parse_outage(text: str, count: int) -> LinkOutage:
    """Parse HOST@SECONDS[:SECONDS] into the loss of a link.

    Args:
        text: A word of the command line.
        count: Number of hosts.

    Raises:
        UserError: If the text is not of this form, or there is no such host.
    """
    match = _DROP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        after, length = float(match[2]), float(match[3]) if match[3] else None
    except ValueError:
        raise UserError(
            f"--drop {text} is not HOST@SECONDS or HOST@SECONDS:SECONDS, such as 1@10:5"
        ) from None
    return LinkOutage(_parse_host(f"--drop {text}", match[1], count), after, length)


def _parse_host(text: str, number: str, count: int) -> int:
    if int(number) >= count:
        raise UserError(f"{text}: with --hosts {count} they are numbered 0 to {count - 1}")
    return int(number)


def find_run_folder(command: Sequence[str]) -> Path | None:
    """Return the folder of the run that the command starts, or None if it starts something else.

    Raises:
        UserError: For a mistake in the run's config, before any host is made.
    """
    if Path(command[0]).name != ENTRY:
        return None
    parser = argparse.ArgumentParser(prog=ENTRY)
    parser.add_argument("--config")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args(command[1:])
    return Path(load_with_extensions(arguments.config, arguments.overrides).run.dir)


def prepend_launcher(command: Sequence[str], restarts: int) -> list[str]:
    """Return the command line for each host, with `torchrun` in front of a Python file. restarts:
    its `--max-restarts`.

    Raises:
        UserError: If there is no such file.
    """
    if not command[0].endswith(".py"):
        return list(command)
    if not Path(command[0]).is_file():
        raise UserError(f"there is no file {command[0]} in {Path.cwd()}")
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--max-restarts={restarts}"]
    return [*launcher, *command]


def summarize_steps(run: Path, since: float) -> dict[str, Any]:
    """Return medians over the steps since a time: seconds of a step and of its parts, and bytes
    handed over by axis. The first step is left out as a warm-up. Empty if there are no steps.

    Args:
        run: Its folder.
        since: Seconds since the epoch.
    """
    metrics = MetricsFile(run / METRICS_FILE)
    metrics.read()
    recent = np.flatnonzero(metrics.get_column("at") >= since)
    recent = recent[1:] if len(recent) > 1 else recent
    if not len(recent):
        return {}

    def compute_median(name: str) -> float:
        return float(np.median(metrics.get_column(name)[recent]))

    def compute_medians(prefix: str) -> dict[str, float]:
        names = [name for name in metrics.list_names() if name.startswith(prefix)]
        return {name.removeprefix(prefix): compute_median(name) for name in names}

    return {
        "steps": len(recent),
        "step_seconds": compute_median("seconds"),
        "tokens_per_second": compute_median("tokens_per_second"),
        "time": compute_medians("time/"),
        "bytes": compute_medians("bytes/"),
    }


def format_report(links: Sequence[Link], result: HostsResult, steps: Mapping[str, Any]) -> str:
    """Return the text that is printed at the end.

    Args:
        links: The link of each host.
        result: How the command ended.
        steps: What `summarize_steps` returned.
    """
    lines = [f"{'':<8}{'link':>10}{'sent MB':>12}{'received MB':>13}{'status':>8}"]
    for number, (link, link_bytes) in enumerate(zip(links, result.link_bytes, strict=True)):
        sent, received = (count / 1e6 for count in link_bytes)
        lines.append(
            f"{f'host {number}':<8}{link.rate:>10}{sent:>12.3f}{received:>13.3f}"
            f"{result.statuses[number]:>8}"
        )
    lines.append(f"{result.seconds:.1f} s in all")
    if not steps:
        return "\n".join(lines)
    lines.append(
        f"step {steps['step_seconds'] * 1e3:.1f} ms, {steps['tokens_per_second']:.0f} tokens/s "
        f"(medians of {steps['steps']} steps), of which:"
    )
    for part, seconds in sorted(steps["time"].items(), key=lambda item: -item[1]):
        share = seconds / steps["step_seconds"]
        if share >= 0.0005:
            lines.append(f"  {part:<36}{seconds * 1e3:>10.1f} ms{share:>8.1%}")
    for axes, size in steps["bytes"].items():
        lines.append(f"  {f'bytes of a rank over {axes}':<36}{size / 1e6:>10.3f} MB")
    return "\n".join(lines)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        words: Its words; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--link", default="1gbit", metavar="RATE", help="of each host: 200mbit")
    parser.add_argument("--latency", metavar="TIME", help="of what a host sends: 50ms")
    parser.add_argument(
        "--slow", action="append", default=[], metavar="HOST=RATE", help="another link for a host"
    )
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="HOST@SECONDS[:SECONDS]",
        help="lose the link of a host after so many seconds, for so many",
    )
    parser.add_argument("--max-restarts", type=int, default=0, help="of torchrun, on each host")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/netlab"), help="for the output of the hosts"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    return parser.parse_args(words)


if __name__ == "__main__":
    with allow_closed_output():
        main()
