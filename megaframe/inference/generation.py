"""Generation: loads a trained model from a checkpoint, without training state, and samples from it,
several texts at a time."""

from __future__ import annotations

import argparse
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megaframe.architecture.spec import Box, ParamSpec
from megaframe.checkpoint import Checkpoint, Slice, StorePath, locate_checkpoint, open_checkpoint
from megaframe.checkpoint.merged_adapters import open_model
from megaframe.checkpoint.train_state import EMA_PREFIX, read_train_state
from megaframe.config import DataConfig, ModelConfig
from megaframe.data.token_file_record import (
    TokenizerRecord,
    check_same_tokenizer,
    read_recorded_tokenizer,
    record_tokenizer,
)
from megaframe.data.tokenizer import Tokenizer, load_tokenizer
from megaframe.distributed.device import read_host_memory
from megaframe.errors import UserError
from megaframe.inference.sample_reader import SampleReader
from megaframe.model.autotune import tune
from megaframe.pipeline_parallel.stage import Stage, build_whole_model

_PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""What decoders put in place of bytes that are no whole character."""


def load_stage(
    location: str | StorePath,
    *,
    ema: bool = False,
    precision: str | None = None,
    device: str = "cpu",
) -> Stage:
    """Return the whole model of a checkpoint as a stage, which has its config.

    Args:
        location: What `--checkpoint` gives (see `locate_checkpoint`).
        ema: Load the average of the weights.
        precision: Precision of the products, by default `train.precision` of the run.
        device: Where to put the weights.

    Raises:
        UserError: There is no checkpoint, or with `ema`, no average.
    """
    path = locate_checkpoint(location, "--checkpoint")
    with open_model(path) as checkpoint:
        state = read_train_state(checkpoint)
        config = state.config
        if precision is not None:
            config = config.replace(train={"precision": precision, "fp8": "none"})
        if device == "cpu":
            tune(config.run, config.train, config.kernels, state.routines)
        stage = build_whole_model(config)
        saved = checkpoint.tensors
        if ema and not any(name.startswith(EMA_PREFIX) for name in saved):
            raise UserError(
                f"ema: {path} has no average of weights; train with optim.ema, for example 0.999"
            )
        prefix = EMA_PREFIX if ema else ""
        _check_size(checkpoint, stage, device)
        slices = [
            replace(part, name=prefix + part.name) if prefix + part.name in saved else part
            for part in allocate_parameters(stage, device)  # frozen parameters have no average
        ]
        checkpoint.load(slices)
    return stage


def read_run_tokenizer(location: str | StorePath) -> TokenizerRecord | None:
    """Return the tokenizer that the run of a checkpoint was trained with, or None if the checkpoint
    does not say. location: What `--checkpoint` gives."""
    with open_checkpoint(locate_checkpoint(location, "--checkpoint")) as checkpoint:
        return read_recorded_tokenizer(read_train_state(checkpoint).data)


def load_run_tokenizer(
    data: DataConfig,
    model: ModelConfig,
    name: str | None = None,
    recorded: TokenizerRecord | None = None,
) -> Tokenizer:
    """Return the tokenizer called `name`, by default that of the run.

    Args:
        data: Names the tokenizer of the run.
        model: Has the vocabulary.
        name: KIND:PATH.
        recorded: What the run was trained with, if it is known.

    Raises:
        UserError: If there is none, if it is not the recorded one, and if it has more ids than the
            model has rows.
    """
    name = name or data.tokenizer
    if name is None:
        raise UserError("the run had no data.tokenizer; name one with --tokenizer KIND:PATH")
    tokenizer, vocab = load_tokenizer(name), model.vocab or 0
    if tokenizer.vocab_size > vocab:
        raise UserError(
            f"{name} has {tokenizer.vocab_size} ids and the model {vocab}; use the tokenizer that "
            "it was trained with"
        )
    check_same_tokenizer(
        [("the run", recorded), ("this command", record_tokenizer(name, tokenizer))],
        "name the one that the run was trained with (--tokenizer)",
    )
    return tokenizer


def _check_size(checkpoint: Checkpoint, stage: Stage, device: str) -> None:
    """Raise `UserError` if a parameter is not in the checkpoint, or if this machine has too little
    memory for all."""
    shapes = {parameter.spec.name: parameter.spec.shape for parameter in stage.parameters()}
    checkpoint.require_shapes(shapes)
    size = sum(map(math.prod, shapes.values())) * stage.precision.compute.itemsize
    memory = read_host_memory()
    if device == "cpu" and size > memory:
        raise UserError(
            f"the weights of {checkpoint} take {size / 2**30:,.1f} GiB, and this machine has "
            f"{memory / 2**30:,.1f} GiB of memory"
        )


def allocate_parameters(stage: Stage, device: str) -> list[Slice]:
    """Allocate storage for every parameter's whole value. Returns slices to load into it."""
    slices = []
    for parameter in stage.parameters():
        spec = parameter.spec
        value = _allocate(spec, stage.precision.compute, device)
        box = Box((0,) * len(spec.shape), spec.shape)
        parameter.bind(box, None)
        parameter.value = value
        slices.append(Slice(spec.name, spec.shape, box.offset, value))
    return slices


