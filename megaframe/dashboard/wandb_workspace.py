"""The panels of the page as a Weights & Biases workspace, which can compare any runs of a project.

Lines are its own plots of the same metrics. Rows with a number for each rank, and panels for which
it has no plot, are in the page itself, which a run uploads when it ends.
"""

from __future__ import annotations

from typing import Any

from megaframe.dashboard.panels import PANELS, Panel
from megaframe.errors import UserError

NAME = "megaframe"
_INSTEAD = {
    "waterfall": "lost/",
    "stages": "stages/",
    "expert_load": "experts/max_load/",
    "sources": "sources/",
}
"""For panels that are not lines on the page: prefixes of the metrics to plot as lines."""


def workspace(entity: str, project: str) -> Any:
    """Return the workspace, not yet saved. Raises `UserError` if the extra `wandb` is missing."""
    try:
        import wandb_workspaces.reports.v2 as blocks
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise UserError("--wandb needs the extra 'wandb': pip install 'megaframe[wandb]'") from None
    panels: dict[str, list[Any]] = {
        "Training": [blocks.LinePlot(**given) for given in map(_line, PANELS) if given],
        "Pages": [blocks.MediaBrowser(title="The page of each run", media_keys=["dashboard"])],
        "Configs": [blocks.RunComparer(diff_only="split")],
    }
    sections = [
        workspaces.Section(name=name, panels=of, is_open=True) for name, of in panels.items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def save(entity: str, project: str) -> str:
    """Save the workspace in the project, and return its URL. Raises `UserError` if that fails."""
    made = workspace(entity, project)
    import wandb

    try:
        return str(made.save().url)
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise UserError(f"the workspace of {entity}/{project} was not saved: {error}") from None


def _line(panel: Panel) -> dict[str, Any]:
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
