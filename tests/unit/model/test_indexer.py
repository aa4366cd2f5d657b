"""The indexer of sparse attention: of equal scores the first keys are chosen, and a choice of more
keys than a sample has hides nothing."""

from dataclasses import replace

from tolerances import assert_near

LATENT = {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5, "query_rank": 12}
TERMS = 6 * 16
"""Terms of the sums from a token to the stream after a layer."""


def make_model(**indexer):
    return {
        **{"layers": 1, "norm": "rmsnorm", "latent": LATENT},
        "indexer": {"heads": 2, "head_dim": 6, "top_k": 3, **indexer},
    }


def test_of_equal_scores_the_first_keys_are_chosen(build, make_microbatch):
    """Heads without weights give all keys the score 0, so every query sees the first three."""
    built = build(make_model())
    for parameter in built.stage.parameters():
        if parameter.spec.name.endswith("indexer.key.weight"):
            parameter.value.zero_()
    microbatch = make_microbatch(built.config)

    def compute_last(place):
        tokens_BS = microbatch.tokens_BS.clone()
        if place is not None:
            tokens_BS[:, place] = (tokens_BS[:, place] + 1) % 37
        changed = replace(microbatch, tokens_BS=tokens_BS)
        rows = built.stage.compute_hidden(changed).view(*tokens_BS.shape, -1)
        return rows[:, -1]

    plain = compute_last(None)
    for place in range(microbatch.tokens_BS.shape[1] - 1):
        difference = float((compute_last(place) - plain).abs().max())
        assert (difference > 1e-6) == (place < 3), place


def test_a_choice_of_all_keys_is_latent_attention(build, make_microbatch):
    chosen, plain = build(make_model(top_k=64)), build({**make_model(), "indexer": None})
    microbatch = make_microbatch(plain.config)
    assert_near(chosen.stage.evaluate(microbatch), plain.stage.evaluate(microbatch), TERMS)