def _allocate(spec: ParamSpec, dtype: torch.dtype, device: str) -> Tensor:
    """Return memory for the whole value of a parameter.

    A product with a single row, as of a new token, reads a weight once, as fast as memory gives it:
    on a CPU twice as fast in runs of 3,072 numbers as of 512 (docs/log.md). So the longer side of a
    matrix, its outputs or its inputs, is the one that is contiguous. bf16 products are slower with
    contiguous outputs, whatever their number.
    """
    outputs = len(spec.shape) - spec.inputs
    is_product = spec.role in ("matrix", "head") and spec.token_share == 1  # experts are grouped
    num_outputs, num_inputs = math.prod(spec.shape[:outputs]), math.prod(spec.shape[outputs:])
    if device != "cpu" or dtype.itemsize < 4 or not is_product or num_outputs <= num_inputs:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    memory = torch.empty(spec.shape[outputs:] + spec.shape[:outputs], dtype=dtype, device=device)
    dims = range(memory.dim())
    return memory.permute(*dims[spec.inputs :], *dims[: spec.inputs])


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen from the scores of all tokens.

    Attributes:
        temperature: Divides the scores; 0 takes the most likely token.
        top_k: Chooses among this many most likely tokens; 0: all.
        top_p: Chooses among the most likely tokens that together have this probability (nucleus
            sampling, Holtzman et al. 2019, arXiv:1904.09751); 1: all.

    Raises:
        UserError: A number is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature {self.temperature:g} is not a number of 0 or more; 0 takes the "
                "most likely token, 1 samples from what the model predicts"
            )
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} is below 0; use 1 or more, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p {self.top_p:g} is not above 0 and at most 1; use 0.9, for example, or 1 "
                "for all tokens"
            )

    def choose(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Return the id of the next token.

        Args:
            logits_V: Scores of the vocabulary [V], on the CPU.
            generator: The source of random numbers; not used at temperature 0 (greedy).

        Raises:
            UserError: If the scores are not finite.
        """
        best = float(logits_V.max())
        if not math.isfinite(best):
            raise UserError(
                f"the model scores the next token as {best:g}; use an earlier checkpoint"
            )
        if self.temperature == 0:
            return int(logits_V.argmax())
        # In fp64, and with 0 as the largest score, no temperature overflows.
        scores, ids = ((logits_V.double() - best) / self.temperature).sort(descending=True)
        candidates = slice(self.top_k or None)
        probabilities = torch.softmax(scores[candidates], -1)
        if self.top_p < 1:
            likelier = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.where(likelier < self.top_p, 0.0)
        return int(ids[candidates][torch.multinomial(probabilities, 1, generator=generator)])


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command line from which `SamplingOptions` are made."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.8, help="0 takes the most likely token")
    add("--top-k", type=int, default=50, help="sample from the K most likely; 0: all")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely that have probability P together; 1: all",
    )


@dataclass(frozen=True)
class SampleRequest:
    """A sample that is asked for.

    Attributes:
        start: The ids to continue.
        tokens: Number of new ids, at most.
        sampling: How each id is chosen.
        seed: Of the choices.
        is_complete: Says of all ids, after each new one, whether the sample ends with it.
    """

    start: Sequence[int]
    tokens: int
    sampling: SamplingOptions
    seed: int
    is_complete: Callable[[Sequence[int]], bool]


class SampledIds(NamedTuple):
    """A sample with one more id.

    Attributes:
        number: Of its request.
        ids: All so far.
        is_last: Whether it ends with the last of them.
    """

    number: int
    ids: list[int]
    is_last: bool


@torch.no_grad()
def sample_batch(
    stage: Stage, requests: Sequence[SampleRequest], *, context: int, batch: int
) -> Iterator[SampledIds]:
    """Yield samples as each gets a new id.

    A pass computes the next token of at most `batch` samples; when one ends, the next one begins. A
    sample depends on no other, but for the rounding of sums.

    Args:
        stage: The whole model.
        requests: The samples, which begin in this order.
        context: Number of last ids that the model sees.
        batch: Samples at a time, at most.
    """
    head = stage.head
    assert head is not None, "the whole model has a head"
    reader = SampleReader(stage, context)

    def predict(samples: Mapping[int, Sequence[int]]) -> Tensor:
        return head.compute_logits(reader.compute_last(samples)).cpu()

    yield from sample_by(predict, requests, batch=batch)


def sample_by(
    predict: Callable[[Mapping[int, Sequence[int]]], Tensor],
    requests: Sequence[SampleRequest],
    *,
    batch: int,
) -> Iterator[SampledIds]:
    """Yield samples, as `sample_batch` does, by any model.

    Args:
        predict: Returns the scores of the next id of samples, whose ids it is given by their
            number: [samples, V], on the host.
        requests: The samples, which begin in this order.
        batch: Samples at a time, at most.
    """
    waiting = deque(range(len(requests)))
    growing: dict[int, list[int]] = {}
    generators: dict[int, torch.Generator] = {}
    while waiting or growing:
        while waiting and len(growing) < batch:
            number = waiting.popleft()
            growing[number] = [*requests[number].start]
            generators[number] = torch.Generator().manual_seed(requests[number].seed)
        logits_BV = predict(growing)
        for (number, ids), logits_V in zip([*growing.items()], logits_BV, strict=True):
            request = requests[number]
            ids.append(request.sampling.choose(logits_V, generators[number]))
            is_full = len(ids) == len(request.start) + request.tokens
            is_last = is_full or request.is_complete(ids)
            if is_last:
                del growing[number]
            yield SampledIds(number, ids, is_last)


def sample(stage: Stage, request: SampleRequest, *, context: int) -> Iterator[list[int]]:
    """Yield all ids of one sample so far, after each new one.

    Args:
        stage: The whole model.
        request: The sample.
        context: Number of last ids that the model sees.
    """
    for step in sample_batch(stage, [request], context=context, batch=1):
        yield step.ids


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | None, context: int, name: str = "prompt"
) -> list[int]:
    """Return the ids that a sample begins with.

    Args:
        tokenizer: Of the run.
        prompt: Text to continue; None begins a new document.
        context: Number of ids that the model sees.
        name: The option or the config key that gives the prompt.

    Raises:
        UserError: The prompt has no token, or more tokens than the model sees.
    """
    if prompt is None:
        return [tokenizer.eod]
    check_text(prompt, name)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise UserError(
            f"{name} {prompt!r} has no token; give some text, or leave it out to begin a new "
            "document"
        )
    if len(ids) > context:
        raise UserError(
            f"{name} has {len(ids)} tokens, and the model sees {context} (train.seq); leave out "
            f"{len(ids) - context} or more"
        )
    return ids


def check_text(text: str, name: str) -> None:
    """Raise `UserError`, which says `name`, if a text from outside has what UTF-8 cannot write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} is not valid text at character {error.start} ({error.reason}); give UTF-8"
        ) from None


class StreamedText(NamedTuple):
    """The next part of a text, of whole characters.

    Attributes:
        number: Of the text.
        text: The part.
        is_last: Whether it is the end.
    """

    number: int
    text: str
    is_last: bool


def stream_texts(samples: Iterable[SampledIds], tokenizer: Tokenizer) -> Iterator[StreamedText]:
    """Yield the texts of samples in pieces, each as soon as it is known.

    Args:
        samples: What `sample_batch` yields.
        tokenizer: Of the run.
    """
    printed: dict[int, str] = {}
    for number, ids, is_last in samples:
        # Decode the whole text each time, because a token may be a part of a character.
        text = tokenizer.decode(ids)
        if is_last or not text.endswith(_PARTIAL):
            yield StreamedText(number, text[len(printed.get(number, "")) :], is_last)
            printed[number] = text
