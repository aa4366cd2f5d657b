"""Checks of what the axes divide: every layer's description is asked what its limits are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from megaframe.architecture.block import BlockDescription
from megaframe.architecture.embedding import describe_layer_embeddings, describe_token_table
from megaframe.architecture.layer import iterate_linears
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.quantised import find_block_mistakes
from megaframe.architecture.spec import count_copies
from megaframe.config.data import DataConfig
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig


def find_limit_mistakes(
    model: ModelConfig, parallel: ParallelConfig, data: DataConfig
) -> Iterator[str]:
    """Yield a message, each once, for each layer that the ranks of an axis cannot divide.

    Args:
        model: The section `model`.
        parallel: The section `parallel`.
        data: The section `data`.
    """
    seen: set[str] = set()
    for place, block in _list_blocks(model):
        for layer in block.layers:
            for message in layer.find_mistakes(parallel):
                if message not in seen:
                    seen.add(message)
                    yield place + message
        if len({mixer.name for mixer in block.mixers}) < len(block.mixers):
            yield (
                f"{place.removesuffix(': ')}.second_mixer has parameters of the same names as the "
                f"mixer, {block.mixer.name}; use mixers of different kinds"
            )
        for mixer in block.mixers:
            if data.reset_attention and not mixer.sees_documents:
                yield (
                    f"{place}data.reset_attention=true keeps documents apart, which {mixer.label} "
                    "does not; use data.reset_attention=false, or give its forward an argument "
                    "`documents`"
                )
    if model.vocab is not None:
        layer_embeddings = describe_layer_embeddings(model)
        tables = [describe_token_table(model)]
        tables += [] if layer_embeddings is None else [layer_embeddings.tokens]
        for limit in dict.fromkeys(limit for table in tables for limit in table.limits):
            yield from limit.find_mistakes(parallel)
    yield from _find_copy_mistakes(model, parallel)
    yield from _find_quantisation_mistakes(model, parallel)


@lru_cache(maxsize=64)
def _list_blocks(model: ModelConfig) -> tuple[tuple[str, BlockDescription], ...]:
    """Return all kinds of blocks, with their place in the config. Kept, because a search asks for
    thousands of layouts of a model."""
    if model.blocks is None:
        kinds = dict.fromkeys(describe_block(model, layer) for layer in range(model.layers))
        return tuple(("", block) for block in kinds)
    blocks, layer = [], 0
    for number, block in enumerate(model.blocks):
        blocks.append((f"model.blocks.{number}: ", describe_block(model, layer)))
        layer += block.repeat
    return tuple(blocks)


def _find_quantisation_mistakes(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a message, each once, if ranks cut matrices within blocks that are coded together."""
    if model.adapters is None or model.adapters.quantize_base is None:
        return
    layers = (layer for _, block in _list_blocks(model) for layer in block.layers)
    linears = (each for layer in layers for each in iterate_linears(layer, layer.name))
    messages = (find_block_mistakes(name, linear, parallel) for name, linear in linears)
    yield from dict.fromkeys(chain.from_iterable(messages))


def _find_copy_mistakes(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a message if blocks divide their groups of heads differently over tensor ranks."""
    blocks = _list_blocks(model)
    groups = {mixer.shared_groups for _, block in blocks for mixer in block.mixers}
    tensor = parallel.tensor
    fewer = sorted(group for group in groups if count_copies(group, tensor) > 1)
    if len(fewer) > 1:
        yield (
            f"model.blocks has mixers with {' and '.join(map(str, fewer))} groups of heads, "
            f"which parallel.tensor={tensor} ranks would share in different groups; use "
            f"parallel.tensor={fewer[1]} or fewer"
        )
