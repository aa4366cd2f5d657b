"""Show runs as a page: one self-contained file, or live.

python tools/dashboard.py runs/demo
python tools/dashboard.py runs/demo runs/other --serve
python tools/dashboard.py runs/sweep
python tools/dashboard.py runs/demo --wandb ENTITY
python tools/dashboard.py runs/demo --upload
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megaframe.dashboard.page import PAGE_FILE, render_page, write_atomically
from megaframe.dashboard.page_data import build_page_data
from megaframe.dashboard.run_folder import RunFolder, get_config_value
from megaframe.dashboard.run_set import RunSet
from megaframe.dashboard.serve import DashboardServer
from megaframe.dashboard.summary import read_prediction
from megaframe.dashboard.wandb_workspace import save_workspace, upload_page
from megaframe.errors import UserError, report_errors
from megaframe.extensions import add_extension_option, load_named_extensions
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.http import LOOPBACK
from megaframe.io.untrusted import make_integer_parser
from megaframe.planner.compare_run import compare_run_or_reason


def main() -> None:
    """Write the page, serve it until interrupted, or send it or a workspace to Weights & Biases."""
    arguments = parse_arguments()
    with report_errors():
        load_named_extensions(arguments.extension)
        run_set = RunSet(arguments.runs)
        runs = run_set.runs
        if arguments.wandb:
            print(save_workspace(arguments.wandb, project(runs[0])))
            return
        prediction = find_prediction(runs, arguments)
        if arguments.serve:
            serve(run_set, arguments, prediction)
            return
        html = render_page(build_page_data(runs, prediction, notes=run_set.notes))
        if arguments.upload:
            upload_page(runs[0].folder, project(runs[0]), html)
            print(f"added the page to the Weights & Biases run of {runs[0].name}")
            return
        path = arguments.output or arguments.runs[0] / PAGE_FILE
        write_atomically(path, html, inside=None if arguments.output else arguments.runs[0])
        for note in run_set.list_notes():
            print(note)
        print(f"wrote {path}")


def find_prediction(runs: list[RunFolder], arguments: argparse.Namespace) -> dict | None:
    """Return the prediction that was given, or for a single run that of the planner; None if there
    is none."""
    if arguments.prediction or len(runs) > 1:
        return read_prediction(arguments.prediction)
    prediction, why = compare_run_or_reason(runs[0].folder, runs[0].environment, arguments.cluster)
    if prediction is None:
        print(why)
    return prediction.record() if prediction else None


def project(run: RunFolder) -> str:
    """Return the run's project of Weights & Biases.

    Raises:
        UserError: If it has none.
    """
    name = get_config_value(run.config, "metrics.wandb")
    if not name:
        raise UserError(f"{run.folder} has no metrics.wandb in its config: it is in no project")
    return str(name)


def serve(runs: RunSet, arguments: argparse.Namespace, prediction: dict | None) -> None:
    """Print the address, and serve until interrupted.

    Args:
        runs: The runs of the page.
        arguments: The command line.
        prediction: A predicted step, beside the runs; None for none.
    """
    server = DashboardServer(runs, host=arguments.host, port=arguments.port, prediction=prediction)
    print(server.address, flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        print()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or of several runs "
        "each, such as a sweep's"
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: RUN/{PAGE_FILE}")
    parser.add_argument("--prediction", type=Path, metavar="FILE", help="JSON of a predicted step")
    parser.add_argument(
        "--cluster", help="of configs/clusters, for the planner's prediction of a run shown alone; "
        "by default that of its config or device"
    )  # fmt: skip
    parser.add_argument(
        "--wandb", metavar="ENTITY", help="instead save the panels as a workspace of the run's "
        "project there"
    )  # fmt: skip
    parser.add_argument(
        "--upload", action="store_true", help="instead add the page to the (first) run's run of "
        "Weights & Biases"
    )  # fmt: skip
    parser.add_argument("--serve", action="store_true", help="instead show the runs live")
    parser.add_argument(
        "--host", default=LOOPBACK, help="where --serve listens; by default only this machine can "
        "reach it"
    )  # fmt: skip
    parser.add_argument(
        "--port", type=make_integer_parser(0, 65535), default=0, help="default: any free one"
    )  # fmt: skip
    add_extension_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
