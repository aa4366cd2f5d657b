"""What `model.streams` does not know is refused by its key, and exports of several streams are."""

import pytest

from megaframe.checkpoint.convert.huggingface.families import find_fitting_families
from megaframe.config import ModelConfig
from megaframe.validate.streams import find_laurel_mistakes, find_stream_mistakes

STREAMS = {"streams": {"number": 2}}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"parametrisation": "mup"}, "number=2 has widths that model.parametrisation=mup does not"),
        ({"mtp_depth": 1}, "model.mtp_depth=1 predicts from one stream"),
        ({"layer_embeddings": 4}, "model.layer_embeddings=4 is added to one stream"),
        (
            {"blocks": [{}, {"parallel": "one_norm"}]},
            "model.blocks.1.parallel=one_norm lets both halves start from one stream",
        ),
        ({"blocks": [{"laurel_rank": 3}, {}]}, "model.blocks.0.laurel_rank=3 scales one stream"),
    ],
)
def test_a_refusal_names_the_key(model, message):
    mistakes = [*find_stream_mistakes(ModelConfig(layers=2, **STREAMS, **model))]
    assert len(mistakes) == 1 and message in mistakes[0]
    assert not [*find_stream_mistakes(ModelConfig(layers=2, **model))]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"blocks": [{}, {"mixer": "none"}]}, "model.blocks.1.laurel_rank=2 adds beside a mixer"),
        (
            {"blocks": [{"parallel": "two_norms"}, {}]},
            "model.blocks.0.laurel_rank=2 scales the stream",
        ),
        ({"blocks": [{}], "parametrisation": "mup"}, "model.parametrisation=mup does not know"),
    ],
)
def test_a_branch_of_low_rank_needs_a_mixer_and_what_follows(model, message):
    model = {**model, "blocks": [{**block, "laurel_rank": 2} for block in model["blocks"]]}
    mistakes = [*find_laurel_mistakes(ModelConfig(layers=2, **model))]
    assert mistakes and all(message in mistake for mistake in mistakes)


def test_no_family_has_several_streams():
    model = {"layers": 1, "norm": "rmsnorm", "activation": "swiglu", "vocab": 50}
    assert "llama" in find_fitting_families(ModelConfig(**model))
    assert not find_fitting_families(ModelConfig(**model, **STREAMS))
