"""A trained model for use: weights from a checkpoint without any state of training, and sampling.

Sampling runs the whole context for each token. That is slow for long texts and needs no second
form of attention: it shows what a run has learned, it is no server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

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
    """Config and model of a checkpoint, or of the latest one in a folder of them. ema: with the
    average of its weights. precision: of the products, by default `train.precision` of the run.

    Raises `UserError` when there is none.
    """
    path = locate(given)
    if path is None:
        raise UserError(f"--checkpoint {given}: there is no checkpoint in this folder")
    with open_checkpoint(path) as checkpoint:
        config = read_state(checkpoint).config
        if precision is not None:
            train = config.train.model_copy(update={"precision": precision, "fp8": "none"})
            config = config.model_copy(update={"train": train})
        stage = whole_model(config)
        saved = checkpoint.tensors
        if ema and not any(name.startswith(AVERAGE) for name in saved):
            raise UserError(
                f"--ema: {path} has no average of weights; train with optim.ema, for example 0.999"
            )
        prefix = AVERAGE if ema else ""
        slices = [
            replace(part, name=prefix + part.name) if prefix + part.name in saved else part
            for part in _allocate(stage, device)  # what is frozen has no average, and needs none
        ]
        checkpoint.load(slices)
    return config, stage


def tokenizer_of(config: RunConfig, name: str | None = None) -> Tokenizer:
    """The tokenizer called `name`, by default that of the run. Raises `UserError` when there is
    none, and for one with ids that the model has no rows for."""
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
    """Give every parameter storage for its whole value; the slices fill it."""
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
    """All ids so far after each new token: at most `tokens` of them, or until `stop`.

    The model sees the last `context` ids. temperature 0 takes the likeliest id; top_k 0 chooses
    among all.
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
