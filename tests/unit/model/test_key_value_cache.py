"""Tokens that come one by one, with the keys and values of those before, give what they give at
once."""

import pytest
import torch
from tolerances import assert_near

from megaframe.architecture.model_blocks import count_mixers
from megaframe.data.microbatch import Microbatch
from megaframe.model.key_value_cache import KeyValueCache, join_caches

pytestmark = pytest.mark.numeric

LATENT = {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5, "query_rank": 12}
DELTA = {"kind": "gated_delta_net", "key_heads": 2, "value_heads": 4, "value_dim": 6, "chunk": 5}
MAMBA = {"kind": "mamba2", "groups": 2, "state_dim": 5, "convolution": 9, "chunk": 5}
V4 = {
    **{"kind": "compressed_attention", "query_rank": 7, "window": 3},
    **{"output_groups": 2, "output_rank": 5},
}
SPARSE_KEYS = {
    **{"tokens": 2, "overlap": True},
    "indexer": {"heads": 8, "head_dim": 6, "top_k": 2},
}
HASHED = {"kind": "moe", "router": "hash"}
MODELS = {
    "gpt2": {"position": "learned", "bias": True, "tie_embeddings": True},
    "grouped": {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2, "qk_norm": True},
    "windows": {"window": (2, None, 5), "layers": 4, "kv_heads": 2},
    "chunks": {"blocks": [{"mixer": {"attention_chunk": 4}}, {"mixer": {"attention_chunk": 3}}]},
    "latent": {"latent": LATENT, "window": (None, 3)},
    "chosen keys": {
        **{"latent": LATENT, "norm": "rmsnorm", "layers": 4},
        "indexer": {"heads": 3, "head_dim": 6, "top_k": 4},
        "blocks": [
            {"mixer": "latent"},
            {"mixer": {"kind": "latent", "window": 6}},
            {"mixer": {"kind": "latent", "shared_indexer": True, "window": 6}},
            {"mixer": {"kind": "latent", "shared_indexer": True}},
        ],
    },
    "delta net": {"norm": "rmsnorm", "blocks": [{"mixer": DELTA}, {}]},
    "delta net of few tokens": {
        "norm": "rmsnorm",
        "blocks": [{"mixer": {**DELTA, "convolution": 9, "negative_eigenvalues": True}}],
    },
    "decays of channels": {
        "norm": "rmsnorm",
        "blocks": [{"mixer": {**DELTA, "decay_rank": 3, "gate_rank": 4, "gate": "sigmoid"}}],
    },
    "latent, not rotated": {"latent": LATENT, "position": "none"},
    "short convolution": {
        **{"norm": "rmsnorm", "bias": True},
        "blocks": [{"mixer": "gated_short_convolution"}, {}],
    },
    "mamba2": {
        "norm": "rmsnorm",
        "blocks": [{"mixer": {**MAMBA, "step_min": 0.02, "step_max": 0.04, "bias": True}}, {}],
    },
    "blocks of one half": {
        **{"layers": 3, "norm": "rmsnorm", "position": "none"},
        "blocks": [
            {"mixer": MAMBA, "feed_forward": "none"},
            {"mixer": "none"},
            {"feed_forward": "none"},
        ],
    },
    "gemma 4": {
        **{"norm": "rmsnorm", "kv_heads": 2},
        "blocks": [
            {"mixer": {"window": 4, "value_norm": True}, "layer_scalar": True},
            {"mixer": {"keys_as_values": True, "value_norm": True, "head_dim": 6}},
        ],
    },
    "shared keys and inputs of layers": {
        **{"layers": 4, "norm": "rmsnorm", "kv_heads": 2, "layer_embeddings": 6},
        "blocks": [
            {"mixer": {"window": 4, "value_norm": True}},
            {},
            {"mixer": {"shared_keys": True, "window": 4, "qk_norm": True}},
            {"mixer": {"shared_keys": True}},
        ],
    },
    "compressed keys": {
        **{"layers": 3, "norm": "rmsnorm", "streams": {"number": 2}, "rotary_fraction": 0.5},
        "blocks": [
            {"mixer": {**V4, "compression": SPARSE_KEYS}, "feed_forward": HASHED},
            {"mixer": {**V4, "compression": {"tokens": 3}}},
            {"mixer": V4},
        ],
        "moe": {"experts": 4, "ffn": 10},
    },
    "two mixers": {"norm": "rmsnorm", "blocks": [{"second_mixer": {**MAMBA, "bias": True}}]},
    "experts": {
        "moe": {"experts": 4, "ffn": 10, "shared": 1, "shared_gate": True},
        "position": "none",
    },
    "softcaps and sinks": {
        "layers": 3,
        "blocks": [
            {"mixer": {"softcap": 2.0, "window": 4}},
            {"mixer": {"sinks": True, "window": 3, "v_head_dim": 6}, "norms": "both"},
            {"mixer": {"sinks": True, "softcap": 1.5, "output_gate": "head"}},
        ],
    },
}
TERMS = 4 * (6 * 16 + 12)
"""Lengths of the sums from a token to the last stream: up to four blocks with six products over 16
channels, and 12 tokens."""


