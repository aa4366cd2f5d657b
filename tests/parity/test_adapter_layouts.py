"""Adapters give the one-process answer to 1e-10 in fp64 under tensor, context, pipeline, expert and
data ranks, ZeRO and recompute: of a column linear A is whole and B divided, of a row linear the
reverse, and dropout of A's inputs depends on tokens and channels alone. A base that is kept as
codes is one whose values are what the codes say.

Tests `megaframe.data_parallel.quantised_bucket`.
"""

from unittest.mock import patch

import pytest
import torch
from bitwise import assert_same_bits
from parity_runs import FEW, assert_same, make_layout_check, run
from slow_cases import slow
from tolerances import promised

from megaframe.ops.block_codec import compute_levels
from megaframe.optim.optimizer import Optimizer

DROPS = {"rank": 3, "alpha": 5.0, "dropout": 0.3}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
SHAPES = {
    "packed-llama": {**LLAMA, "adapters": DROPS},
    "biased": {"bias": True, "dropout": 0.1, "adapters": {"rank": 2, "targets": ("value", "down")}},
    "magnitudes": {**LLAMA, "bias": True, "adapters": {**DROPS, "dora": True}},
    "first layer": {"adapters": {**DROPS, "layers": (0,)}},
    "latent": {
        "latent": {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5, "query_rank": 12},
        "adapters": DROPS,
    },
    "delta": {
        "blocks": [
            {"mixer": {"kind": "gated_delta_net", "key_dim": 4, "decay_rank": 4, "gate_rank": 4}},
            {"mixer": {"kind": "mamba2", "groups": 2, "state_dim": 4, "chunk": 3}},
        ],
        "adapters": DROPS,
    },
}
MOE = {"experts": 4, "ffn": 12, "top_k": 2}
OF_EXPERTS = {"adapters": {"rank": 3, "alpha": 5.0}}
SHAPES |= {
    "experts": {**LLAMA, "moe": {**MOE, "shared": 1}, **OF_EXPERTS},
    "scaled experts": {"moe": {**MOE, "scale_inputs": True, "expert_bias": True}, **OF_EXPERTS},
}
CODES = {"quantize_base": {"block": 2, "absmax_block": 2}}
WIDE = {**LLAMA, "ffn": 32}
SHAPES |= {
    "nf4": {**WIDE, "bias": True, "adapters": {**DROPS, **CODES, "layers": (0,)}},
    "int8": {**WIDE, "adapters": {**DROPS, "quantize_base": {"type": "int8", "block": 4}}},
    "nf4 magnitudes": {**WIDE, "adapters": {"rank": 3, "dora": True, **CODES}},
    "nf4 experts": {
        **WIDE,
        "moe": {**MOE, "ffn": 16, "shared": 1},
        "adapters": {"rank": 3, **CODES},
    },
}
SHAPES["nf4 latents"] = {
    "latent": SHAPES["latent"]["latent"],
    "indexer": {"heads": 2, "head_dim": 6, "top_k": 4, "absorb": True},
    "adapters": {**DROPS, "quantize_base": {"block": 2}, "targets": ("output", "up")},
}
EXPERTS_AND_TENSOR = {"data": 2, "expert": 2, "expert_tensor": 2, "tensor": 2}
CASES = [
    ("experts", 4, EXPERTS_AND_TENSOR, {}),
    ("scaled experts", 2, {"expert": 2, "zero": 3}, {"recompute": "selective"}),
    slow("experts", 4, {"expert_tensor": 2, "data": 4, "zero": 3}, {}),
    slow("experts", 4, {"pipeline": 2, "data": 2, "expert": 2, "schedule": "zb-h1"}, {}),
    *(slow("scaled experts", 4, {"expert_tensor": 2, "zero": zero}, {}) for zero in (0, 1, 2)),
    ("packed-llama", 2, {"tensor": 2, "tensor_chunks": 2}, {"recompute": "selective"}),
    ("packed-llama", 4, {"tensor": 4, "zero": 3}, {"recompute": "full"}),
    ("packed-llama", 4, {"pipeline": 2, "tensor": 2, "schedule": "zb-h1"}, {}),
    ("magnitudes", 4, {"tensor": 2, "data": 2, "zero": 3}, {"recompute": "selective"}),
    slow("magnitudes", 4, {"pipeline": 2, "tensor": 2, "schedule": "zb-h1"}, {"recompute": "full"}),
    ("biased", 4, {"context": 2, "data": 2, "zero": 2}, {}),
    ("first layer", 2, {"zero": 3}, {}),
    ("nf4", 4, {"tensor": 2, "data": 2, "zero": 3}, {"recompute": "selective"}),
    ("int8", 4, {"pipeline": 2, "tensor": 2, "schedule": "zb-h1"}, {"recompute": "full"}),
    ("nf4 experts", 4, {**EXPERTS_AND_TENSOR, "zero": 3}, {}),
    slow("nf4 magnitudes", 4, {"tensor": 4, "zero": 1}, {"recompute": "full"}),
    slow("nf4 experts", 4, {"pipeline": 2, "data": 2, "expert": 2, "zero": 3}, {}),
    *(slow("nf4", 2, {"zero": zero}, {}) for zero in (0, 1, 2)),
    slow("packed-llama", 4, {"context": 2, "tensor": 2}, {"recompute": "selective"}),
    *(slow("biased", 2, {"zero": zero}, {}) for zero in (0, 1, 2, 3)),
    slow("latent", 4, {"tensor": 2, "context": 2}, {"recompute": "selective"}),
    slow("latent", 2, {"tensor": 2, "zero": 3}, {}),
    slow("nf4 latents", 2, {"tensor": 2, "zero": 3}, {"recompute": "selective"}),
    slow("delta", 2, {"tensor": 2}, {"recompute": "selective"}),
    slow("delta", 2, {"context": 2}, {}),
]


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(("name", "ranks", "parallel", "train"), CASES)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, train, check_layout):
    check_layout(name, ranks, parallel, **train)


