"""Adapters beside the closed form: a model with adapters computes what the model without them
does whose matrices are W + alpha / rank B A, and the gradients of A and B follow from that of the
sum.

Tests `megaframe.architecture.adapters`, `megaframe.config.adapters`,
`megaframe.model.moe.expert_adapters` and `megaframe.tensor_parallel.adapted_results`.
"""

import pytest
import torch
from autograd_comparison import TERMS, compute_gradients
from bitwise import assert_bitwise_equal
from slow_cases import slow
from tolerances import assert_near

from megaframe.pipeline_parallel.stage_pass import StagePass
from megaframe.tensor_parallel.adapted_results import compute_row_factors

ALPHA, RANK = 5.0, 3
MODELS = {
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
    "gpt2": {"position": "learned", "bias": True, "tie_embeddings": True},
    "latent": {
        "latent": {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5, "query_rank": 12}
    },
}
MODELS |= {
    "experts": {"activation": "swiglu", "moe": {"experts": 4, "ffn": 10, "shared": 1}},
    "scaled experts": {"moe": {"experts": 4, "scale_inputs": True, "expert_bias": True}},
}
PARTS = {
    "attention.qkv": {"query": (1, 0, -2), "key": (1, -2, -1), "value": (1, -1, None)},
    "attention.output": {"": (0, None, None)},
    "attention.down": {"query": (0, 0, 12), "kv": (0, 12, 22), "shared_key": (0, 22, None)},
    "attention.query": {"": (0, None, None)},
    "attention.kv": {"key": (1, 0, 6), "value": (1, 6, None)},
    "mlp.up": {"": (0, None, None), "gate": (0, 0, 1), "up": (0, 1, 2)},
    "mlp.down": {"": (0, None, None)},
    "moe.experts.up": {"": (0, None, None), "gate": (1, 0, 1), "up": (1, 1, 2)},
    "moe.experts.down": {"": (0, None, None)},
}
PARTS |= {f"moe.shared.{part}": PARTS[f"mlp.{part}"] for part in ("up", "down")}
"""For each weight its matrices: along which dim, from where to where."""


def get_weights(built):
    """Return a view of every weight of one rank by name."""
    return {
        parameter.spec.name: piece
        for bucket in built.sharded_parameters.buckets
        for parameter, _, piece in bucket.iterate_pieces(bucket.weights, bucket.master_span)
    }


def get_gradients(built):
    return {
        parameter.spec.name: grad.clone()
        for bucket in built.sharded_parameters.buckets
        if bucket.trained
        for parameter, _, grad in bucket.iterate_pieces(bucket.grad_sums, bucket.master_span)
    }


def list_adapted(weights):
    """Yield the weight, the part of it and both factors of each adapter."""
    for name, a in weights.items():
        if name.endswith(".a.weight"):
            linear, _, part = name.removesuffix(".a.weight").partition(".adapters")
            dim, start, stop = PARTS[linear.split(".", 2)[2]][part.removeprefix(".")]
            index = (*(slice(None),) * dim, slice(start, stop))
            b_name = name.replace(".a.weight", ".b.weight")
            yield f"{linear}.weight", index, name, b_name, a, weights[b_name]


def as_matrices(a, b):
    """Return both factors as matrices, [E, ...] of experts."""
    experts = a.shape[:1] if a.shape[0] != RANK else ()
    return a.reshape(*experts, RANK, -1), b.reshape(*experts, -1, RANK)


def draw_adapters(built, scale=0.3):
    generator = torch.Generator().manual_seed(1)
    for parameter in built.stage.parameters():
        if ".adapters." in parameter.spec.name:
            parameter.value.normal_(0.0, scale, generator=generator)


