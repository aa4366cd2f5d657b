"""Whether sparse attention absorbs: reads the latents of chosen keys, in place of the keys and
values of all heads (`model.indexer.absorb`).

By latents a score has more terms, so it is computed where that needs fewer multiplications in all,
which depends on the sizes of the model and on the length of samples, and not on a machine. `kv`
itself is multiplied as often either way.
"""

from __future__ import annotations

from megaframe.architecture.model_blocks import list_mixers
from megaframe.architecture.sparse_attention import ChosenKeysDescription
from megaframe.config.model import ModelConfig
from megaframe.config.schema import RunConfig, TrainConfig

KEY = "model.indexer.absorb"
AUTO = "auto"


def decide_absorption(config: RunConfig) -> RunConfig:
    """Return the config with a value for `model.indexer.absorb=auto`: true if it multiplies less
    and nothing is against it."""
    indexer = config.model.indexer
    if indexer is None or indexer.absorb != AUTO:
        return config

    def choose(value: bool) -> RunConfig:
        return config.replace(model={"indexer": indexer.model_copy(update={"absorb": value})})

    absorbed, plain = choose(True), choose(False)
    if explain_obstacle(absorbed.model, config.train) is not None:
        return plain
    with_it, without = (
        count_multiplications(each.model, config.train.seq) for each in (absorbed, plain)
    )
    return absorbed if with_it < without else plain


def explain_obstacle(model: ModelConfig, train: TrainConfig) -> str | None:
    """Return why sparse attention cannot absorb in this run, or None if it can."""
    indexer = model.indexer
    if indexer is None or model.latent is None or not model.latent.query_rank:
        return "there is no sparse attention"
    if indexer.dense:
        return "model.indexer.dense=true lets attention see all keys"
    if train.seq <= indexer.top_k:
        return (
            f"in samples of train.seq={train.seq} tokens all keys are chosen, with "
            f"model.indexer.top_k={indexer.top_k}"
        )
    if train.fp8 != "none":
        return f"train.fp8={train.fp8} multiplies by kv in 8 bits, which heads of latents do not"
    adapted = [adapter.target for mixer in _list_sparse(model) for adapter in mixer.kv.adapters]
    if adapted:
        return f"model.adapters.targets names {adapted[0]}, to whose results they are added"
    return None


def count_multiplications(model: ModelConfig, seq: int) -> float:
    """Return how often sparse attention multiplies activations for a token of samples of `seq`, in
    all layers, forward and backward."""
    products = (p for mixer in _list_sparse(model) for p in mixer.list_batched_products(seq))
    flops = (p.flops * p.causal_share * (3 if p.differentiated else 1) for p in products)
    return sum(flops) / (2 * seq)


def _list_sparse(model: ModelConfig) -> list[ChosenKeysDescription]:
    return [m for m in list_mixers(model) if isinstance(m, ChosenKeysDescription)]
