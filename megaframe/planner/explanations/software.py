"""What other trainers would take on the layout of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.hardware.cluster import Cluster
from megaframe.planner.constants import Constants
from megaframe.planner.explanations.explanation import Explanation
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.trainers import predict_trainers


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
        UserError: There is no such trainer.
    """
    others = predict_trainers(names, choice.config, choice.layout, cluster, constants)
    ours = choice.prediction
    rows = [
        (name, step, other.tokens_per_second, other.mfu, step / ours.step_seconds)
        for name, other in {"megaframe": ours, **others}.items()
        for step in (other.step_seconds,)
    ]
    return Explanation(
        "Other trainers on the same layout",
        (
            "These are predictions, not measurements: what each trainer overlaps, fuses and keeps "
            "is declared by its papers and sources; its memory and numerics are not considered.",
        ),
        ("software", "seconds", "tokens/s", "MFU", "of our time"),
        tuple(rows),
    )
