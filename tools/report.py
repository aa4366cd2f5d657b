"""Write the report of a run: what it was, how fast it was, where time was lost, what to try next.

python tools/report.py runs/demo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megaframe.dashboard.page import write_atomically
from megaframe.dashboard.report import REPORT_FILES, render_html, render_report
from megaframe.dashboard.run_folder import RunFolder
from megaframe.dashboard.summary import read_prediction
from megaframe.errors import report_errors
from megaframe.extensions import add_extension_option, load_named_extensions
from megaframe.io.closed_output import allow_closed_output
from megaframe.planner.compare_run import compare_run_or_reason


def main() -> None:
    """Write report.md and report.html, and print the former."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--prediction", type=Path, metavar="FILE", help="JSON of a predicted step")
    parser.add_argument("--cluster", help="for the planner; default: that of its config or device")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: RUN")
    add_extension_option(parser)
    arguments = parser.parse_args()
    with report_errors():
        load_named_extensions(arguments.extension)
        run = RunFolder(arguments.run)
        planned, why = compare_run_or_reason(run.folder, run.environment, arguments.cluster)
        prediction = read_prediction(arguments.prediction)
        if planned and prediction is None:
            prediction = planned.record()
        text = render_report(run, prediction, [*planned.suggest_layouts()] if planned else [why])
        folder = arguments.output or arguments.run
        for name, content in zip(REPORT_FILES, (text, render_html(text)), strict=True):
            write_atomically(folder / name, content, inside=folder)
    print(text)


if __name__ == "__main__":
    with allow_closed_output():
        main()
