"""What bounds the operators and the transfers of a layout, and which size would lift the bound."""

from __future__ import annotations

import math

from megaframe.hardware.cluster import Cluster
from megaframe.planner.constants import Constants
from megaframe.planner.explanations.explanation import Cell, Explanation
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.layout_sizes import make_layout_sizes
from megaframe.planner.machine import Machine
from megaframe.planner.rooflines import (
    CommunicationRoofline,
    OperatorRoofline,
    compute_communication_rooflines,
    compute_operator_rooflines,
)
from megaframe.planner.theory.roofline import (
    find_hiding_batch,
    find_hiding_seq,
    find_hiding_tensor_size,
)

_HEAD = ("operator, or axis", "over", "FLOP a byte", "ridge", "bound by", "at the ridge with")


def explain_roofline(choice: LayoutChoice, cluster: Cluster, constants: Constants) -> Explanation:
    """Return the rooflines of a layout.

    Args:
        choice: The layout.
        cluster: Chips and links.
        constants: What kernels and collectives reach there.
    """
    config, layout = choice.config, choice.layout
    sizes = make_layout_sizes(config.parallel, config.train, layout)
    machine = Machine(config, cluster, constants, sizes)
    operators = tuple(compute_operator_rooflines(machine))
    links = tuple(compute_communication_rooflines(config, layout, cluster, constants))
    hiding_sizes = [_find_hiding_size(link, choice, cluster, constants) for link in links]
    rate, chip = machine.linear, cluster.chip.name
    lines = [
        f"Ridge of memory: R = FLOP/s / bytes/s = {rate.flops / 1e12:.4g} T / "
        f"{rate.read / 1e9:.4g} G = {rate.flops / rate.read:.4g} FLOP a byte, by what products "
        f"reach on a {chip}; attention reaches {rate.attention / 1e12:.4g} TFLOP/s.",
        "A product of m rows, k terms and n results has 2 m n k FLOPs and moves "
        "w (m k + k n + m n) bytes, so it is at R with m = R w k n / (2 k n - R w (k + n)) rows.",
        _describe_memory_bound(operators, float(machine.tokens)),
        *map(_explain_link, links, hiding_sizes),
    ]
    rows = [*map(_make_operator_row, operators), *map(_make_link_row, links, hiding_sizes)]
    title = f"Roofline of {layout}, a microbatch of {float(machine.tokens):,.0f} tokens a rank"
    return Explanation(title, tuple(lines), _HEAD, tuple(rows))


def _describe_memory_bound(operators: tuple[OperatorRoofline, ...], tokens: float) -> str:
    under = [each.operator for each in operators if not each.is_compute_bound]
    named = ", ".join(under) if under else "no product"
    return (
        f"Under the ridge of memory with {tokens:,.0f} tokens: {named}; and at any size norms, "
        "activations, residuals and the update, which have a few FLOPs for each value they move."
    )


def _make_operator_row(roofline: OperatorRoofline) -> tuple[Cell, ...]:
    if roofline.tokens is not None:
        reached = f"{math.ceil(roofline.tokens):,} tokens a microbatch and rank"
    elif roofline.seq is not None:
        reached = f"train.seq={math.ceil(roofline.seq)}"
    else:
        reached = "no size"
    bound = "compute" if roofline.is_compute_bound else "memory"
    return roofline.operator, "memory", roofline.intensity, roofline.ridge, bound, reached


def _make_link_row(link: CommunicationRoofline, size: str | None) -> tuple[Cell, ...]:
    bound = "compute" if link.is_compute_bound else "link"
    return link.axis, link.tier, link.intensity, link.ridge, bound, size or "no size"


def _find_hiding_size(
    link: CommunicationRoofline, choice: LayoutChoice, cluster: Cluster, constants: Constants
) -> str | None:
    """Return the nearest valid size at which compute is as long as the transfers of an axis; None
    if no size of the run changes which is longer."""
    train, layout = choice.config.train, choice.layout
    if link.axis == "data" and choice.config.parallel.zero < 2:
        samples = train.microbatch * layout.data
        batch = find_hiding_batch(link.intensity, link.ridge, train.global_batch)
        return f"train.global_batch={math.ceil(batch / samples) * samples}"
    if link.axis == "data":
        microbatch = find_hiding_batch(link.intensity, link.ridge, train.microbatch)
        return f"train.microbatch={math.ceil(microbatch)}"
    if link.axis == "tensor":
        ranks = find_hiding_tensor_size(link.intensity, link.ridge, layout.tensor)
        return f"parallel.tensor={math.floor(ranks)} at most"
    if link.axis == "context":
        seq = _find_context_seq(link, choice, cluster, constants)
        if seq is None:
            return None
        return f"train.seq={math.ceil(seq)}" if seq > 1 else "any train.seq"
    return None


def _find_context_seq(
    link: CommunicationRoofline, choice: LayoutChoice, cluster: Cluster, constants: Constants
) -> float | None:
    """Return the tokens of a sample at which the compute of a context rank is as long as what it
    sends; None if longer samples do not help."""
    config = choice.config
    longer = config.replace(train={"seq": 2 * config.train.seq})
    links = compute_communication_rooflines(longer, choice.layout, cluster, constants)
    doubled = next(each for each in links if each.axis == "context")
    return find_hiding_seq(config.train.seq, link.intensity, doubled.intensity, link.ridge)


_FORMULAS = {
    "data": "What data ranks exchange is the same for any batch and compute grows with it, so the "
    "link is the limit below B R / I",
    "tensor": "A rank of t has 1/t of the FLOPs and moves (t-1)/t of the rows, so the link is the "
    "limit above t = 1 + I (t0 - 1) / R",
    "context": "The FLOPs of a token grow with the length of its sample, and the bytes do not",
    "expert": "The FLOPs and the bytes of a token are the same for any batch, so only fewer or "
    "nearer experts, or parallel.expert_overlap, change it",
}


def _explain_link(link: CommunicationRoofline, size: str | None) -> str:
    verdict = "compute hides the transfers" if link.is_compute_bound else "the link is the limit"
    reached = f"; both are equal at {size}" if size else ""
    return (
        f"{link.axis} over {link.tier}: I = {link.intensity:.4g} FLOP a byte, R = "
        f"{link.ridge:.4g}: {verdict}{reached}. {_FORMULAS[link.axis]}."
    )
