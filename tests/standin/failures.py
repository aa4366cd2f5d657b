"""Programs in which transfers, communicators, devices or hosts of the stand-in fail."""

import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import doctor_parts

import pretrain_gpt
from megaframe.comm import all_reduce
from megaframe.comm.communicators import allow_abort
from megaframe.layout import Layout
from megaframe.mesh import Mesh
from megaframe.trainer import Trainer
from standin import aborts, cuda
from standin.machine import library

IN_FLIGHT = []


def pretrain():
    """Pretrain with a fault: the command line begins with its name, its rank, its step, and the
    time limit of steps from then on."""
    fault, rank, step, limit, *sys.argv[1:] = sys.argv[1:]
    train_step, before = Trainer._train_step, []

    def faulty(trainer):
        if trainer.step == int(step) and not before:
            before.append(step)
            trainer.mesh.watch_steps(float(limit), trainer.folder / "faults")
            if trainer.mesh.rank == int(rank):
                globals()[fault]()
        train_step(trainer)

    Trainer._train_step = faulty
    pretrain_gpt.main()


def hang():
    """The third transfer from now on is one that hangs."""
    aborts.hangs["any"] = 3


def lose_connection():
    aborts.communicators[0]._sockets.cut()


def fail_device():
    """While the host waits for a message, a kernel accesses memory that it must not."""
    aborts.hangs["receive"] = 1
    aborts.when_hung.append(partial(cuda.errors.append, "an illegal memory access"))


def two_communicators():
    """Return two communicators, in each of which a transfer of the first rank hangs."""
    mesh = Mesh(Layout(data=2), device="cuda", timeout=30)
    groups = [mesh.group("data"), mesh._make_group(("data",), mesh.layout.groups("data"))]
    for group in groups:
        if mesh.rank == 0:
            aborts.hangs["any"] = 1
        IN_FLIGHT.append(all_reduce(torch.ones(3, device="cuda"), group))
    return mesh, groups


def abort_together():
    mesh, groups = two_communicators()
    assert mesh._over_nccl.abort() == ""
    try:
        all_reduce(torch.ones(3, device="cuda"), groups[1])
    except RuntimeError as error:
        assert "was aborted on rank" in str(error)
    else:
        raise AssertionError("an aborted communicator can be used")
    mesh.close()


def abort_one_after_the_other():
    _, groups = two_communicators()
    for group in groups:
        group.handle.abort()


def destroy_in_use():
    mesh, _ = two_communicators()
    mesh.close()


def pretrain_at_a_pace():
    """Pretrain with a device or a host of the second rank that is slow. The command line begins
    with what launching and running a piece of work takes on either rank, in nanoseconds."""
    launch, work, launch_second, work_second, *sys.argv[1:] = sys.argv[1:]
    second = os.environ["RANK"] == "1"
    pace = (launch_second, work_second) if second else (launch, work)
    library.set_pace(*map(float, pace))
    pretrain_gpt.main()


def doctor():
    """Do parts of `tools/doctor.py --ranks` on this rank, with kernels in plain code. The command
    line is a folder and the parts."""
    folder, *names = sys.argv[1:]
    allow_abort()
    own = doctor_parts.Doctor("cuda", 60.0, Path(folder), large=1 << 14)
    doctor_parts.run(names, 0, own)
