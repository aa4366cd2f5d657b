"""What a run saves in its checkpoints, and how it starts from one or without one.

A checkpoint has this rank's pieces of weights and optimizer state, what gradient compression keeps
from step to step, and a `TrainState` with everything that is no tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from megaframe.architecture.spec import count_parameters
from megaframe.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Slice,
    find_checkpoint,
    locate_checkpoint,
)
from megaframe.checkpoint.base_weights import BaseWeights
from megaframe.checkpoint.manager import CheckpointManager
from megaframe.checkpoint.merged_adapters import (
    is_of_base,
    open_base,
    open_model,
    record_base,
    round_base,
)
from megaframe.checkpoint.stores.peer_memory import PeerMemoryWriter
from megaframe.checkpoint.train_state import (
    TrainState,
    check_same_run,
    describe_missing_state,
    describe_resumption,
    find_restarted,
    prepare_slices,
    read_train_state,
)
from megaframe.config import RunConfig
from megaframe.config.compare import PLACES, find_differences
from megaframe.config.phases import name_phase
from megaframe.data.loader import Loader
from megaframe.data_parallel.bucket import COMPRESSION_PREFIX
from megaframe.errors import UnreadableFile, UserError
from megaframe.io.run_files import METRICS_FILE
from megaframe.model.model_chunk import list_model_specs
from megaframe.optim.parameter_groups import find_frozen_names
from megaframe.resilience.downtime import find_last_saved
from megaframe.training.initialize_from import describe_loaded_weights, load_adapters, match_weights
from megaframe.training.island_checkpoint import IslandCheckpoint, remove_island
from megaframe.training.phases import find_phase
from megaframe.training.run_position import RunPosition
from megaframe.training.train_step import TrainStep


@dataclass(frozen=True)
class Restored:
    """What was loaded from a checkpoint.

    Attributes:
        step: The step of the checkpoint.
        state: Its state.
        notes: Lines to log, on what differs from it.
    """

    step: int
    state: TrainState
    notes: tuple[str, ...]


class RunCheckpoint:
    """The state of a run on this rank, as checkpoints have it.

    Args:
        config: Of the run.
        checkpointer: The checkpoints of the run.
        train_step: Has the parameters and the optimizer.
        loader: The training data.

    Attributes:
        initial_notes: Lines about the weights that a new run began with.
        base: What its adapters belong to, if only they are saved.
    """

    def __init__(
        self,
        config: RunConfig,
        checkpointer: CheckpointManager,
        train_step: TrainStep,
        loader: Loader,
    ) -> None:
        self._config, self._checkpointer, self._loader = config, checkpointer, loader
        self._parameters, self._optimizer = train_step.sharded_parameters, train_step.optimizer
        self._islands = IslandCheckpoint(
            train_step.islands,
            train_step.mesh,
            {p.spec.name for bucket in self._parameters.trained for p in bucket.parameters},
        )
        self._folder = Path(config.run.dir)
        self.initial_notes: tuple[str, ...] = ()
        self.base: BaseWeights | None = None

    def restore_or_initialize(self, source: Checkpoint | None) -> Restored | None:
        """Continue from a checkpoint, or draw the initial weights if there is none.

        Raises:
            UserError: If the run must not start without one.
        """
        if source is not None:
            return self.restore(source)
        if self._config.checkpoint.resume is None:
            self._refuse_to_overwrite()
        else:
            self._refuse_to_begin_again()
        self._parameters.initialize_weights(self._config.run.seed)
        self._load_initial_weights()
        self._optimizer.begin()
        self._islands.begin()
        return None

    def restore(self, source: Checkpoint) -> Restored:
        """Continue from a checkpoint, at the start or in the middle of a run. If a rank cannot read
        it, all ranks use the newest earlier one that all can read."""
        self._parameters.wait_for_values()
        self._islands.abandon()
        error_text = ""
        try:
            restored = self._load(source)
        except UnreadableFile as error:
            error_text = str(error)
        error_text = self._checkpointer.agree_on_error(error_text)
        if error_text:
            return self.restore(self._checkpointer.open_previous(source, error_text))
        self._optimizer.load_state(restored.state.optimizer)
        self._islands.continue_from(restored.state)
        data_notes = self._loader.load(restored.state.data, restored.state.config.train.seq)
        return Restored(restored.step, restored.state, (*restored.notes, *data_notes))

    def start_save(
        self,
        writer: CheckpointWriter | PeerMemoryWriter,
        step: int,
        state: TrainState,
        note: Callable[[str], None],
        time_save: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Start a save of the last step. Weights are copied while the next step runs: its update
        waits for the copy.

        Args:
            writer: Writes the checkpoint.
            step: The step's number.
            state: What is saved besides tensors.
            note: Called with lines to show.
            time_save: Returns a context whose time is counted as waiting for the save.
        """
        whole = self.base is None
        slices = [
            part
            for part in self.list_slices(owned_only=True, coded=whole)
            if whole or not is_of_base(part.name)
        ]
        residuals = self.list_compression_slices()
        tensors = [*self._islands.list_saved(slices), *residuals]
        values = self._islands.complete_state(state).model_dump(mode="json")
        self._checkpointer.start_save(writer, step, tensors, values, note)
        if residuals or self._config.parallel.serial:  # residuals change before the update
            writer.wait_for_copy()
            return

        def wait_for_copy() -> None:
            with time_save():
                writer.wait_for_copy()

        self._optimizer.delay_update(wait_for_copy)

    def list_slices(self, *, owned_only: bool, coded: bool = False) -> list[Slice]:
        """Return this rank's pieces of weights and optimizer state in a checkpoint.

        Args:
            owned_only: Only those that this rank saves.
            coded: Also weights that are kept as codes, which take more memory as pieces.
        """
        return [
            Slice(name, spec.shape, box.offset, tensor)
            for name, spec, box, tensor in self._optimizer.list_tensors(
                owned=owned_only, coded=coded
            )
        ]

    def list_compression_slices(self) -> list[Slice]:
        """Return what gradient compression on this rank keeps from step to step."""
        return [
            Slice(name, tuple(tensor.shape), (0,), tensor)
            for name, tensor in self._parameters.list_compression_state()
        ]

    def _load(self, source: Checkpoint) -> Restored:
        """Load this rank's tensors, and read the rest of the state. Raises `UnreadableFile` if this
        rank cannot read the checkpoint, and `UserError` if it is of another run."""
        config = self._config
        with source as checkpoint:
            state = read_train_state(checkpoint)
            check_same_run(state.config, config, checkpoint.path, state.extensions, state.data)
            self._enter_phase(checkpoint, state)
            slices = self.list_slices(owned_only=False)
            if state.base is None:
                self._load_coded(checkpoint)
            else:
                self._load_base(state.base, [p for p in slices if is_of_base(p.name)], checkpoint)
                slices = [part for part in slices if not is_of_base(part.name)]
            self.base, saved = state.base, {remove_island(name) for name in checkpoint.tensors}
            residuals = [part for part in self.list_compression_slices() if part.name in saved]
            owned = {(part.name, part.box) for part in self.list_slices(owned_only=True)}
            moments = self._optimizer.list_moments()
            was = state.config
            frozen = find_frozen_names(was.frozen_patterns, list_model_specs(was.model, was.train))
            restarted = find_restarted(moments, saved, frozen)
            prepared = [*prepare_slices(slices, saved, restarted), *residuals]
            island_notes = [*self._islands.load_tensors(checkpoint, prepared, owned, state)]
            state.optimizer = state.optimizer.restart(moments, restarted)
            changed = find_differences(was, config, PLACES)
            notes = [
                *describe_resumption(checkpoint.step, str(checkpoint), changed, state.extensions),
                *describe_missing_state(slices, saved),
                *island_notes,
            ]
            if not residuals and any(name.startswith(COMPRESSION_PREFIX) for name in saved):
                text = "the residual of gradient compression is dropped: it belongs to another "
                notes.insert(0, text + "layout")
            return Restored(checkpoint.step, state, tuple(notes))

    def _enter_phase(self, checkpoint: Checkpoint, state: TrainState) -> None:
        """Forget the losses of a checkpoint that was saved in an earlier phase: with other data and
        another learning rate, a higher one is no spike.

        Raises:
            UserError: If the checkpoint is not followed by the phase of this config, because later
                checkpoints cannot be read.
        """
        data, saved = self._config.data, state.config.data.phase
        if data.phase is None or (saved is not None and saved.number == data.phase.number):
            return
        follows = find_phase(data, RunPosition(checkpoint.step, 0, state.config)).number
        if follows != data.phase.number:
            raise UserError(
                f"{checkpoint} is of {name_phase(data, follows)}, and this is "
                f"{name_phase(data, data.phase.number)}; to train again from there, use "
                f"checkpoint.resume={checkpoint.path}"
            )
        state.history = replace(state.history, losses=())
        state.loss = math.nan

    def _load_base(self, base: BaseWeights, slices: list[Slice], owner: Checkpoint) -> None:
        """Load the weights that the adapters of a checkpoint belong to."""
        with open_base(base, self._config.checkpoint.weights or "", owner) as checkpoint:
            checkpoint.load(slices)
            self._load_coded(checkpoint)

    def _load_coded(self, checkpoint: Checkpoint) -> None:
        """Load the weights that are kept as codes."""
        for pieces in self._optimizer.list_coded():
            checkpoint.load([Slice(name, spec.shape, b.offset, t) for name, spec, b, t in pieces])

    def _load_initial_weights(self) -> None:
        """Load the weights of `checkpoint.weights`, if it is set, over the initial ones."""
        location = self._config.checkpoint.weights
        if not location:
            return
        path = locate_checkpoint(location, "checkpoint.weights")
        with open_model(path) as checkpoint:
            saved = read_train_state(checkpoint).config
            # Optimizer state has names of its own; only the master weights bear the spec's.
            pieces = self._optimizer.list_tensors(coded=False)
            weights = [piece for piece in pieces if piece[0] == piece[1].name]
            start = time.perf_counter()
            for portion in chain([weights], self._optimizer.list_coded()):
                checkpoint.load(match_weights(portion, checkpoint, saved.model, self._config.model))
            seconds = time.perf_counter() - start
            specs = list_model_specs(self._config.model, self._config.train)
            notes = [describe_loaded_weights(specs, checkpoint, seconds)]
            # What the base lacks has initial values, which only a whole checkpoint keeps.
            names = (spec.name for spec in specs if is_of_base(spec.name))
            lacking = any(name not in checkpoint.tensors for name in names)
            if adapters := self._config.checkpoint.adapters:
                model, train = self._config.model, self._config.train
                base = round_base(checkpoint, model, train)
                notes.append(load_adapters(Path(adapters), model, train, weights, base))
        if self._config.model.adapters is not None and not lacking:
            self.base = record_base(path)
            trained = count_parameters(spec for spec in specs if not is_of_base(spec.name))
            notes.append(
                f"checkpoints hold {trained:,} of {count_parameters(specs):,} parameters: those of "
                f"adapters, which belong to {self.base.path} ({self.base.fingerprint})"
            )
        self.initial_notes = tuple(notes)

    def _refuse_to_begin_again(self) -> None:
        """Raise `UserError` if this run has saved a checkpoint, because none was found to resume
        from. Only a run that never saved one, for example because it was killed before, may start
        from scratch."""
        reached_and_saved = find_last_saved(self._folder)
        if reached_and_saved is not None:
            reached, saved = reached_and_saved
            folder = self._folder
            raise UserError(
                f"run.dir={folder} holds a run up to step {reached} whose last checkpoint was "
                f"of step {saved}, and there is none in {self._checkpointer.root}: bring its "
                f"checkpoints back there, give another run.dir, or delete {folder} to start "
                "from scratch"
            )

    def _refuse_to_overwrite(self) -> None:
        """Raise `UserError` if a fresh start would overwrite another run's records or
        checkpoints."""
        settings = self._config.checkpoint
        if (self._folder / METRICS_FILE).exists():
            raise UserError(
                f"run.dir={self._folder} already holds a run; continue it with "
                "checkpoint.resume=latest, or give another run.dir"
            )
        root = self._checkpointer.root
        saves = settings.folder is not None and settings.every
        if saves and find_checkpoint(root, "latest") is not None:
            raise UserError(
                f"checkpoint.folder={root} already holds checkpoints; continue from them with "
                "checkpoint.resume=latest, or give another folder"
            )
