"""The waterfall: what each loss costs in shares of the peak, from the whole peak down to the MFU.

A second without matrix products costs a second's share of the peak, whatever caused it, so the
losses and the MFU sum to exactly one. A wait for ranks that came late is charged to these ranks,
because it would be the same on a network of any speed.
"""

from __future__ import annotations

from collections.abc import Mapping

COMMUNICATION = "communication/"


def attribute_losses(
    parts: Mapping[str, float],
    *,
    mfu: float | None,
    recompute: float = 0.0,
    stragglers: float = 0.0,
) -> dict[str, float]:
    """Return the share of the peak that each cause loses, in the order in which they are drawn.

    Args:
        parts: Seconds of a step, as a timer splits them.
        mfu: As a share; if it is None, because the peak is unknown, `compute` stands for what is
            left.
        recompute: Share of the hardware's operations that are recompute.
        stragglers: Seconds that the mean rank waits for late ranks, part of its waits for
            transfers.
    """
    seconds = sum(parts.values())
    if seconds <= 0:
        return {}
    waiting = sum(spent for part, spent in parts.items() if part.startswith(COMMUNICATION))
    late = min(max(0.0, stragglers), waiting)
    share_in_time = 1.0 - late / waiting if waiting else 1.0
    lost = {"recompute": parts.get("compute", 0.0) * recompute}
    for part, spent in parts.items():
        if part.startswith(COMMUNICATION):
            lost[part] = spent * share_in_time
        elif part != "compute":
            lost[part] = spent
    lost["stragglers"] = late
    shares = {cause: spent / seconds for cause, spent in lost.items()}
    remaining = 1.0 - sum(shares.values())
    return (
        {"compute": remaining, **shares} if mfu is None else {"kernels": remaining - mfu, **shares}
    )
