"""Memory that a run allocates on one rank, by kind, before it runs.

Exact for what megaframe itself keeps; the interpreter, torch and the temporaries of single
operations come on top.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megaframe.config.schema import RunConfig

LOSS_CHUNK = 12_900_000
"""Most logits that exist at once. Fewer make fp32 products slower (docs/log.md)."""

_WIDTH = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. values: the low-precision copy that the model computes with.
    activations: what the backward of the microbatches in flight needs. logits: the chunk."""

    weights: int
    values: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(asdict(self).values())


def memory(config: RunConfig, parameters: int) -> Memory:
    """Memory of a rank that holds `parameters` parameters and runs all blocks."""
    width = _WIDTH[config.train.precision]
    master = max(4, width)
    tokens = config.train.microbatch * config.train.seq
    vocab = config.model.vocab or 0
    chunk = min(tokens, max(1, LOSS_CHUNK // max(1, vocab)))
    return Memory(
        weights=parameters * master,
        values=parameters * width if width != master else 0,
        gradients=parameters * master,
        optimizer=2 * parameters * master,
        activations=_activations(config),
        logits=chunk * vocab * width,
    )


def _activations(config: RunConfig) -> int:
    """Bytes that one microbatch keeps between forward and backward, without dropout.

    With recompute, each block's input, and everything of the one block that runs again.
    """
    model, width = config.model, _WIDTH[config.train.precision]
    tokens = config.train.microbatch * config.train.seq
    stream = tokens * model.hidden * width
    if config.train.recompute == "full":
        kept = model.layers * stream + block_bytes(config)
    else:
        kept = model.layers * (stream + block_bytes(config))
    return kept + 3 * stream  # the head's input, its normalised form and the gradient of that


def block_bytes(config: RunConfig) -> int:
    """Bytes that one block keeps of a microbatch beside its input.

    Queries, keys and values, the attention's output with one log-sum-exp a head, the stream between
    attention and MLP, and the MLP before its activation; unless they are computed again, also both
    norms' outputs with their statistics, and the MLP after its activation. Statistics are in at
    least fp32, but for those of layernorm on a CPU.
    """
    model, width = config.model, _WIDTH[config.train.precision]
    tokens = config.train.microbatch * config.train.seq
    queries = model.heads * model.head_dim
    qkv = queries + 2 * model.kv_heads * model.head_dim
    elements = model.hidden + qkv + queries
    elements += (2 if model.activation == "swiglu" else 1) * model.ffn
    statistics = model.heads
    if config.train.recompute != "selective":
        elements += 2 * model.hidden + model.ffn
        if model.norm == "layernorm":
            elements += 2 * 2
        else:
            statistics += 2
    if model.qk_norm:
        elements += qkv
        statistics += model.heads + model.kv_heads
    elif model.position != "rotary" and 1 < model.kv_heads < model.heads:
        elements += queries
    return tokens * (elements * width + statistics * max(4, width))
