"""The phase that a run is in (`data.phases`): its config, and where it and the run end.

A phase is a run of its own that continues the checkpoint of the one before, under a config that
differs in what the phase changes. So whatever a resumed run may change, a phase may change too.
"""

from __future__ import annotations

from megaframe.config import RunConfig
from megaframe.config.batch_ramp import count_samples, count_steps
from megaframe.config.data import DataConfig, PhasePosition
from megaframe.config.phases import make_phase_config, name_phase, select_own_learning_rate
from megaframe.config.schema import CheckpointConfig, TrainConfig
from megaframe.errors import UserError
from megaframe.training.run_position import RunPosition, find_position


def decide_phases(config: RunConfig) -> list[RunConfig]:
    """Return the configs of the phase that a run is in and of those after it. Each says where its
    phase and the run end; all but the first continue from the newest checkpoint.

    Args:
        config: The whole run. The config of one phase is returned as it is.

    Raises:
        UserError: A phase has keys or values that cannot be, or the lengths of the run contradict
            each other.
    """
    if config.data.phase is not None or not config.data.phases:
        return [config]
    _check_phases(config.data, config.checkpoint)
    position = find_position(config.run, config.checkpoint)
    first = find_phase(config.data, position)
    configs, place = [], first
    for number in range(first.number, len(config.data.phases) + 1):
        phase = make_phase_config(config, number)
        if number > first.number:
            place = PhasePosition(number=number, step=position.step, samples=position.samples)
            phase = phase.replace(checkpoint={"resume": "latest"})
        position = _find_end(phase.train, phase.data, place, position)
        place = place.model_copy(update={"end": position.step})
        optim = select_own_learning_rate(phase.data, number, (place.step, place.end))
        train = {"stop_after": None if number == len(config.data.phases) else place.end}
        configs.append(phase.replace(data={"phase": place}, train=train, optim=optim))
    given, total = config.train.steps, position.step
    if "steps" in config.train.model_fields_set and given != total:
        raise UserError(
            f"train.steps={given} and data.phases disagree: they take {total:,} steps; leave "
            "train.steps out"
        )
    configs = [phase.replace(train={"steps": total}) for phase in configs]
    return configs if config.train.stop_after is None else _stop(configs, config.train.stop_after)


def _stop(configs: list[RunConfig], step: int) -> list[RunConfig]:
    """Return the phases of a run up to `train.stop_after`, at least the one that it is in."""
    begun = [phase for phase in configs[1:] if phase.data.phase and phase.data.phase.step < step]
    return [
        phase.replace(train={"stop_after": min(step, phase.train.last_step)})
        for phase in (configs[0], *begun)
    ]


def find_phase(data: DataConfig, position: RunPosition) -> PhasePosition:
    """Return the phase that the step after a position belongs to.

    Args:
        data: The section of the whole run.
        position: Its checkpoint, which says in which phase it was saved, or its first step.
    """
    saved = position.config
    if saved is None or saved.data.phase is None:
        return PhasePosition()
    number, end = saved.data.phase.number, saved.data.phase.end or saved.train.last_step
    if position.step < end or number >= len(data.phases):
        return saved.data.phase
    return PhasePosition(number=number + 1, step=position.step, samples=position.samples)


def describe_phase(train: TrainConfig, data: DataConfig) -> list[str]:
    """Return a line about the phase of a config; none without phases."""
    if data.phase is None:
        return []
    name, place = name_phase(data, data.phase.number), data.phase
    return [f"{name}: steps {place.step + 1:,} to {place.end:,} of {train.steps:,}"]


def _find_end(
    train: TrainConfig, data: DataConfig, place: PhasePosition, position: RunPosition
) -> RunPosition:
    """Return the end of a phase, which begins at `place`, of a run that is at `position`."""
    seen = position.samples
    samples = -(-data.phases[place.number - 1].tokens // train.seq)
    steps = count_steps(train, place.samples + samples - seen, seen)
    return RunPosition(position.step + steps, seen + count_samples(train, steps, seen))


def _check_phases(data: DataConfig, checkpoint: CheckpointConfig) -> None:
    """Raise `UserError` if the phases contradict other keys."""
    if data.epochs is not None:
        raise UserError(
            f"data.epochs={data.epochs:g} and data.phases both say how long the run is; leave one "
            "of them out"
        )
    if len(data.phases) > 1 and not checkpoint.every:
        raise UserError(
            "checkpoint.every=0 saves no checkpoint, but each of data.phases continues from that "
            "of the one before; use checkpoint.every=1000, or another number above 0"
        )
