"""What the axes divide: every layer says what its limits are, also one from outside, and a refusal
names the layer, both numbers, the key and values that work.
"""

from dataclasses import dataclass
from typing import Literal

import pytest
from config_refusals import list_refusals, list_refusals_of_ranks

from megaframe.architecture.layer import MixerDescription, SavedActivations
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec
from megaframe.config.parts import MixerPart
from megaframe.config.registry import Registry, use_registry


@dataclass(frozen=True, kw_only=True)
class StatesDescription(MixerDescription):
    hidden: int
    states: int

    name = "states"
    context_kinds = ("all_to_all",)

    @property
    def limits(self):
        return (Limit("tensor", self.states, f"mixer.states={self.states}"),)

    @property
    def parts(self):
        return {"output": LinearSpec((self.states,), (self.hidden,), 0.1, split=1)}

    def count_saved(self, parallel, recompute):
        return SavedActivations(self.states)

    def make_layer(self, name, run):
        raise AssertionError("is not built")


class StatesPart(MixerPart):
    kind: Literal["states"] = "states"
    states: int = 6

    def describe(self, model, output_std):
        return StatesDescription(hidden=model.hidden, states=self.states)


@pytest.fixture
def states():
    registry = Registry()
    registry.register(StatesPart)
    with use_registry(registry):
        yield


BLOCKS = {"model.blocks": "[{repeat: 2}, {mixer: {kind: states}}]"}


@pytest.mark.parametrize(
    ("keys", "message", "mends"),
    [
        (
            {"parallel.tensor": 4},
            "model.blocks.1: parallel.tensor=4 does not divide mixer.states=6; use 3 or 6",
            [{"parallel.tensor": 3}, {"parallel.tensor": 6}],
        ),
        (
            {"parallel.context": 2},
            "model.blocks.1: parallel.context=2 divides samples, which StatesDescription cannot "
            "mix with parallel.context_kind=ring; use parallel.context_kind=all_to_all, or "
            "parallel.context=1",
            [{"parallel.context_kind": "all_to_all"}, {"parallel.context": 1}],
        ),
    ],
)
def test_layers_from_outside_say_their_limits(keys, message, mends, states):
    assert list_refusals_of_ranks({**BLOCKS, **keys}) == [message]
    for mend in mends:
        assert list_refusals_of_ranks({**BLOCKS, **keys, **mend}) == []


SHARED = "the shared experts' width"
MOE = "model.moe={experts: 8, ffn: 3, shared: 1, every: 2}"


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (("model.ffn=3",), ["parallel.tensor=4 ranks are more than model.ffn=3; use 3 or fewer"]),
        ((MOE,), [f"parallel.tensor=4 ranks are more than {SHARED} of 3; use 3 or fewer"]),
        (
            ("model.vocab=3",),
            ["parallel.tensor=4 ranks are more than model.vocab=3; use 3 or fewer"],
        ),
        (
            ("model.blocks=[{}, {feed_forward: {ffn: 2}}]",),
            ["model.blocks.1: parallel.tensor=4 ranks are more than model.ffn=2; use 2 or fewer"],
        ),
        (
            ("model.blocks=[{mixer: {kv_heads: 2}}, {}, {mixer: {kv_heads: 1}}]",),
            [
                "model.blocks has mixers with 1 and 2 groups of heads, which parallel.tensor=4 "
                "ranks would share in different groups; use parallel.tensor=2 or fewer"
            ],
        ),
        (
            ("model.blocks=[{mixer: {kv_heads: 2}}, {mixer: {kind: mamba2, heads: 8}}]",),
            [
                "model.blocks has mixers with 1 and 2 groups of heads, which parallel.tensor=4 "
                "ranks would share in different groups; use parallel.tensor=2 or fewer"
            ],
        ),
    ],
)
def test_sizes_that_ranks_cannot_divide(overrides, lines):
    assert list_refusals("parallel.tensor=4", *overrides, world=4) == lines
    assert list_refusals("parallel.tensor=2", *overrides, world=2) == []
