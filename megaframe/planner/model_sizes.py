"""Models of one shape in many sizes: the number of layers is the dial, the widths follow."""

from __future__ import annotations

from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.config.model import ModelConfig
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.planner.parameter_counts import RankParameters, count_rank_parameters

_FFN_MULTIPLE = 64
"""Inner widths are multiples of this, which tiles of products and tensor ranks divide."""


def count_model_parameters(config: RunConfig) -> RankParameters:
    """Return the parameters of the whole model of a config."""
    one_rank = {"tensor": 1, "pipeline": 1, "chunks": 1, "schedule": "1f1b"}
    alone = config.replace(parallel={**one_rank, "layers_per_stage": None})
    return count_rank_parameters(alone.model, alone.train, Layout(), plan_stages(alone))


def scale_model(model: ModelConfig, layers: int) -> ModelConfig:
    """Return a model with another number of layers and the proportions of this one: hidden / layers
    (Kaplan et al. 2020, section 3.1: the loss hardly depends on it), ffn / hidden, the width of a
    head, and query heads per key head.

    Args:
        model: A dense model.
        layers: Number of layers.

    Raises:
        UserError: The model has parts whose size does not follow from these.
    """
    for key in ("moe", "latent", "blocks", "emulate"):
        if getattr(model, key) is not None:
            raise UserError(
                f"model.{key} is set, and the widths of such a model do not follow from its "
                "number of layers; use a dense model, such as --config llama3-8b"
            )
    sharing = model.heads // model.kv_heads
    groups = max(1, round(model.heads * layers / model.layers / sharing))
    heads = groups * sharing
    hidden = max(1, model.hidden * heads // model.heads)
    ffn = round(model.ffn * hidden / model.hidden / _FFN_MULTIPLE)
    sizes = {"layers": layers, "heads": heads, "kv_heads": groups, "hidden": hidden}
    return model.model_copy(update={**sizes, "ffn": max(1, ffn) * _FFN_MULTIPLE})
