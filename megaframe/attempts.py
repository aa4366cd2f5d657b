"""Attempts: a run, in as many as it takes of this process.

When only a transfer has failed, and all ranks say so, a new mesh and a new trainer do what a new
process would, and nothing of the old ones is mended: so there is one way to continue a run. What is
saved of it is the start of the program, the import of torch and the work of the launcher.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

from megaframe.comm.place import Place
from megaframe.config import RunConfig
from megaframe.device import be_deterministic
from megaframe.errors import LostRanks, leave
from megaframe.faults.leaving import Launcher
from megaframe.layout import Layout
from megaframe.mesh import Mesh
from megaframe.trainer import Trainer


def train(config: RunConfig, layout: Layout, notes: Sequence[str] = ()) -> None:
    """This rank's part in a run, to its end. notes: what is to be said at its start. Raises what
    `Mesh` and `Trainer` raise, but for `LostRanks` of a run that has begun, which ends the process
    (`Mesh.leave`) or begins it again."""
    if config.run.deterministic:
        be_deterministic()  # NCCL's groups ask for it when they are made
    often, last, launcher = 0, -1, Launcher()
    while True:
        mesh = Mesh(
            layout,
            device=config.run.device,
            timeout=config.parallel.timeout,
            serial=config.parallel.serial,
            check_collectives=config.faults.check_collectives,
        )
        trainer: Trainer | None = None
        try:
            trainer = Trainer(config, mesh, notes, launcher)
            if config.checkpoint.resume == "latest" and often < config.faults.restarts:
                mesh.may_begin_again(partial(_came_further, mesh.place, last))
            trainer.run()
            return
        except LostRanks as lost:
            why = mesh.leave(lost)
            assert trainer is not None, "ranks begin again from the loop over steps"
            trainer.let_go()
        except (Exception, KeyboardInterrupt) as error:
            if mesh.ends_with_others:
                leave(error, mesh.rank)
            raise
        finally:
            mesh.close()
        often, last = often + 1, mesh.place.step
        of = f"{often} of faults.restarts={config.faults.restarts}"
        notes = (*notes, f"restarted in the same processes ({of}): {why}")
        del trainer, mesh
        gc.collect()  # what refers to itself holds the memory that the next trainer needs


def _came_further(place: Place, last: int) -> bool:
    """Whether this rank has come beyond the step at which ranks began again the last time: what
    fails at the same one again is no fault of the network."""
    return place.step > last
