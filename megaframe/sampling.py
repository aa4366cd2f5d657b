"""Sampling: loads a trained model from a checkpoint, without training state, and samples from it.

Sampling runs the whole context again for every token. This is slow for long texts, but it needs no
second form of attention. It is meant to show what a run has learned, not to serve a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from megaframe.autotune import tune
from megaframe.checkpoint import Place, Slice, locate, open_checkpoint
from megaframe.config import RunConfig
from megaframe.data.tokenizer import Tokenizer, load_tokenizer
from megaframe.errors import UserError
from megaframe.microbatch import Microbatch
from megaframe.run_state import AVERAGE, read_state
from megaframe.spec import Box
from megaframe.stage import Stage, whole_model


def load_model(
    given: Place, *, ema: bool = False, precision: str | None = None, device: str = "cpu"
) -> tuple[RunConfig, Stage]:
    """Return the config and model of a checkpoint, or of the latest one in a folder of checkpoints.

    ema: load the average of the weights.
    precision: precision of the products, by default `train.precision` of the run.
    Raises `UserError` if there is no checkpoint, or with `ema`, no average.
    """
    path = locate(given)
    if path is None:
        raise UserError(f"--checkpoint {given}: there is no checkpoint in this folder")
    with open_checkpoint(path) as checkpoint:
        state = read_state(checkpoint)
        config = state.config
        if precision is not None:
            train = config.train.model_copy(update={"precision": precision, "fp8": "none"})
            config = config.model_copy(update={"train": train})
        if device == "cpu":
            tune(config, state.routines)
        stage = whole_model(config)
        saved = checkpoint.tensors
        if ema and not any(name.startswith(AVERAGE) for name in saved):
            raise UserError(
                f"--ema: {path} has no average of weights; train with optim.ema, for example 0.999"
            )
        prefix = AVERAGE if ema else ""
        slices = [
            replace(part, name=prefix + part.name) if prefix + part.name in saved else part
            for part in _allocate(stage, device)  # frozen parameters have no average
        ]
        checkpoint.load(slices)
    return config, stage


def tokenizer_of(config: RunConfig, name: str | None = None) -> Tokenizer:
    """Return the tokenizer called `name`, by default that of the run. Raises `UserError` if there
    is none, and if it has more ids than the model has rows."""
    name = name or config.data.tokenizer
    if name is None:
        raise UserError("the run had no data.tokenizer; name one with --tokenizer KIND:PATH")
    tokenizer, vocab = load_tokenizer(name), config.model.vocab or 0
    if tokenizer.vocab_size > vocab:
        raise UserError(
            f"{name} has {tokenizer.vocab_size} ids and the model {vocab}; use the tokenizer that "
            "it was trained with"
        )
    return tokenizer


def _allocate(stage: Stage, device: str) -> list[Slice]:
    """Allocate storage for every parameter's whole value. Returns slices to load into it."""
    slices = []
    for parameter in stage.parameters():
        spec = parameter.spec
        value = torch.empty(spec.shape, dtype=stage.precision.compute, device=device)
        box = Box((0,) * len(spec.shape), spec.shape)
        parameter.bind(box, None)
        parameter.value = value
        slices.append(Slice(spec.name, spec.shape, box.offset, value))
    return slices


@torch.no_grad()
def sample(
    stage: Stage,
    start: Sequence[int],
    *,
    tokens: int,
    context: int,
    temperature: float,
    top_k: int,
    stop: int,
    generator: torch.Generator,
) -> Iterator[list[int]]:
    """Yield all ids so far after each new token, for at most `tokens` new ones or until `stop`.

    context: number of last ids that the model sees.
    temperature: 0 takes the most likely id.
    top_k: sample among this many most likely ids; 0 for all.
    """
    head = stage.head
    assert head is not None, "the whole model has a head"
    ids, device = list(start), stage.parameters()[0].value.device
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        microbatch = Microbatch(window, window, window.new_zeros(1))
        logits = head.logits(stage.hidden(microbatch)[-1]).cpu()
        if temperature == 0:
            choice = int(logits.argmax())
        else:
            if 0 < top_k < len(logits):
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            probabilities = torch.softmax(logits / temperature, -1)
            choice = int(torch.multinomial(probabilities, 1, generator=generator))
        ids.append(choice)
        yield ids
        if choice == stop:
            return
