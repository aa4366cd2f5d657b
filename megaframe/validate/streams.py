"""Checks of several residual streams, and of what is added to a stream beside a mixer."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.blocks import NoLayerConfig
from megaframe.config.model import HyperConnectionsConfig, ModelConfig


def find_stream_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each key that `model.streams` does not know."""
    if model.streams is None:
        return
    several = f"model.streams.number={model.streams.number}"
    if model.parametrisation == "mup":
        yield (
            f"{several} has widths that model.parametrisation=mup does not know; use "
            "model.parametrisation=standard"
        )
    if model.mtp_depth:
        yield (
            f"model.mtp_depth={model.mtp_depth} predicts from one stream, and {several} makes "
            "others; use model.mtp_depth=0"
        )
    if not isinstance(model.streams, HyperConnectionsConfig):
        return
    if model.layer_embeddings is not None:
        yield (
            f"model.layer_embeddings={model.layer_embeddings} is added to one stream, and "
            f"{several} makes others; leave one of them out"
        )
    for number, block in enumerate(model.blocks or ()):
        if block.parallel != "none":
            yield (
                f"model.blocks.{number}.parallel={block.parallel} lets both halves start from one "
                f"stream, and each reads several with {several}; use parallel=none"
            )
        if block.laurel_rank is not None:
            yield (
                f"model.blocks.{number}.laurel_rank={block.laurel_rank} scales one stream, and "
                f"{several} makes others; leave one of them out"
            )


def find_laurel_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each block beside whose mixer nothing can be added."""
    for number, block in enumerate(model.blocks or ()):
        if block.laurel_rank is None:
            continue
        place = f"model.blocks.{number}.laurel_rank={block.laurel_rank}"
        if isinstance(block.mixer, NoLayerConfig):
            yield f"{place} adds beside a mixer, and mixer=none has none; leave it out"
        if block.parallel != "none":
            yield (
                f"{place} scales the stream between the halves, and parallel={block.parallel} has "
                "none; use parallel=none"
            )
        if model.parametrisation == "mup":
            yield (
                f"{place} has widths that model.parametrisation=mup does not know; use "
                "model.parametrisation=standard"
            )
