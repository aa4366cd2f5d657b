"""Moved: bytes that a rank hands to collectives and links in a step, by axis, in closed form.

What is summed for a number or two (norms, losses, counts) is left out: it is a millionth of the
rest. Gradients and values count with the padding to whole parts left out as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.plan.chips import WIDTH
from megaframe.plan.experts import has_mlp
from megaframe.plan.held import held
from megaframe.plan.matrices import latent_width
from megaframe.plan.stages import StagePlan, stage_layers
from megaframe.schedule import Action, Kind

_SENDS = (Kind.SEND_F, Kind.SEND_B)


def moved(
    config: RunConfig, layout: Layout, plans: Sequence[StagePlan], actions: Sequence[Action]
) -> Mapping[str, float]:
    """Bytes over `tensor`, `data` and `pipeline` of a rank with these stages and lowered actions.

    data: everything that gradients and values of dense parameters travel over, context ranks among
    them; at ZeRO 3 as if every pass brought every value, which the blocks that stay spare.
    """
    train, tensor = config.train, layout.tensor
    width = WIDTH[train.precision]
    tokens = train.microbatch * train.seq / layout.context
    stream = tokens * config.model.hidden * width
    many = len({a.microbatch for a in actions if a.microbatch is not None})
    sent = sum(action.kind in _SENDS for action in actions)
    share = (tensor - 1) / tensor
    later = Counter(action.stage for action in actions if action.kind is Kind.W)
    rows = sum(
        many * _of_stage(config, plan) + later[plan.number] * _for_weights(config, plan)
        for plan in plans
    )
    return {
        "tensor": share * rows * tokens * width,
        "pipeline": sent * stream / tensor,
        "data": _data(config, layout, plans, many),
    }


def _of_stage(config: RunConfig, plan: StagePlan) -> float:
    """Elements of a token that travel over tensor ranks: each of two linears of attention and of an
    MLP once in each direction, the input of one gathered again in backward, and those of forward
    where a block runs again; at either end two more."""
    model, layers = config.model, stage_layers(config.model, plan)
    attention, latent = 5 * model.hidden, model.latent
    if latent is not None:
        whole = model.hidden * (latent.query_rank is None)
        attention = 2 * model.hidden + 3 * (whole + latent_width(latent)) - latent.rotary_dim
    depth = model.mtp_depth * plan.last  # each has both ends
    mlps = [has_mlp(model, layer) for layer in layers]
    again = 2 * model.hidden * (plan.recomputed + sum(mlps[: plan.recomputed]))
    ends = 2 * model.hidden * (plan.first + plan.last + 2 * depth)
    return len(layers) * attention + sum(mlps) * 5 * model.hidden + again + ends


def _for_weights(config: RunConfig, plan: StagePlan) -> int:
    """Elements of a token that travel again for a weight pass that comes later: of a linear of
    attention and of an MLP the gradients of what came of it."""
    model = config.model
    return model.hidden * sum(1 + has_mlp(model, layer) for layer in stage_layers(model, plan))


def _data(
    config: RunConfig, layout: Layout, plans: Sequence[StagePlan], microbatches: int
) -> float:
    """Gradients are reduced in master precision, or in bf16 where so asked, and values gathered."""
    ranks, zero = layout.data_shard * layout.context, config.parallel.zero
    width = WIDTH[config.train.precision]
    wire = 2 if config.parallel.reduce_precision == "bf16" else max(4, width)
    here = held(config, layout, plans)
    whole = sum(here.whole) + here.positions * (layout.tensor > 1)  # over these ranks as well
    vectors, rest = here.vectors, here.dense - here.vectors - whole
    share = (ranks - 1) / ranks
    if zero == 0:
        return 2 * wire * (vectors + rest) * share
    scatters = microbatches if zero >= 2 else 1
    gathers = 2 * microbatches if zero == 3 else 1
    return share * (rest * (scatters * wire + gathers * width) + vectors * (wire + width))