def make_cache(stage):
    return KeyValueCache(count_mixers(stage.config.model))


def read_one_by_one(stage, tokens_BS, first):
    """Return the streams [B, S - first + 1, hidden] of the tokens from the last of the first pass
    on, with a cache."""
    batch, length = tokens_BS.shape
    cache = make_cache(stage)
    samples, streams = torch.arange(batch), []
    for start, end in ((0, first), *((at, at + 1) for at in range(first, length))):
        part, positions = tokens_BS[:, start:end], torch.arange(start, end)[None]
        hidden = stage.compute_hidden(Microbatch(part, part, samples, positions), cache=cache)
        streams.append(hidden.view(batch, end - start, -1)[:, -1])
        assert cache.advance(end - start)
    return torch.stack(streams, 1)


@pytest.mark.parametrize("first", [1, 7, 12])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_sees_what_it_sees_in_the_whole_text(name, first, build, make_microbatch):
    built = build(MODELS[name])
    tokens_BS = make_microbatch(built.config).tokens_BS
    assert tokens_BS.shape[1] == 12
    samples = torch.arange(len(tokens_BS))
    whole = built.stage.compute_hidden(Microbatch(tokens_BS, tokens_BS, samples))
    expected = whole.view(*tokens_BS.shape, -1)[:, first - 1 :]
    assert_near(read_one_by_one(built.stage, tokens_BS, first), expected, TERMS)


def read_pass(stage, texts, cache):
    """Return the streams [B, hidden] of the last tokens of texts, of which a cache has all but
    what is new."""
    new = [ids[-1:] for ids in texts] if cache.length else texts
    positions_BS = torch.tensor([[*range(len(ids))][-len(new[0]) :] for ids in texts])
    tokens_BS = torch.tensor(new)
    microbatch = Microbatch(tokens_BS, tokens_BS, torch.arange(len(new)), positions_BS)
    hidden = stage.compute_hidden(microbatch, cache=cache)
    assert cache.advance(len(new[0]))
    return hidden.view(len(new), -1, hidden.shape[-1])[:, -1]


@pytest.mark.parametrize("name", MODELS)
def test_samples_of_several_caches_are_read_together(name, build):
    """Samples of other lengths join, one comes twice, and some leave."""
    stage = build(MODELS[name]).stage
    tokens = torch.randint(0, 13, (3, 12), generator=torch.Generator().manual_seed(4)).tolist()

    def assert_next(cache, sizes):
        """Assert that the next token of samples that had these sizes is as in the whole text."""
        streams = read_pass(stage, [tokens[n][: size + 1] for n, size in sizes], cache)
        for stream, (number, size) in zip(streams, sizes, strict=True):
            alone = read_pass(stage, [tokens[number][: size + 1]], make_cache(stage))
            assert_near(stream, alone[0], TERMS)

    caches = [make_cache(stage) for _ in range(3)]
    for number, (cache, size) in enumerate(zip(caches, (2, 7, 4), strict=True)):
        read_pass(stage, [tokens[number][:size]], cache)
    joined = join_caches([(caches[0], [0]), (caches[1], [0, 0])])
    assert_next(joined, [(0, 2), (1, 7), (1, 7)])
    joined = join_caches([(joined, [2, 0]), (caches[2], [0])])
    assert_next(joined, [(1, 8), (0, 3), (2, 4)])
    joined = join_caches([(joined, [1, 2])])
    assert joined.length == 5
    assert_next(joined, [(0, 4), (2, 5)])


def test_a_mixer_that_adds_nothing_makes_the_cache_useless():
    assert not KeyValueCache(layers=2).advance(1)