def run_with_rounded_base(model, block, *arguments):
    """`run` of a model without codes, whose base is rounded to the nearest levels of nf4 before."""
    initialize = Optimizer.initialize
    levels = torch.tensor(compute_levels("nf4"), dtype=torch.float64)

    def initialize_and_round(self, seed):
        initialize(self, seed)
        for name, spec, _, piece in self.list_tensors():
            if spec.role == "matrix" and ".adapters." not in name:
                blocks = piece.view(-1, block)
                absmax = blocks.abs().amax(1, keepdim=True).float()
                nearest = (blocks / absmax)[..., None].sub(levels).abs().argmin(2)
                blocks.copy_(levels[nearest] * absmax)

    with patch.object(Optimizer, "initialize", initialize_and_round):
        return run(model, *arguments)


def test_values_are_those_of_the_codes(pool):
    plain = {**WIDE, "adapters": OF_EXPERTS["adapters"]}
    (expected,) = pool.run(1, run_with_rounded_base, plain, 4, FEW)
    coded = {**WIDE, "adapters": {**OF_EXPERTS["adapters"], "quantize_base": {"block": 4}}}
    assert_same(pool.run(2, run, coded, FEW, {"zero": 3}), expected)
    (other,) = pool.run(1, run, plain, FEW)
    assert other.losses != promised(expected.losses)


def test_a_kernel_makes_the_values_of_plain_code(pool):
    model = {**WIDE, "layers": 1, "adapters": {"rank": 3, "quantize_base": {"block": 4}}}
    train, rest = {**FEW, "precision": "fp32"}, (False, False, False, None)
    plain, by_kernel = (
        pool.run(2, run, model, train, {"zero": 3}, *rest, {"codes": name})
        for name in ("reference", "triton")
    )
    assert_same_bits(by_kernel, plain, because="a kernel multiplies the same numbers in fp32")
