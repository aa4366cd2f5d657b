"""What cannot be handed from layer to layer is refused, with the numbers of both layers."""

import pytest

from megaframe.config import ModelConfig
from megaframe.validate.cross_layer_tensors import find_handed_mistakes

SHARED = {"shared_keys": True}
CHOICE = {"mixer": {"kind": "latent", "shared_indexer": True}}
SPARSE = {
    "latent": {"query_rank": 8, "kv_rank": 8, "head_dim": 4, "rotary_dim": 4, "value_dim": 4},
    "indexer": {"heads": 2, "head_dim": 4, "top_k": 5},
}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"blocks": [{"mixer": {**SHARED, "window": 3}}, {}]},
            "layer 0: shared_keys=true needs a layer before it with keys of its own and window=3",
        ),
        (
            {"blocks": [{}, {"mixer": {**SHARED, "kv_heads": 2}}]},
            "layer 1: shared_keys=true with kv_heads=2, and layer 0, whose keys it has, 12",
        ),
        (
            {"blocks": [{}, {"mixer": {**SHARED, "value_norm": True}}]},
            "leaves no key to which value_norm=true would apply; leave it out",
        ),
        (
            {"blocks": [{}, {"mixer": {**SHARED, "qk_norm": "whole"}}]},
            "qk_norm=whole is for queries and keys; use qk_norm=head or false",
        ),
        (
            {"blocks": [{"mixer": {"alibi": 8}}, {"mixer": SHARED}], "position": "none"},
            "cannot be combined with alibi=8 of layer 0",
        ),
        (
            {"blocks": [{"mixer": "mamba2", "second_mixer": SHARED}]},
            "layer 0: shared_keys=true is for the mixer of a block, not for its second_mixer",
        ),
        (
            {"blocks": [{}, {"mixer": SHARED}], "mtp_depth": 1},
            "model.mtp_depth=1 predicts with blocks to which nothing is handed",
        ),
        (
            {"blocks": [CHOICE, {"mixer": "latent"}], **SPARSE},
            "layer 0: shared_indexer=true needs a layer before it with an indexer of its own",
        ),
        (
            {"blocks": [{"mixer": "latent"}, CHOICE], "latent": SPARSE["latent"]},
            "layer 1: shared_indexer=true needs model.indexer; set it",
        ),
        (
            {"blocks": [{"mixer": "latent"}, CHOICE], **SPARSE, "mtp_depth": 1},
            "blocks to which nothing is handed, and shared_indexer needs it",
        ),
        (
            {"layer_embeddings": 8, "parametrisation": "mup"},
            "model.layer_embeddings=8 has widths that model.parametrisation=mup does not know",
        ),
        (
            {"layer_embeddings": 8, "mtp_depth": 2},
            "model.layer_embeddings=8 needs it; use model.mtp_depth",
        ),
        ({"layer_vocab": 8}, "model.layer_vocab=8 has no effect without model.layer_embeddings"),
    ],
)
def test_a_refusal_says_what_does_not_fit(model, message):
    mistakes = [*find_handed_mistakes(ModelConfig(layers=2, **model))]
    assert any(message in mistake for mistake in mistakes), mistakes


def test_what_fits_passes():
    blocks = [{"mixer": {"window": 3}}, {}, {"mixer": {**SHARED, "window": 3, "qk_norm": True}}]
    assert not [*find_handed_mistakes(ModelConfig(layers=3, blocks=blocks, layer_embeddings=4))]
    blocks = [{"mixer": "latent"}, CHOICE]
    assert not [*find_handed_mistakes(ModelConfig(layers=2, blocks=blocks, **SPARSE))]
