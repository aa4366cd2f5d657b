"""Checks of training: batches, precision and gradient compression."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.data import DataConfig
from megaframe.config.keys import format_value
from megaframe.config.parallel import ParallelConfig
from megaframe.config.parts import LossPart
from megaframe.config.schema import BatchRampConfig, EvaluateConfig, KernelsConfig, TrainConfig
from megaframe.errors import find_nearest_multiples, join_or, list_divisors

MOST_MICROBATCHES = 1 << 16
"""Microbatches of a step. A schedule lists every pass, and training has hundreds at most."""


def find_batch_mistakes(train: TrainConfig, data: int) -> Iterator[str]:
    """Yield a message for each global batch that does not divide into microbatches.

    Args:
        train: The section.
        data: Number of data ranks.
    """
    batch_unit = train.microbatch * data
    on_ranks = f"train.microbatch={train.microbatch} on {data} data rank{'s' if data > 1 else ''}"
    top = train.global_batch
    if top % batch_unit:
        yield (
            f"train.global_batch={top} does not divide into microbatches of {on_ranks}; "
            f"use {find_nearest_multiples(batch_unit, top)}"
        )
        top = max(1, round(top / batch_unit)) * batch_unit  # what a ramp is to rise to
    if top // batch_unit > MOST_MICROBATCHES:
        yield (
            f"train.global_batch={top} is {top // batch_unit} microbatches of {on_ranks}, and a "
            f"step has at most {MOST_MICROBATCHES}; use at most "
            f"{MOST_MICROBATCHES * batch_unit}, or a larger train.microbatch"
        )
    if train.batch_ramp is not None:
        yield from _find_ramp_mistakes(train.batch_ramp, top, batch_unit, on_ranks)


def find_loss_mistakes(train: TrainConfig, kernels: KernelsConfig) -> Iterator[str]:
    """Yield what does not go with a loss from outside, which takes the place of cross-entropy."""
    if not isinstance(train.loss, LossPart):
        return
    for key in ("label_smoothing", "z_loss"):
        if value := getattr(train, key):
            yield (
                f"train.{key}={value:g} changes cross-entropy, and train.loss={train.loss.name} "
                "takes its place; use 0, or let the loss have it"
            )
    if kernels.loss not in ("auto", "reference"):
        yield (
            f"kernels.loss={kernels.loss} computes cross-entropy, and train.loss="
            f"{train.loss.name} takes its place; use auto"
        )


def find_sample_mistakes(train: TrainConfig, data: DataConfig) -> Iterator[str]:
    """Yield what samples of text lack."""
    name = f"train.sample_every={train.sample_every}"
    if train.sample_every and data.tokenizer is None:
        yield (
            f"{name} makes text, and data.tokenizer is not set; name the tokenizer of the token "
            "files (KIND:PATH, or bytes), or use train.sample_every=0"
        )
    if train.sample_every and not train.sample_prompts:
        yield (
            f"{name} has nothing to continue: train.sample_prompts=[] is empty; use "
            "train.sample_prompts=[''] to begin new documents, or train.sample_every=0"
        )


def find_task_mistakes(evaluate: EvaluateConfig, data: DataConfig) -> Iterator[str]:
    """Yield what an evaluation on tasks lacks."""
    if evaluate.tasks and data.tokenizer is None:
        yield (
            f"evaluate.tasks={format_value(evaluate.tasks)} asks in text, and data.tokenizer is "
            "not set; name the tokenizer of the token files (KIND:PATH, or bytes), or use "
            "evaluate.tasks=[]"
        )


def _find_ramp_mistakes(
    ramp: BatchRampConfig, top: int, batch_unit: int, on_ranks: str
) -> Iterator[str]:
    """Yield what is wrong with a ramp to a global batch of `top`, a multiple of `batch_unit`
    samples: every step's batch must be a multiple of it, too."""
    name, start, increment = "train.batch_ramp", ramp.start, ramp.increment
    wrong = []
    sizes = {f"{name}.start": start, f"{name}.increment": increment}
    uneven = [f"{key}={size}" for key, size in sizes.items() if size % batch_unit]
    if uneven:
        do = "does" if len(uneven) == 1 else "do"
        wrong.append(f"{' and '.join(uneven)} {do} not divide into microbatches of {on_ranks}")
    if start > top:
        wrong.append(f"{name}.start={start} is more than train.global_batch={top}")
    elif start % increment:
        wrong.append(f"{name}.start={start} is not a multiple of {name}.increment={increment}")
    elif (top - start) % increment:
        wrong.append(
            f"{name}.increment={increment} does not divide the rise from {name}.start={start} to "
            f"train.global_batch={top}, {top - start}"
        )
    if wrong:
        yield f"{'; '.join(wrong)}; use {join_or(_list_nearest_ramps(ramp, top, batch_unit))}"