def build_pair(build, model, adapters, recompute="none"):
    """Return the model with adapters, and the one without whose matrices are the sums."""
    train = {"recompute": recompute}
    adapted = build({**model, "adapters": adapters}, train=train)
    draw_adapters(adapted)
    merged = build(model, train=train)
    weights, sums = get_weights(adapted), get_weights(merged)
    for name, value in sums.items():
        value.copy_(weights[name])
    scale = adapters["alpha"] / adapters["rank"]
    for name, index, _, _, a, b in list_adapted(weights):
        part = sums[name][index]
        a, b = as_matrices(a, b)
        part += (scale * b @ a).view(part.shape)
    return adapted, merged


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *(("llama", "selective"), ("gpt2", "none"), ("latent", "full"), ("experts", "selective")),
        *(slow("latent", "selective"), slow("scaled experts", "none"), slow("experts", "full")),
    ],
)
def test_loss_and_gradients_are_those_of_the_sum(name, recompute, build, make_microbatch):
    adapters = {"rank": RANK, "alpha": ALPHA}
    adapted, merged = build_pair(build, MODELS[name], adapters, recompute)
    microbatch = make_microbatch(adapted.config, documents=True)
    loss = compute_gradients(adapted, microbatch, {})
    assert_near(loss, compute_gradients(merged, microbatch, {}), TERMS)
    gradients, of_sums, scale = get_gradients(adapted), get_gradients(merged), ALPHA / RANK
    assert all(".adapters." in name for name in gradients)
    size = max(float(gradient.abs().max()) for gradient in of_sums.values())
    weights = get_weights(adapted)
    adapters = list(list_adapted(weights))
    assert len(gradients) == 2 * len(adapters) > 0
    for weight, index, a_name, b_name, a, b in adapters:
        a, b = as_matrices(a, b)
        d_sum = of_sums[weight][index].reshape(*a.shape[:-2], b.shape[-2], -1)
        d_b, d_a = scale * d_sum @ a.mT, scale * b.mT @ d_sum
        assert_near(gradients[b_name].view(d_b.shape), d_b, TERMS, size=size, label=b_name)
        assert_near(gradients[a_name].view(d_a.shape), d_a, TERMS, size=size, label=a_name)


def test_a_new_adapter_changes_nothing(build, make_microbatch):
    """B starts at 0, and the weights without adapters are drawn as ever."""
    model = MODELS["llama"]
    settings = {"dropout": 0.5, "rank": 2, "dora": True}
    adapted, plain = build({**model, "adapters": settings}), build(model)
    weights, plain_weights = get_weights(adapted), get_weights(plain)
    assert {name for name in weights if ".adapters." not in name} == set(plain_weights)
    for name, value in plain_weights.items():
        assert_bitwise_equal([weights[name]], [value], because="both draw by name", label=name)
    assert all(value.abs().max() > 0 for name, value in weights.items() if ".a.weight" in name)
    microbatch = make_microbatch(adapted.config)
    one = torch.ones((), dtype=torch.float64)
    losses = [built.stage.forward(StagePass(0), microbatch, one) for built in (adapted, plain)]
    assert_near(*losses, TERMS)


def test_rows_are_rescaled_to_their_magnitudes():
    """A row without a direction stays as it is, so that it can learn one."""
    norms = torch.tensor([[3.0, 4.0, 0.0, 0.0], [8.0, 4.0, 0.0, 2.0]])
    factors, inverse = compute_row_factors(norms, torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert factors.tolist() == [0.5, 1.0, 1.0, 0.5] and inverse.tolist() == [0.125, 0.25, 0.0, 0.5]


def test_dropout_is_none_in_evaluation(build, make_microbatch):
    losses = []
    for dropout in (0.0, 0.5):
        adapters = {"rank": 2, "dropout": dropout}
        built = build({**MODELS["llama"], "adapters": adapters})
        draw_adapters(built)
        microbatch = make_microbatch(built.config)
        one = torch.ones((), dtype=torch.float64)
        trained = built.stage.forward(StagePass(0), microbatch, one)
        losses.append((float(trained), float(built.stage.evaluate(microbatch))))
    assert losses[0][1] == losses[1][1]
    assert abs(losses[0][0] - losses[1][0]) > 1e-3
