"""What layers hand to later ones: which tensors there are, and between which stages they travel.

Tests `megaframe.architecture.shared_keys` and `megaframe.architecture.layer_embedding`.
"""

import pytest

from megaframe.architecture.block import find_key_sources
from megaframe.architecture.cross_layer_tensors import (
    EMBEDDING,
    count_mean_message_elements,
    count_message_elements,
    list_crossing_tensors,
    list_handed_tensors,
)
from megaframe.config import ModelConfig, load


@pytest.fixture(scope="module")
def e2b():
    return load("gemma4-e2b", []).model


def test_the_last_layers_of_gemma4_have_the_keys_of_the_last_of_each_kind(e2b):
    sources = find_key_sources(e2b)
    assert sources == (None,) * 15 + (13, 13, 13, 13, 14) * 4


def test_messages_have_what_is_needed_later_and_made_before(e2b):
    """Inputs of 256 elements for all layers that follow, and keys and values of heads of 256 and of
    512, with which two tensor ranks both have the only head."""
    before = {layer: 1536 + 256 * (35 - layer) for layer in range(35)}
    keys = dict.fromkeys(range(14, 34), 2 * 256) | {34: 0}
    of_full = dict.fromkeys(range(15, 35), 2 * 512)
    for layer in range(35):
        shared = keys.get(layer, 0) + of_full.get(layer, 0)
        assert count_message_elements(e2b, layer, 1) == before[layer] + shared
        assert count_message_elements(e2b, layer, 2) == before[layer] + 2 * shared
    assert count_message_elements(e2b, 35, 1) == 1536
    mean = sum(count_message_elements(e2b, layer, 1) for layer in range(1, 35)) / 34
    assert count_mean_message_elements(e2b) == pytest.approx(mean)


def test_shapes_are_those_of_a_rank():
    blocks = [{"mixer": {"kv_heads": 2, "v_head_dim": 3}}, {"mixer": {"shared_keys": True}}]
    blocks[1]["mixer"] |= {"kv_heads": 2, "v_head_dim": 3}
    model = ModelConfig(layers=2, hidden=16, heads=4, blocks=blocks, layer_embeddings=6)
    tensors = {tensor.name: tensor for tensor in list_handed_tensors(model)}
    assert [*tensors] == [
        *("blocks.0.embedding", "blocks.1.embedding"),
        *("blocks.0.keys", "blocks.0.values"),
    ]
    sizes = {"samples": 2, "tokens": 5, "rows": 7}
    assert tensors["blocks.1.embedding"].find_shape(**sizes, tensor=2) == (7, 6)
    assert tensors["blocks.0.keys"].find_shape(**sizes, tensor=2) == (2, 5, 1, 4)
    assert tensors["blocks.0.values"].find_shape(**sizes, tensor=4) == (2, 5, 1, 3)
    assert [t.source for t in tensors.values()] == [EMBEDDING, EMBEDDING, 0, 0]
    crossing = [tensor.name for tensor in list_crossing_tensors(model, 1)]
    assert crossing == ["blocks.1.embedding", "blocks.0.keys", "blocks.0.values"]
    assert list_handed_tensors(ModelConfig(emulate={}, layer_embeddings=6)) == ()
