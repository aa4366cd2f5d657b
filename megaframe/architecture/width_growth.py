"""How the inputs and outputs of each parameter grow with the width of the model.

They are found by describing the model once more with twice the width and comparing shapes, so no
layer says anything of its own, and those of extensions are covered. The wider model has twice the
`hidden`, and twice the numbers of heads and inner widths; everything else is the same: widths of
heads, latents, experts, words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

from megaframe.architecture.embedding import describe_embedding, describe_head
from megaframe.architecture.model_blocks import describe_block, describe_norm
from megaframe.architecture.parametrisation import compute_output_multiplier, compute_width_growth
from megaframe.architecture.predictor import describe_predictor
from megaframe.architecture.spec import Growth, ParamSpec
from megaframe.config.model import ModelConfig
from megaframe.config.section import Section

_GROWING = ("hidden", "heads", "kv_heads", "key_heads", "value_heads", "ffn")
"""Keys of `model` and of parts of its blocks, also those of extensions, that grow with the
width."""
_SectionType = TypeVar("_SectionType", bound=Section)


@lru_cache(maxsize=64)
def measure_growths(model: ModelConfig) -> Mapping[str, Growth]:
    """Return how much each parameter has grown from the base model, by its name.

    Args:
        model: The section `model`, with `parametrisation` mup.
    """
    pairs = zip(_declare_parameters(model), _declare_parameters(_widen_model(model)), strict=True)
    return {spec.name: _compare(model, spec, wider) for spec, wider in pairs}


def _compare(model: ModelConfig, spec: ParamSpec, wider: ParamSpec) -> Growth:
    """Return the growth of a parameter, which the wider model has as `wider`."""
    assert spec.name == wider.name, "a wider model has the same parameters"
    width, dims = compute_width_growth(model), len(spec.shape)
    if spec.role == "head":
        return Growth(inputs=width, multiplier=compute_output_multiplier(model))
    # A table has one input, the row that is looked up, and a vector has none.
    first_input = dims - spec.inputs if spec.role == "matrix" else dims
    first_output = dims - 1 if spec.role == "embedding" else 0

    def grow(start: int, stop: int) -> float:
        ratio = math.prod(_find_ratio(spec, wider, dim) for dim in range(start, stop))
        return float(width ** math.log2(ratio))

    return Growth(grow(first_input, dims), grow(first_output, first_input))


def _find_ratio(spec: ParamSpec, wider: ParamSpec, dim: int) -> float:
    """Return by how much a dim of the wider model is larger; of several matrices in one, that which
    grows most."""
    sizes, wider_sizes = (s.fused.get(dim, (s.shape[dim],)) for s in (spec, wider))
    if len(sizes) != len(wider_sizes):
        sizes, wider_sizes = (spec.shape[dim],), (wider.shape[dim],)
    return max(b / a for a, b in zip(sizes, wider_sizes, strict=True))


def _declare_parameters(model: ModelConfig) -> Iterator[ParamSpec]:
    """Yield the specs of the whole model."""
    yield from describe_embedding(model, 1).declare_parameters("embedding")
    layers = 0 if model.emulate is not None else model.layers
    for layer in range(layers):
        yield from describe_block(model, layer).declare_parameters(f"blocks.{layer}")
    for index in range(model.mtp_depth):
        predictor, block = describe_predictor(model, index), f"blocks.{model.layers + index}"
        yield from predictor.declare_parameters(f"predictors.{index}", block)
    yield from describe_head(model, describe_norm(model)).declare_parameters("head")


def _widen_model(model: ModelConfig) -> ModelConfig:
    """Return the model of twice the width."""
    blocks = model.blocks
    if blocks is not None:
        parts = ("mixer", "second_mixer", "feed_forward")
        blocks = tuple(
            block.model_copy(update={part: _widen(getattr(block, part)) for part in parts})
            for block in blocks
        )
    moe = model.moe if model.moe is None else _widen(model.moe)
    return _widen(model).model_copy(update={"blocks": blocks, "moe": moe})


def _widen(section: _SectionType) -> _SectionType:
    """Return a section in which whatever grows with the width is twice as large."""
    keys = [key for key in _GROWING if isinstance(getattr(section, key, None), int)]
    return section.model_copy(update={key: 2 * getattr(section, key) for key in keys})
