"""Where sums of gradients wait for a slow tier, the islands that would not."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megaframe.config import RunConfig
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.machine import compute_axis_span, find_outermost_tier
from megaframe.planner.prediction import Prediction, predict
from megaframe.validate.sync import find_sync_mistakes

_FASTER = 4 / 3
"""Times as fast that a step must become before islands are proposed: a quarter of it waits for sums
of gradients. Below that, a larger batch or compression changes less of what is trained."""


def list_reasons(choice: LayoutChoice, cluster: Cluster) -> Iterator[str]:
    """Yield the reasons of a prediction, and islands if a tier is too slow without them."""
    yield from choice.prediction.reasons
    proposal = propose_islands(choice, cluster)
    if proposal is not None:
        yield proposal


def propose_islands(choice: LayoutChoice, cluster: Cluster) -> str | None:
    """Return a sentence that proposes islands, each inside the tier below the one that gradients
    wait for, and says why; None if they would gain little, or cannot be."""
    layout, before = choice.layout, choice.prediction
    tier = find_outermost_tier(cluster, *compute_axis_span("data", layout))
    inner = [each.size for each in cluster.tiers if each.size < tier.size]
    if layout.islands > 1 or layout.data == 1 or not inner:
        return None
    islands = _count_islands(layout, inner[-1])
    sync = {"compress": "int4", "delay": 0, "fragments": 1, "mix": None}
    # Replicas spare a slow tier, which islands do not use in a step.
    config = choice.config.replace(parallel={"islands": islands, "data_replicate": 1}, sync=sync)
    if islands == 1 or layout.expert_data % islands or any(find_sync_mistakes(config)):
        return None
    keys, after = _predict_hidden(config, layout.world, cluster)
    gain = before.step_seconds / after.step_seconds
    if gain < _FASTER or not after.fits:
        return None
    sentence = next(reason for reason in after.reasons if "islands synchronise" in reason)
    return (
        f"sums of gradients over {tier.name} are the limit; with {keys} a step would take "
        f"{after.step_seconds:.3g} s, {gain:.3g} times as fast: {sentence}. Islands are not data "
        "parallelism, and what they train depends on their number"
    )


def _count_islands(layout: Layout, ranks: int) -> int:
    """Return the fewest islands of at most so many ranks; as many as there are data ranks if none
    are that small."""
    divisors = (count for count in range(1, layout.data + 1) if layout.data % count == 0)
    return next((n for n in divisors if layout.world // n <= ranks), layout.data)


def _predict_hidden(config: RunConfig, world: int, cluster: Cluster) -> tuple[str, Prediction]:
    """Return the keys of islands that synchronise while the next steps run, for as many as it
    takes, and the prediction with them."""
    constants, every = get_cluster_constants(cluster), config.sync.every
    layout = Layout.from_parallel(config.parallel, world)
    waiting = predict(config, layout, cluster, constants)
    exposed = waiting.breakdown["islands"]
    delay = math.ceil(exposed * every / (waiting.step_seconds - exposed))
    keys = f"parallel.islands={layout.islands}, sync.every={every}, sync.compress=int4"
    if delay >= every:
        return keys, waiting
    hidden = config.replace(sync={"delay": delay})
    return f"{keys} and sync.delay={delay}", predict(hidden, layout, cluster, constants)
