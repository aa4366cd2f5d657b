"""What other trainers would take on the layout of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.hardware.cluster import Cluster
from megaframe.planner.constants import Constants
from megaframe.planner.explanations.explanation import Explanation
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.trainers import find_trainer, predict_trainers


def explain_software(
    choice: LayoutChoice, cluster: Cluster, constants: Constants, names: Sequence[str]
) -> Explanation:
    """Predict what other trainers would take on the same layout, beside ours.

    Args:
        choice: The layout, with our own prediction.
        cluster: Where it runs.
        constants: What kernels and collectives reach there.
        names: Keys of `trainers.TRAINERS`.

    Raises:
        UserError: There is no such trainer, or the chip cannot multiply as it does.
    """
    others = predict_trainers(names, choice.config, choice.layout, cluster, constants)
    ours = choice.prediction
    rows = [
        (name, step, other.tokens_per_second, other.mfu, step / ours.step_seconds)
        for name, other in {"megaframe": ours, **others}.items()
        for step in (other.step_seconds,)
    ]
    lines = [
        "These are predictions, not measurements: what each trainer overlaps, fuses and keeps is "
        "declared by its papers and sources; its memory and numerics are not considered."
    ]
    if any(find_trainer(name).scaling == "mxfp8" for name in names):
        lines.append(
            "megaframe has no mxfp8 (train.fp8 is tensor, row or block). Where a trainer has, "
            "products of blocks count at the chip's 8-bit peak and conversions as bytes moved; no "
            "published step with it was compared."
        )
    return Explanation(
        "Other trainers on the same layout",
        tuple(lines),
        ("software", "seconds", "tokens/s", "MFU", "of our time"),
        tuple(rows),
    )
