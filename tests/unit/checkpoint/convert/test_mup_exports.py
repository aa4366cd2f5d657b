"""Exports of models in muP: factors of scores and logits are in what a family has, or named."""

import pytest
from slow_cases import slow
from transformers_models import assert_same_logits, make_random_checkpoint

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.convert.huggingface import model_folder as folders
from megaframe.errors import UserError

pytestmark = pytest.mark.numeric

SHAPE = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 24, "vocab": 61, "activation": "swiglu"}
SHAPE |= {"parametrisation": "mup", "mup_base_hidden": 8, "norm": "rmsnorm"}
LAYERNORM = {"norm": "layernorm", "bias": True, "activation": "gelu_tanh", "position": "learned"}


def export(path, family, **model):
    checkpoint = make_random_checkpoint(path / "own", **{**SHAPE, **model})
    with open_checkpoint(checkpoint) as opened:
        folders.export_model(opened, path / "theirs", "fp64", tokenizer="none", family=family)
    return checkpoint, path / "theirs"


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("llama", {"tie_embeddings": True}),
        slow("gpt2", {**LAYERNORM, "tie_embeddings": True}),  # the norm has a bias
        # Gains are stored less one.
        ("gemma", {"activation": "geglu", "embedding_scale": 32**0.5, "tie_embeddings": True}),
        ("granite", {"mup_base_head_dim": 4}),  # has keys for both factors
    ],
)
def test_logits_are_the_same_in_transformers(family, model, tmp_path):
    assert_same_logits(*export(tmp_path, family, **model))


def test_a_scale_of_scores_that_a_family_does_not_have_is_named(tmp_path):
    message = "mixer.score_scale=0.125 would become 0.25"
    with pytest.raises(UserError, match=message):
        export(tmp_path, "llama", mup_base_head_dim=4)


def test_a_last_norm_without_weights_is_named(tmp_path):
    with pytest.raises(UserError, match=r"mup multiplies logits by 0\.25, and olmo has no weights"):
        export(tmp_path, "olmo", norm="layernorm")
