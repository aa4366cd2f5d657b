"""What the theory says of a plan: sentences with their formulas, and a table of numbers each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megaframe.hardware.cluster import Cluster
from megaframe.planner.constants import Constants
from megaframe.planner.explanations.collectives import explain_collectives
from megaframe.planner.explanations.explanation import Explanation
from megaframe.planner.explanations.failures import explain_failures
from megaframe.planner.explanations.roofline import explain_roofline
from megaframe.planner.explanations.scaling import explain_scaling
from megaframe.planner.layout_search import LayoutChoice

__all__ = ["EXPLANATIONS", "Explanation"]

Explainer = Callable[[LayoutChoice, Cluster, Constants], Explanation]

EXPLANATIONS: Mapping[str, tuple[Explainer, str]] = {
    "scaling": (explain_scaling, "what more GPUs gain, with the same batch and a growing one"),
    "collectives": (explain_collectives, "the time of collectives by algorithm and size"),
    "roofline": (explain_roofline, "which operators and links bound the step, and up to what size"),
    "failures": (explain_failures, "how often the run fails, and Daly's interval between saves"),
}
"""For each word of the command line the function, and what it explains."""