def _list_nearest_ramps(ramp: BatchRampConfig, top: int, batch_unit: int) -> Iterator[str]:
    """Yield the nearest ramps that divide. If only the start is wrong, these are the start below
    and the one above; otherwise the increment below and the one above, each with its nearest
    start."""
    # Increments divide the start and the rise to `top`, and therefore `top` itself.
    fitting = [batch_unit * number for number in list_divisors(top // batch_unit)]
    if ramp.increment in fitting:
        below = min(top, ramp.start) // ramp.increment * ramp.increment
        starts = (size for size in (below, below + ramp.increment) if 0 < size <= top)
        yield f"train.batch_ramp.start={join_or(starts)}"
        return
    smaller = [size for size in fitting if size < ramp.increment][-1:]
    larger = [size for size in fitting if size > ramp.increment][:1]
    for increment in (*smaller, *larger):
        start = min(top, max(1, round(ramp.start / increment)) * increment)
        yield f"train.batch_ramp.start={start} with train.batch_ramp.increment={increment}"


def find_precision_mistakes(train: TrainConfig) -> Iterator[str]:
    """Yield a message for each mistake in 8-bit products and in offloaded activations."""
    if train.fp8 != "none" and train.precision == "fp16":
        yield (
            f"train.fp8={train.fp8} has no gradient scale, which train.precision=fp16 needs; use "
            "train.precision=bf16"
        )
    blocks = train.recompute_blocks
    no_blocks = blocks == 0 if isinstance(blocks, int) else not any(blocks)
    if train.offload and train.recompute != "full" and no_blocks:
        yield (
            "train.offload=true moves the inputs of recomputed blocks, and train.recompute="
            f"{train.recompute} with train.recompute_blocks={format_value(blocks)} has none; use "
            "train.recompute=full, or train.recompute_blocks=1 or more"
        )


SPARSE_CODECS = ("topk", "randomk", "threshold")
"""Compressions that send some of the elements."""


def find_compression_mistakes(parallel: ParallelConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a message for each mistake in `parallel.compress` and `parallel.compress_keep`."""
    precision = train.precision
    name = f"parallel.compress={parallel.compress}"
    if parallel.compress != "none" and precision == "fp16":
        yield (
            f"{name} keeps what it has not sent for the next step, whose loss scale "
            "train.precision=fp16 may change; use bf16 or fp32, or parallel.compress=none"
        )
    keep = parallel.compress_keep
    if keep is None:
        return
    if parallel.compress not in (*SPARSE_CODECS, "powersgd"):
        yield (
            f"parallel.compress_keep={keep:g} has no effect with {name}; leave it out, or use "
            f"parallel.compress={', '.join(SPARSE_CODECS)} or powersgd"
        )
    elif parallel.compress in SPARSE_CODECS and keep > 1:
        yield (
            f"parallel.compress_keep={keep:g} is more than all elements, of which {name} sends a "
            "share; use 1 or less"
        )
    elif parallel.compress == "powersgd" and not keep.is_integer():
        yield (
            f"parallel.compress_keep={keep:g} is not a whole number of columns, as {name} needs; "
            f"use {max(1, round(keep))}"
        )
