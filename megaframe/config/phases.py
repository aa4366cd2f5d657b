"""Phases of a run (`data.phases`): the config of each, and which keys they change."""

from __future__ import annotations

from megaframe.config.batch_ramp import count_samples
from megaframe.config.data import DataConfig
from megaframe.config.load import apply_overrides, list_overridden_keys
from megaframe.config.schema import RunConfig, TrainConfig
from megaframe.errors import UserError

_LEARNING_RATE = frozenset(
    f"optim.{name}" for name in ("lr", "min_lr", "schedule", "warmup", "decay")
)
_OF_THE_RUN = (
    "run",
    "data.phases",
    "data.phase",
    "data.epochs",
    "train.steps",
    "train.stop_after",
    "checkpoint.folder",
    "checkpoint.resume",
    "checkpoint.weights",
    "checkpoint.adapters",
)


def name_phase(data: DataConfig, number: int) -> str:
    """Return the name of a phase in messages, such as `phase 2 of 3 (anneal)`. number: from 1."""
    name = data.phases[number - 1].name
    return f"phase {number} of {len(data.phases)}" + f" ({name})" * bool(name)


def list_phase_keys(data: DataConfig) -> frozenset[str]:
    """Return the keys that some phase changes."""
    return frozenset(
        name for phase in data.phases for name in list_overridden_keys(phase.overrides)
    )


def make_phase_config(config: RunConfig, number: int) -> RunConfig:
    """Return the config of a phase, whose place in the run is not decided.

    Args:
        config: The whole run.
        number: Which phase, from 1.

    Raises:
        UserError: The phase has keys that do not exist, values that they do not take, or keys that
            belong to the whole run.
    """
    phase, name = config.data.phases[number - 1], name_phase(config.data, number)
    try:
        keys = list_overridden_keys(phase.overrides)
        changed = apply_overrides(config, phase.overrides)
    except UserError as error:
        raise UserError(f"data.phases, {name}: {error}") from None
    for key in sorted(keys):
        if any(key == other or key.startswith(f"{other}.") for other in _OF_THE_RUN):
            raise UserError(f"data.phases, {name}: {key} belongs to the whole run; leave it out")
    return changed


def list_phase_configs(config: RunConfig) -> list[RunConfig]:
    """Return the config of each phase as `make_phase_config` does; the config itself if the run has
    no phases, or if it is that of one."""
    if config.data.phase is not None or not config.data.phases:
        return [config]
    return [make_phase_config(config, number + 1) for number in range(len(config.data.phases))]


def select_own_learning_rate(
    data: DataConfig, number: int, span: tuple[int, int]
) -> dict[str, object]:
    """Return the keys of `optim` by which a phase has the schedule of its learning rate for itself;
    none if the phase has no keys of it. What it does not say of warm-up and decay is at its
    default, not as in the rest of the run.

    Args:
        data: The section.
        number: Which phase, from 1.
        span: Its first and last step.
    """
    keys = list_overridden_keys(data.phases[number - 1].overrides)
    if "optim.span" in keys or not keys & _LEARNING_RATE:
        return {}
    optim: dict[str, object] = {"span": span}
    if "optim.warmup" not in keys:
        optim["warmup"] = 0
    if "optim.decay" not in keys:
        optim["decay"] = None
    return optim


def count_tokens_left(train: TrainConfig, data: DataConfig, step: int, samples_seen: int) -> int:
    """Return the tokens of all steps of the run after `step`, in this and in later phases.

    Args:
        train: The section, with decided steps.
        data: The section.
        step: Steps that are done.
        samples_seen: Samples of these steps.
    """
    end = train.steps if data.phase is None else data.phase.end
    own = count_samples(train, max(0, end - step), samples_seen) * train.seq
    later = data.phases[data.phase.number :] if data.phase is not None else ()
    return own + sum(phase.tokens for phase in later)
