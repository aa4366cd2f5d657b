"""The length of a run that is given in epochs (`data.epochs`) or phases, as a number of steps.

It is decided before anything else of a run, from the sizes of its token files and the batch of each
step. A resumed run counts from its checkpoint: the samples that it has seen, whatever their batch
was, and then the steps that the rest takes.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from megaframe.config import DataConfig, RunConfig, TrainConfig
from megaframe.config.batch_ramp import count_samples, count_steps
from megaframe.config.section import MOST
from megaframe.data.blended_dataset import BlendedDataset
from megaframe.data.streaming.corpus import is_stream
from megaframe.errors import UserError
from megaframe.training.phases import decide_phases, describe_phase
from megaframe.training.run_position import find_position
from megaframe.validate.train import MOST_MICROBATCHES


def decide_steps(config: RunConfig, *, data: bool = True) -> tuple[RunConfig, list[str]]:
    """Return the config with `train.steps` decided if `data.epochs` or `data.phases` is set, and
    lines that say how long the run is. With phases it is the config of the one that the run is in.

    Args:
        config: The run.
        data: Whether its token files must be here. Without them `train.steps` is taken as it is.

    Raises:
        UserError: `train.steps` is given and is another number, or the sizes of the token files
            cannot be read.
    """
    if config.data.phases:
        config = decide_phases(config)[0]
        return config, describe_phase(config.train, config.data)
    epochs, train = config.data.epochs, config.train
    if epochs is None or _has_wrong_ramp(config.train) or (data and not config.data.sources):
        return config, []  # the checks of a config say what is wrong
    given = train.steps if "steps" in train.model_fields_set else None
    if not data and not has_token_files(config.data):
        return config, [_describe_missing_files(config.data, given)]
    streams = [source.path for source in config.data.sources if is_stream(source.path)]
    if streams:
        raise UserError(
            f"data.epochs={epochs:g} takes sources whose size is known, and {streams[0]} is read "
            "as a stream; give train.steps in its place, or make token files of it "
            "(tools/preprocess_data.py)"
        )
    dataset = BlendedDataset(config.model, config.train, config.data, "train", config.run.seed)
    # As a decimal: 0.1 epochs of 1,000 samples are 100.
    samples = -int(-(Fraction(repr(epochs)) * int(dataset.sizes.sum())) // 1)
    start = find_position(config.run, config.checkpoint)
    steps = max(1, start.step + count_steps(train, samples - start.samples, start.samples))
    after = f" after the {start.samples:,} of {start.step:,} steps before" if start.step else ""
    taken = f"data.epochs={epochs:g}, {samples:,} samples, takes {steps:,} steps{after}"
    if steps > MOST:
        most = count_samples(train, MOST) / int(dataset.sizes.sum())
        raise UserError(f"{taken}, and a run has at most {MOST:,}; use at most {most:g} epochs")
    if given not in (None, steps):
        raise UserError(
            f"train.steps={given} and data.epochs={epochs:g} disagree: {taken}; use "
            f"train.steps={steps}, leave train.steps out, or use data.epochs=null"
        )
    return config.replace(train={"steps": steps}), [taken]


def has_undecided_length(data: DataConfig, train: TrainConfig) -> bool:
    """Return whether `data.epochs` or `data.phases` is set, and what follows from it is not decided
    yet."""
    undecided = data.epochs is not None and "steps" not in train.model_fields_set
    return undecided or (bool(data.phases) and data.phase is None)


def _has_wrong_ramp(train: TrainConfig) -> bool:
    """Return whether the batch cannot grow as `train.batch_ramp` says, or in more parts than a step
    may have microbatches."""
    ramp, top = train.batch_ramp, train.global_batch
    return ramp is not None and not 0 <= (top - ramp.start) // ramp.increment <= MOST_MICROBATCHES


def has_token_files(data: DataConfig) -> bool:
    """Return whether there are sources and all are token files that are here."""
    sources = data.sources
    return bool(sources) and all(Path(f"{source.path}.idx").exists() for source in sources)


def _describe_missing_files(data: DataConfig, given: int | None) -> str:
    """Return a line that says what a plan takes for the length. Raises `UserError` if it has
    nothing."""
    name = f"data.epochs={data.epochs:g}"
    if given is None:
        raise UserError(
            f"{name}: the token files of data.sources, whose sizes tell the number of steps, are "
            "not here; give the number: train.steps=N"
        )
    return f"{name} is taken for train.steps={given}, as the token files are not here"
