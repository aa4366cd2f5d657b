"""A plan as a record for JSON."""

from __future__ import annotations

from collections.abc import Mapping

from megaframe.planner.advice import describe_alternatives, describe_decision
from megaframe.planner.candidates import SEARCHED_KEYS, SearchSpace
from megaframe.planner.explanations import Explanation
from megaframe.planner.island_advice import list_reasons
from megaframe.planner.layout_search import LayoutChoice, SearchResult


def make_plan_record(
    space: SearchSpace,
    choice: LayoutChoice,
    result: SearchResult | None,
    explanations: Mapping[str, Explanation],
) -> dict[str, object]:
    """Return the plan for JSON.

    Args:
        space: The run and the GPUs that were asked for.
        choice: The layout.
        result: The search that found it; None if the layout was given.
        explanations: What was asked to be explained, by name.
    """
    prediction = choice.prediction
    record: dict[str, object] = {
        "cluster": space.cluster.name,
        "gpus": space.gpus,
        "layout": select_layout_keys(choice),
        "memory_bytes": dict(prediction.memory_bytes),
        "host_bytes": prediction.host_bytes,
        "step_seconds": prediction.step_seconds,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "tflops_per_gpu": prediction.tflops_per_gpu,
        "tokens_per_second": prediction.tokens_per_second,
        "breakdown": dict(prediction.breakdown),
        "fits": prediction.fits,
        "reasons": list(list_reasons(choice, space.cluster)),
    }
    record |= {name: explanation.to_record() for name, explanation in explanations.items()}
    if result is not None:
        record["considered"] = len(result.candidates)
        record["seconds"] = result.seconds
        record["decision"] = list(describe_decision(result, space.cluster))
        record["alternatives"] = list(describe_alternatives(result, space.cluster))
        record["choices"] = [
            {
                "layout": select_layout_keys(ranked),
                "step_seconds": ranked.prediction.step_seconds,
                "memory_bytes": sum(ranked.prediction.memory_bytes.values()),
            }
            for ranked in result.choices
        ]
    return record


def select_layout_keys(choice: LayoutChoice) -> dict[str, object]:
    """Return the keys of the config that determine its layout, with their values."""
    parallel = {
        name: getattr(choice.config.parallel, name)
        for name in SEARCHED_KEYS
        if hasattr(choice.config.parallel, name)
    }
    parallel["data"] = choice.layout.data
    train = choice.config.train
    return {**parallel, "microbatch": train.microbatch, "recompute": train.recompute}
