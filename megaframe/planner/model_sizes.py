"""Models of one shape in many sizes: the number of layers is the dial, the widths follow."""

from __future__ import annotations

from megaframe.config.model import ModelConfig
from megaframe.errors import UserError

_FFN_MULTIPLE = 64
"""Inner widths are multiples of this, which tiles of products and tensor ranks divide."""


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
