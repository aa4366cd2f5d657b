"""What is refused of adapters, each with both numbers and what is valid."""

import pytest
from config_refusals import list_refusals
from random_runs import use_examples

from megaframe.config import RunConfig
from megaframe.config.registry import get_registry
from megaframe.validate.run import find_mistakes

MODEL = ["model.hidden=64", "model.heads=4", "model.layers=3"]
MOE = "model.moe={experts: 4, ffn: 8}"
REFUSALS = [
    (
        ["model.adapters.targets=[q_proj]"],
        ["targets=q_proj matches none of the 6 kinds of matrices"],
    ),
    (["model.adapters.targets=[querry]"], ["targets=querry", "nearest are", "query"]),
    (["model.adapters.rank=65"], ["rank=65 is above", "query, a matrix of 64 x 64"]),
    (["model.adapters.layers=[1,3]"], ["layers=3 is not a layer", "use 0 to 2"]),
    (["model.adapters.targets=[]"], ["targets=[] leaves nothing to train"]),
    ([MOE, "model.adapters.dropout=0.1"], ["dropout=0.1 is not for experts", "moe.experts.up"]),
    ([MOE, "model.adapters.dora=true"], ["dora=true is not for experts", "with moe.experts.up"]),
    ([MOE, "model.adapters.rank=9"], ["rank=9 is above", "a matrix of 8 x 64; use 8 or less"]),
    (["model.adapters.rank=2", "model.emulate.forward=1"], ["model.emulate"]),
    (
        ["checkpoint.adapters=elsewhere"],
        ["set model.adapters={rank: R, alpha: A}", "set checkpoint.weights to the one"],
    ),
    (
        ["model.adapters.quantize_base.block=48"],
        ["block=48 does not divide the 64 inputs that each row of attention.qkv has; use 32 or 64"],
    ),
    (
        ["model.adapters.quantize_base={block: 16, absmax_block: 3}", "model.ffn=96"],
        [
            "absmax_block=3 does not divide the 4 blocks of 16 that each row of attention.qkv has",
            "use 2 or 4",
        ],
    ),
    (
        ["model.adapters.quantize_base={block: 32}", "parallel.tensor=4"],
        [
            "block=32 does not divide the 16 inputs that each row of attention.output has on each ",
            "of parallel.tensor=4 ranks; use 16",
        ],
    ),
    (["model.adapters.quantize_base.type=nf3"], ["quantize_base.type", "nf4"]),
    (["checkpoint.adapters=s3://bucket/a"], ["checkpoint.adapters: takes a path of this machine"]),
]


@pytest.mark.parametrize(("keys", "texts"), REFUSALS)
def test_what_cannot_be_adapted_is_refused(keys, texts):
    message = "\n".join(list_refusals(*MODEL, *keys))
    assert all(text in message for text in texts), message


@pytest.mark.parametrize(
    "keys",
    [
        ["model.adapters.rank=64"],
        ["model.adapters.targets=[query, 'mlp.*']", "model.adapters.layers=[0]"],
        [MOE, "model.adapters.dropout=0.1", "model.adapters.targets=['attention.*']"],
        [MOE, "model.adapters.dora=true", "model.adapters.targets=['attention.*']"],
    ],
)
def test_what_can_be_adapted_passes(keys):
    assert not list_refusals(*MODEL, *keys)


def test_layers_without_matrices_have_no_adapters():
    blocks = [{"mixer": "differential", "feed_forward": "none"}]
    model = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 11, "blocks": blocks}
    with use_examples():
        names = [extension.name for extension in get_registry().extensions]
        run = RunConfig(model={**model, "adapters": {"rank": 2}}, run={"extensions": names})
        (mistake,) = find_mistakes(run, 1, data=False)
    assert mistake.startswith("model.adapters has nothing to be added to: the layers of")
