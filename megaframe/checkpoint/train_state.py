"""What a checkpoint holds besides its tensors, and which of its tensors a run can do without."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from megaframe.checkpoint import Checkpoint, Slice, StorePath
from megaframe.checkpoint.base_weights import BaseWeights
from megaframe.config import RunConfig
from megaframe.config.compare import TRAINING_ONLY, find_differences
from megaframe.config.migration import upgrade_keys
from megaframe.config.phases import list_phase_keys
from megaframe.config.registry import get_registry
from megaframe.data.training_shares import find_changed_shares
from megaframe.errors import UserError
from megaframe.extensions import refuse_missing_extensions
from megaframe.metrics.gradient_noise import NoiseAverages
from megaframe.ops.cpu_routines import CPURoutines
from megaframe.optim.optimizer import OptimizerState

OPTIMIZER_PREFIX, EMA_PREFIX = "optimizer.", "optimizer.ema/"
"""Prefixes of the names of optimizer state, and of averages of weights, in a checkpoint."""
_MOST_SAMPLES = 1 << 53


@dataclass(frozen=True)
class SpikeHistory:
    """The judgement of earlier steps.

    Attributes:
        losses: The last losses.
        left_out: The first samples of steps whose data is skipped.
        failed: The first samples of steps that have failed once.
    """

    losses: Sequence[float] = ()
    left_out: Sequence[int] = ()
    failed: Sequence[int] = ()


class TrainState(BaseModel):
    """The state of a run in a checkpoint, besides its tensors.

    Attributes:
        config: The resolved config of the run. Keys that its version did not have are at their
            defaults.
        data: State of the loader.
        optimizer: State of the optimizer besides its tensors.
        loss, grad_norm: Of the last step, for comparison with the first step after a load.
        eval_loss: Of the evaluation after the last step, if there was one.
        history: The judgement of earlier steps.
        extensions: The extensions that the run had loaded, and the hashes of their sources.
        callbacks: What the callbacks of the run remember, by name.
        gradient_noise: What was measured of the noise of gradients.
        base: What the adapters in the checkpoint belong to, if it has no other weights.
        islands: State of the optimizer of each island; empty if there is one.
        unmixed: Fragments that islands have pushed and not mixed into their weights yet.
        routines: What multiplies matrices and computes attention on the CPU. Empty on a GPU, and in
            checkpoints of versions that did not record it.
    """

    model_config = ConfigDict(extra="forbid")

    config: RunConfig
    data: dict[str, Any]
    optimizer: OptimizerState
    loss: float
    grad_norm: float
    eval_loss: float | None = None
    history: SpikeHistory = SpikeHistory()
    routines: CPURoutines = CPURoutines()
    extensions: dict[str, str] = {}
    callbacks: dict[str, dict[str, JsonValue]] = {}
    gradient_noise: NoiseAverages = NoiseAverages()
    base: BaseWeights | None = None
    islands: tuple[OptimizerState, ...] = ()
    unmixed: tuple[int, ...] = ()


def make_initial_train_state(config: RunConfig) -> TrainState:
    """Return the state of a run that has not begun, for weights that come from elsewhere."""
    return TrainState(
        config=config,
        data={},
        optimizer=OptimizerState(0, 1.0, 0),
        loss=math.nan,
        grad_norm=math.nan,
        extensions=list_loaded_extensions(),
    )


def read_train_state(checkpoint: Checkpoint) -> TrainState:
    """Return the state in a checkpoint.

    Raises:
        UserError: If it is not a state of a run, or if its config has keys that this version does
            not know.
    """
    try:
        state_json = checkpoint.state
        if isinstance(state_json, dict) and isinstance(state_json.get("config"), dict):
            state_json = {**state_json, "config": upgrade_keys(state_json["config"])}
        state = TrainState.model_validate(state_json)
    except ValidationError as error:
        # First: without its section, the keys of a part are unknown ones.
        extensions = state_json.get("extensions") if isinstance(state_json, dict) else None
        if isinstance(extensions, dict):
            refuse_missing_extensions(extensions, checkpoint.path)
        unknown_keys = [
            ".".join(map(str, mistake["loc"][1:]))
            for mistake in error.errors()
            if mistake["type"] == "extra_forbidden" and mistake["loc"][0] == "config"
        ]
        if unknown_keys:
            raise UserError(
                f"{checkpoint.path} is of a run with keys that this version of megaframe does not "
                f"know: {', '.join(unknown_keys)}; use the version that saved it, or a later one"
            ) from None
        first_mistake = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(map(str, first_mistake["loc"])) or "all of it"
        raise UserError(
            f"{checkpoint.path} has no run state: {location}: {first_mistake['msg']}"
        ) from None
    for mistake in _find_invalid_values(state, checkpoint.step):
        raise UserError(
            f"{checkpoint.path} of step {checkpoint.step} has a run state that no run has: "
            f"{mistake}"
        )
    return state


def list_loaded_extensions() -> dict[str, str]:
    """Return the names of the extensions of this process, and the hashes of their sources."""
    return {extension.name: extension.digest for extension in get_registry().extensions}


def _describe_changed_extensions(saved: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each extension whose source is not what it was in a checkpoint."""
    for name, digest in list_loaded_extensions().items():
        if name in saved and saved[name] != digest:
            yield (
                f"warning: extension {name} has changed since the checkpoint (SHA-256 "
                f"{saved[name][:12]} there, {digest[:12]} here)"
            )


