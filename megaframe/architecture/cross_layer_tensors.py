"""What parts of a model hand to later layers besides the stream: inputs of layers, and keys and
values that several layers attend to. Between pipeline stages it travels in one message with the
stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.block import describe_block, find_key_sources
from megaframe.architecture.layer_embedding import name_layer_embedding
from megaframe.config import ModelConfig

EMBEDDING = -1
"""In place of a layer's number, the embedding."""


@dataclass(frozen=True)
class HandedTensor:
    """A tensor with a row of the stream's, or a head, for each token.

    Attributes:
        name: In the model.
        source: Number of the layer that makes it, or `EMBEDDING`.
        last: Of the last layer that takes it.
        width: Elements of a row, or of a head.
        heads: Of a token, which tensor ranks divide or share; None for rows of the stream's.
    """

    name: str
    source: int
    last: int
    width: int
    heads: int | None = None

    def crosses(self, layer: int) -> bool:
        """Return whether it is needed in a layer or later, and made before."""
        return self.source < layer <= self.last

    def count_elements(self, tensor: int) -> int:
        """Return its elements per token, summed over tensor ranks. With fewer heads than ranks,
        neighbours have the same one."""
        return self.width * (1 if self.heads is None else max(self.heads, tensor))

    def find_shape(self, samples: int, tokens: int, rows: int, tensor: int) -> tuple[int, ...]:
        """Return the shape that a rank has.

        Args:
            samples: Of a microbatch.
            tokens: Of a sample on this context rank.
            rows: Of the stream on this tensor rank.
            tensor: Number of tensor ranks.
        """
        if self.heads is None:
            return rows, self.width
        return samples, tokens, max(1, self.heads // tensor), self.width


def name_keys(block: str) -> tuple[str, str]:
    """Return the names of the keys and of the values that a block hands on, from its own."""
    return f"{block}.keys", f"{block}.values"


@lru_cache(maxsize=256)
def list_handed_tensors(model: ModelConfig) -> tuple[HandedTensor, ...]:
    """Return all that is handed to later layers, in the order in which it is made."""
    if model.emulate is not None:
        return ()
    last_of: dict[int, int] = {}
    for layer, source in enumerate(find_key_sources(model)):
        if source is not None:
            last_of[source] = layer
    handed = [
        HandedTensor(
            name_layer_embedding(f"blocks.{layer}"), EMBEDDING, layer, model.layer_embeddings
        )
        for layer in range(model.layers if model.layer_embeddings else 0)
        if model.layer_embeddings
    ]
    for source, last in sorted(last_of.items()):
        mixer = describe_block(model, source).mixer
        assert isinstance(mixer, AttentionDescription), "only attention hands on keys"
        for name, width in zip(
            name_keys(f"blocks.{source}"), (mixer.head_dim, mixer.value_dim), strict=True
        ):
            handed.append(HandedTensor(name, source, last, width, mixer.kv_heads))
    return tuple(handed)


def list_crossing_tensors(model: ModelConfig, layer: int) -> tuple[HandedTensor, ...]:
    """Return what a message between two stages has besides the stream, if the second one begins
    with this layer."""
    return tuple(tensor for tensor in list_handed_tensors(model) if tensor.crosses(layer))


def count_message_elements(model: ModelConfig, layer: int, tensor: int) -> int:
    """Return the elements per token, summed over tensor ranks, of a message between two stages of
    which the second one begins with this layer."""
    handed = list_crossing_tensors(model, layer)
    return model.hidden + sum(each.count_elements(tensor) for each in handed)


def count_mean_message_elements(model: ModelConfig) -> float:
    """Return the elements per token of a message on average over all places where a stage may
    begin, with one tensor rank."""
    counts = [count_message_elements(model, layer, 1) for layer in range(1, model.layers)]
    return sum(counts) / len(counts) if counts else float(model.hidden)
