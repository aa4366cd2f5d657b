"""Programs in which transfers, communicators, devices or hosts of the stand-in fail."""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import doctor_parts
import doctor_transfers

import pretrain_gpt
from fake_cuda import aborts, cuda
from fake_cuda.machine import library
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.nccl_settings import allow_abort, configure_nccl
from megaframe.errors import LostRanks
from megaframe.layout import Layout
from megaframe.training.trainer import Trainer

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
    groups = [mesh.group("data"), mesh._make_group(("data",), mesh.layout.list_groups("data"))]
    for group in groups:
        if mesh.rank == 0:
            aborts.hangs["any"] = 1
        IN_FLIGHT.append(all_reduce(torch.ones(3, device="cuda"), group))
    # The first rank has the store, which the other one needs until it has come here.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"in flight/{mesh.rank}", "")
    store.wait(["in flight/0", "in flight/1"])
    return mesh, groups


def abort_together():
    """What a transfer that was aborted has brought is not handed out, and its communicator cannot
    be used."""
    mesh, groups = two_communicators()
    assert mesh.end_transfers() == ""
    fails(LostRanks, IN_FLIGHT[0].wait, "transfers were ended")
    x, options = [torch.ones(3, device="cuda")], dist.AllreduceOptions()
    fails(RuntimeError, lambda: groups[1].handle.allreduce(x, options), "was aborted on rank")
    mesh.close()


def fails(kind, call, text):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


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
    own_doctor = doctor_transfers.Doctor(
        "cuda", 60.0, Path(folder), large=1 << 14, nccl=configure_nccl(None)
    )
    doctor_parts.run(names, 0, own_doctor)
