"""What parts of a model hand to later layers besides the stream: inputs of layers, keys and values
that several layers attend to, and the numbers of chosen keys. Between pipeline stages it travels in
one message with the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.layer_embedding import name_layer_embedding
from megaframe.architecture.model_blocks import describe_block, find_sources
from megaframe.architecture.sparse_attention import INDEX_BYTES, SparseAttentionDescription
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
        is_choice: Whether its elements are the numbers of keys, which have no gradients.
    """

    name: str
    source: int
    last: int
    width: int
    heads: int | None = None
    is_choice: bool = False

    def crosses(self, layer: int) -> bool:
        """Return whether it is needed in a layer or later, and made before."""
        return self.source < layer <= self.last

    def count_elements(self, tensor: int) -> int:
        """Return its elements per token, summed over tensor ranks. With fewer heads than ranks,
        neighbours have the same one."""
        return self.width * (1 if self.heads is None else max(self.heads, tensor))

    def count_bytes(self, tensor: int, element_bytes: int) -> int:
        """Return its bytes per token, summed over tensor ranks.

        Args:
            tensor: Number of tensor ranks.
            element_bytes: Those of an element of the stream.
        """
        size = INDEX_BYTES if self.is_choice else element_bytes
        return self.count_elements(tensor) * size

    def count_message_elements(self, tensor: int, element_bytes: int) -> int:
        """Return how many elements of the stream's type a message has in its place: for a number
        one, or several smaller ones. The arguments are those of `count_bytes`."""
        per_number = max(1, INDEX_BYTES // element_bytes) if self.is_choice else 1
        return self.count_elements(tensor) * per_number

    def count_received_bytes(self, tensor: int, element_bytes: int) -> int:
        """Return the bytes per token that a stage keeps after it has received a message: that
        part of it, and a copy of numbers if elements do not have their size."""
        in_message = self.count_message_elements(tensor, element_bytes) * element_bytes
        is_copied = self.is_choice and element_bytes != INDEX_BYTES
        return in_message + self.count_bytes(tensor, element_bytes) * is_copied

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


def name_choice(block: str) -> str:
    """Return the name of the choice of keys that a block hands on, from its own."""
    return f"{block}.choice"


@lru_cache(maxsize=256)
def list_handed_tensors(model: ModelConfig) -> tuple[HandedTensor, ...]:
    """Return all that is handed to later layers, in the order in which it is made."""
    if model.emulate is not None:
        return ()
    last_of: dict[int, int] = {}
    for layer, source in enumerate(find_sources(model)):
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
        mixer, block = describe_block(model, source).mixer, f"blocks.{source}"
        if isinstance(mixer, AttentionDescription):
            widths = mixer.head_dim, mixer.value_dim
            for name, width in zip(name_keys(block), widths, strict=True):
                handed.append(HandedTensor(name, source, last, width, mixer.kv_heads))
        elif isinstance(mixer, SparseAttentionDescription) and mixer.hands_choice:
            width = mixer.indexer.top_k
            handed.append(HandedTensor(name_choice(block), source, last, width, is_choice=True))
    return tuple(handed)


def list_crossing_tensors(model: ModelConfig, layer: int) -> tuple[HandedTensor, ...]:
    """Return what a message between two stages has besides the stream, if the second one begins
    with this layer."""
    return tuple(tensor for tensor in list_handed_tensors(model) if tensor.crosses(layer))


def count_message_elements(
    model: ModelConfig, layer: int, tensor: int, element_bytes: int, *, backward: bool = False
) -> int:
    """Return the elements per token, summed over tensor ranks, of a message between two stages.

    Args:
        model: The section `model`.
        layer: With which the second one begins.
        tensor: Number of tensor ranks.
        element_bytes: Bytes of an element.
        backward: Whether it is the message with gradients, which goes to the first one.
    """
    handed = [
        each.count_message_elements(tensor, element_bytes)
        for each in list_crossing_tensors(model, layer)
        if not (backward and each.is_choice)
    ]
    return model.stream_width + sum(handed)


def count_mean_message_elements(model: ModelConfig, element_bytes: int) -> float:
    """Return the elements per token of a message on average over all places where a stage may
    begin, with one tensor rank."""
    counts = [
        count_message_elements(model, layer, 1, element_bytes) for layer in range(1, model.layers)
    ]
    return sum(counts) / len(counts) if counts else float(model.stream_width)
