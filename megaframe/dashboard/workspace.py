"""The panels of the page as a workspace of Weights & Biases, where any runs of a project meet.

Lines are its own plots of the same metrics. What has a number for each rank, and what it has no
plot for, is in the page itself, which a run leaves there when it ends.
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
"""Lines instead of what is drawn otherwise on the page: how names of their metrics begin."""


def workspace(entity: str, project: str) -> Any:
    """The workspace, not saved yet. Raises `UserError` when the extra for it is missing."""
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
    """Save it in the project; its address. Raises `UserError` when that cannot be done."""
    made = workspace(entity, project)
    import wandb

    try:
        return str(made.save().url)
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise UserError(f"the workspace of {entity}/{project} was not saved: {error}") from None


def _line(panel: Panel) -> dict[str, Any]:
    """What a plot of lines is made of, empty where there is none for this panel."""
    prefix = _INSTEAD.get(panel.id) or next((k for k in panel.keys if k.endswith("/")), None)
    if prefix is None and not panel.keys:
        return {}
    metrics = {"metric_regex": prefix + ".*"} if prefix else {"y": list(panel.keys)}
    parts = panel.id in ("waterfall", "time")
    # Its plots have no factor: what the page scales has the unit of the metric there.
    unit = {"title_y": panel.unit} if panel.unit and panel.scale == 1 and prefix is None else {}
    shape = {"plot_type": "stacked-area"} if parts else {}
    return {"title": panel.title, "log_y": panel.log or None, **metrics, **unit, **shape}
