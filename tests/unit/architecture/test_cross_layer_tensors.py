"""What layers hand to later ones: which tensors there are, and between which stages they travel.

Tests `megaframe.architecture.shared_keys` and `megaframe.architecture.layer_embedding`.
"""

import pytest

from megaframe.architecture.cross_layer_tensors import (
    EMBEDDING,
    count_mean_message_elements,
    count_message_elements,
    list_crossing_tensors,
    list_handed_tensors,
)
from megaframe.architecture.model_blocks import find_sources
from megaframe.config import ModelConfig, load


@pytest.fixture(scope="module")
def e2b():
    return load("gemma4-e2b", []).model


def test_the_last_layers_of_gemma4_have_the_keys_of_the_last_of_each_kind(e2b):
    sources = find_sources(e2b)
    assert sources == (None,) * 15 + (13, 13, 13, 13, 14) * 4


def test_messages_have_what_is_needed_later_and_made_before(e2b):
    """Inputs of 256 elements for all layers that follow, and keys and values of heads of 256 and of
    512, with which two tensor ranks both have the only head."""
    before = {layer: 1536 + 256 * (35 - layer) for layer in range(35)}
    keys = dict.fromkeys(range(14, 34), 2 * 256) | {34: 0}
    of_full = dict.fromkeys(range(15, 35), 2 * 512)
    for layer in range(35):
        shared = keys.get(layer, 0) + of_full.get(layer, 0)
        assert count_message_elements(e2b, layer, 1, 2) == before[layer] + shared
        assert count_message_elements(e2b, layer, 2, 2) == before[layer] + 2 * shared
    assert count_message_elements(e2b, 35, 1, 2) == 1536
    mean = sum(count_message_elements(e2b, layer, 1, 2) for layer in range(1, 35)) / 34
    assert count_mean_message_elements(e2b, 2) == pytest.approx(mean)


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


def test_choices_of_keys_go_forward_only_and_need_four_bytes_a_number():
    """Of the tokens of a rank's rows, so that tensor ranks send each once. In fp64 a number takes
    an element; a stage has a copy of it as int32 beside what it has received."""
    latent = {"query_rank": 8, "kv_rank": 8, "head_dim": 4, "rotary_dim": 4, "value_dim": 4}
    shared = {"kind": "latent", "shared_indexer": True}
    model = ModelConfig(
        **{"layers": 4, "hidden": 16, "heads": 4, "latent": latent},
        indexer={"heads": 2, "head_dim": 4, "top_k": 5},
        blocks=[{"mixer": "latent"}, {"mixer": "latent"}, {"mixer": shared}, {"mixer": shared}],
    )
    (choice,) = list_handed_tensors(model)
    assert (choice.name, choice.source, choice.last) == ("blocks.1.choice", 1, 3)
    assert choice.find_shape(samples=2, tokens=7, rows=7, tensor=2) == (7, 5)
    for width, elements, received in ((2, 10, 40), (4, 5, 20), (8, 5, 60)):
        counts = [count_message_elements(model, layer, 2, width) for layer in range(5)]
        assert counts == [16, 16, 16 + elements, 16 + elements, 16]
        assert count_message_elements(model, 2, 2, width, backward=True) == 16
        assert choice.count_received_bytes(2, width) == received
        assert choice.count_bytes(2, width) == 20
    dense = model.model_copy(update={"indexer": model.indexer.model_copy(update={"dense": True})})
    assert list_handed_tensors(dense) == ()