def _find_invalid_values(state: TrainState, step: int) -> Iterator[str]:
    """Yield what cannot be in the state of a run at `step`. A matching checksum does not make it
    true: anybody can compute one."""
    history = state.history
    for optimizer in (state.optimizer, *state.islands):
        yield from _find_invalid_optimizer_values(optimizer, step)
    for name, firsts in (("left_out", history.left_out), ("failed", history.failed)):
        if not all(0 <= first < _MOST_SAMPLES for first in firsts):
            yield f"history.{name} has numbers that no sample has"
    noise = state.gradient_noise
    if not 0 <= noise.measurements <= step:
        yield f"gradient_noise.measurements={noise.measurements} is not from 0 to {step}"
    if not math.isfinite(noise.squared_norm) or not math.isfinite(noise.variance):
        yield "gradient_noise has numbers that are not finite"


def _find_invalid_optimizer_values(optimizer: OptimizerState, step: int) -> Iterator[str]:
    """Yield what cannot be in the state of an optimizer at `step`."""
    for name, value in (("updates", optimizer.updates), ("good_steps", optimizer.good_steps)):
        if not 0 <= value <= step:
            yield f"optimizer.{name}={value} is not from 0 to {step}"
    if not all(0 <= value <= optimizer.updates for value in optimizer.updates_before.values()):
        yield f"optimizer.updates_before has numbers that are not from 0 to {optimizer.updates}"
    if not 0 < optimizer.loss_scale < math.inf:
        yield f"optimizer.loss_scale={optimizer.loss_scale} is not a number above 0"


def find_restarted(
    moments: Mapping[str, Sequence[str]], saved: Collection[str], frozen: Collection[str]
) -> frozenset[str]:
    """Return the parameters whose moments start from zero, and whose updates are counted from one:
    they were frozen, or trained by an optimizer with other moments. What remembers in part only
    would be corrected wrongly for having started at zero.

    Args:
        moments: Names of the moments of each trained parameter.
        saved: Names of the tensors in a checkpoint.
        frozen: Names of the parameters that were frozen when it was saved.
    """
    return frozenset(
        name
        for name, kinds in moments.items()
        if name in frozen or any(f"{OPTIMIZER_PREFIX}{kind}/{name}" not in saved for kind in kinds)
    )


def prepare_slices(
    slices: Sequence[Slice], saved: Collection[str], restarted: Collection[str]
) -> list[Slice]:
    """Set the moments of what `find_restarted` returns to zero, and return the other slices, which
    are to be loaded. An average that was not saved is loaded from the weight."""
    prepared = []
    for part in slices:
        is_average = part.name.startswith(EMA_PREFIX)
        is_moment = part.name.startswith(OPTIMIZER_PREFIX) and not is_average
        if is_moment and part.name.partition("/")[2] in restarted:
            part.tensor.zero_()  # in the middle of a run it remembers later steps
        elif is_average and part.name not in saved:
            prepared.append(replace(part, name=part.name.removeprefix(EMA_PREFIX)))
        else:
            prepared.append(part)
    return prepared


def describe_missing_state(slices: Sequence[Slice], saved: Collection[str]) -> Iterator[str]:
    """Yield a line for each kind of optimizer state that the checkpoint lacks."""
    missing_tensors: dict[str, dict[str, None]] = {}
    for tensor_slice in slices:
        if tensor_slice.name.startswith(OPTIMIZER_PREFIX) and tensor_slice.name not in saved:
            kind, _, name = tensor_slice.name.removeprefix(OPTIMIZER_PREFIX).partition("/")
            missing_tensors.setdefault(kind, {})[name] = None
    for kind, names in missing_tensors.items():
        omitted = f" and {len(names) - 1} more" if len(names) > 1 else ""
        owner = "their" if omitted else "its"
        start = f"{owner} moments start from zero"
        start = "it starts from the weights" if kind == "ema" else start
        yield (
            f"the checkpoint has no optimizer state `{kind}` of {next(iter(names))}{omitted}; "
            f"{start}"
        )


def describe_resumption(
    step: int, source: str, differences: Iterable[str], extensions: Mapping[str, str]
) -> Iterator[str]:
    """Yield lines that say from what a run continues, and which keys have changed since.

    Args:
        step: The step of the checkpoint.
        source: The checkpoint, in words.
        differences: Of its config and that of the run, as `find_differences` returns them.
        extensions: Those of the checkpoint, with the hashes of their sources.
    """
    yield f"resumed from step {step} of {source}"
    yield from _describe_changed_extensions(extensions)
    if changed := "; ".join(differences):
        yield f"changed since then: {changed}"


def check_same_run(
    saved: RunConfig,
    config: RunConfig,
    path: StorePath,
    extensions: Mapping[str, str] | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Check that a checkpoint belongs to this run.

    Args:
        saved: The config of the checkpoint.
        config: The config of the run.
        path: The checkpoint, for messages.
        extensions: Those of the checkpoint, with the hashes of their sources.
        data: The state of the loader in the checkpoint.

    Raises:
        UserError: If it is of another run: another model, seed, sequence length, or training
            share of the data, or without some of its extensions. What phases change may differ.
    """
    refuse_missing_extensions(extensions or {}, path)
    phase_keys = list_phase_keys(config.data)
    changes = [
        *find_differences(saved.model, config.model, TRAINING_ONLY | phase_keys, "model"),
        *find_differences(saved.run.seed, config.run.seed, (), "run.seed"),
        *find_differences(saved.train.seq, config.train.seq, phase_keys, "train.seq"),
        *find_changed_shares(saved.data, data or {}, config.data),
    ]
    if changes:
        start = f"to start a new run from its weights, where they fit: checkpoint.weights={path}"
        raise UserError("\n  ".join([f"{path} is a checkpoint of another run:", *changes, start]))
