"""The panels of the page as a Weights & Biases workspace, which can compare any runs of a project.

Lines are its own plots of the same metrics. Rows with a number for each rank, and panels for which
it has no plot, are in the page itself, which `upload_page` adds to a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaframe.dashboard.panels import PANELS, Panel
from megaframe.errors import UserError
from megaframe.io.wandb_run import InvalidWandbId, start_wandb_run

NAME = "megaframe"
PAGE_PANEL = "dashboard"
_INSTEAD = {
    "waterfall": "lost/",
    "stages": "stages/",
    "expert_load": "experts/max_load/",
    "sources": "sources/",
}
"""For panels that are not lines on the page: prefixes of the metrics to plot as lines."""


def build_workspace(entity: str, project: str) -> Any:
    """Return the workspace, not yet saved.

    Raises:
        UserError: The extra `wandb` is missing.
    """
    try:
        import wandb_workspaces.reports.v2 as blocks
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise _make_missing_error("--wandb") from None
    panels: dict[str, list[Any]] = {
        "Training": [
            blocks.LinePlot(**description)
            for description in map(_describe_line, PANELS)
            if description
        ],
        "Pages": [blocks.MediaBrowser(title="The page of each run", media_keys=[PAGE_PANEL])],
        "Configs": [blocks.RunComparer(diff_only="split")],
    }
    sections = [
        workspaces.Section(name=name, panels=of, is_open=True) for name, of in panels.items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def save_workspace(entity: str, project: str) -> str:
    """Save the workspace in the project, and return its URL.

    Raises:
        UserError: The extra `wandb` is missing, or W&B refused or could not be reached.
    """
    panels = build_workspace(entity, project)
    import wandb

    try:
        return str(panels.save().url)
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise UserError(f"the workspace of {entity}/{project} was not saved: {error}") from None


def upload_page(folder: Path, project: str, html: str) -> None:
    """Add the page to the Weights & Biases run of a run folder, as a panel that replaces an earlier
    one. Without an API key it is added to the files of an offline run.

    Args:
        folder: Of the run.
        project: Of Weights & Biases that the run is in.
        html: The page.

    Raises:
        UserError: If the extra `wandb` is missing, or the upload fails.
    """
    try:
        import wandb
    except ImportError:
        raise _make_missing_error("--upload") from None
    try:
        run = start_wandb_run(folder, project, fresh=False)
        run.log({PAGE_PANEL: wandb.Html(html, inject=False)})
        run.finish()
    except InvalidWandbId as error:
        raise UserError(str(error)) from None
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise UserError(f"the page of {folder} was not uploaded: {error}") from None


def _make_missing_error(option: str) -> UserError:
    return UserError(f"{option} needs the extra 'wandb': pip install 'megaframe[wandb]'")


def _describe_line(panel: Panel) -> dict[str, Any]:
    """Return the arguments of a line plot for this panel; empty if it has none."""
    prefix = _INSTEAD.get(panel.id) or next((k for k in panel.keys if k.endswith("/")), None)
    if prefix is None and not panel.keys:
        return {}
    metrics = {"metric_regex": prefix + ".*"} if prefix else {"y": list(panel.keys)}
    parts = panel.id in ("waterfall", "time")
    # These plots cannot scale values, so the unit of a panel that the page scales would be wrong.
    unit = {"title_y": panel.unit} if panel.unit and panel.scale == 1 and prefix is None else {}
    shape = {"plot_type": "stacked-area"} if parts else {}
    return {"title": panel.title, "log_y": panel.log or None, **metrics, **unit, **shape}
