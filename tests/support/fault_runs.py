"""Runs with faults: the entry, with a fault injected into one rank or all from outside."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pretrain_gpt  # noqa: E402
from megaframe.data.microbatch import IGNORE  # noqa: E402
from megaframe.distributed import gloo_sockets  # noqa: E402
from megaframe.distributed.collectives import all_reduce, receive, send  # noqa: E402
from megaframe.distributed.watchdog import Watchdog  # noqa: E402
from megaframe.training.trainer import Trainer  # noqa: E402

ONCE = {"done": False}
LIMIT = {"seconds": None}
"""Time limit of steps after the first two, which may be slow on a busy machine."""


def main(overrides, fault=None, rank=None, *arguments):
    """Run the entry; return its exit status, or the message that it exits with.

    fault(trainer, *arguments) runs before every step, on `rank`, or on all ranks if it is None.
    """
    train_step = Trainer._train_step
    ONCE.clear()
    ONCE["done"] = False

    def faulty(trainer):
        if LIMIT["seconds"] and trainer.step == 2:
            trainer.mesh.watch_steps(LIMIT["seconds"], trainer.folder / "faults")
        if fault is not None and rank in (None, trainer.mesh.rank):
            fault(trainer, *arguments)
        train_step(trainer)

    Trainer._train_step = faulty
    sys.argv = ["pretrain_gpt.py", *overrides]
    try:
        pretrain_gpt.main()
        return 0
    except SystemExit as status:
        return status.code
    finally:
        Trainer._train_step = train_step


def run_alone(limit, *arguments):
    """Run `main` in a process of its own, which any code inside may end.

    limit: the longest time of a step after the first two, in seconds.
    """
    LIMIT["seconds"] = limit
    os._exit(main(*arguments) or 0)


def begins_once(trainer, step):
    """Return whether `step` begins now, and for the first time."""
    if trainer.step != step or ONCE["done"]:
        return False
    ONCE["done"] = True
    return True


# Faults.


def sleep_in_data(trainer, step):
    if trainer.step == step:
        trainer.loader.next = lambda: time.sleep(1000)


def sleep_in_data_on_one_rank(trainer, step, rank):
    """Let one rank sleep in its loader, and the others take a second to write their stacks."""
    if trainer.step == step and trainer.mesh.rank == rank:
        sleep_in_data(trainer, step)
    elif trainer.step == step:
        write = Watchdog._dump_stacks
        Watchdog._dump_stacks = lambda *arguments: (time.sleep(1), write(*arguments))


def sleep_in_backward(trainer, step):
    if trainer.step == step:
        for stage in trainer.train_step.stages.values():
            stage.backward = lambda *_, **__: time.sleep(1000)


def start_another_collective(trainer, step):
    if trainer.step == step:
        all_reduce(torch.zeros(3), trainer.mesh.world).wait()


def sum_another_shape(trainer, step):
    if trainer.step == step:
        trainer.batches._sum = lambda _: all_reduce(torch.ones(5), trainer.mesh.data_control_group)


def must_look_ahead(trainer):
    """Every step but the first begins with the sum of its valid tokens under way."""
    assert trainer.step == 0 or trainer.batches._ahead is not None


def send_once_too_often(trainer, step):
    if trainer.step == step:
        link = trainer.mesh.link(0, 1)
        send(torch.zeros(7), link).wait()


def break_and_hang(trainer, broken, hung):
    """Break the connections of rank 2 at one step, and hang rank 1 at a later one.

    Rank 1 waits for a message that nobody sends, which only the step's time limit detects; the
    limit is short from then on.
    """
    mesh = trainer.mesh
    if mesh.rank == 2 and begins_once(trainer, broken):
        gloo_sockets.shut_down_sockets()
    if trainer.step == hung and "hung" not in ONCE:
        ONCE["hung"] = True
        mesh.watch_steps(1.0, trainer.folder / "faults")
        if mesh.rank == 1:
            receive(torch.zeros(3), mesh.world, source=0).wait()


def end_with_an_error(trainer, step):
    if trainer.step == step:
        raise ValueError("a mistake of its own")


def send_signal(trainer, step, number=signal.SIGTERM):
    if trainer.step == step:
        os.kill(os.getpid(), number)


def put_nan_in_weights(trainer, step):
    if begins_once(trainer, step):
        for bucket in trainer.train_step.sharded_parameters.buckets:
            bucket.weights[3] = torch.nan
            bucket.publish_weights()


def put_nan_once(trainer, step):
    """Put NaN into the output of the last block in one pass: a transient fault."""
    if begins_once(trainer, step):
        block = trainer.train_step.stages[0].blocks[-1]
        kind = type(block)

        class NanOnceBlock(kind):
            def __call__(self, *arguments):
                output = super().__call__(*arguments) * torch.nan
                self.__class__ = kind
                return output

        block.__class__ = NanOnceBlock


def put_nan_in_sample(trainer, sample, layer):
    """Let block `layer` fail whenever it computes a certain sample."""
    for stage in trainer.train_step.stages.values():
        for number, block in zip(stage.plan.blocks, stage.blocks, strict=True):
            if number == layer and not hasattr(block, "damaged"):
                fail_on_sample(stage, block, sample)


def fail_on_sample(stage, block, sample):
    kind, forward = type(block), stage.forward
    met = []

    def watched(number, microbatch, *arguments, **options):
        met[:] = [bool((microbatch.samples_B == sample).any())]
        return forward(number, microbatch, *arguments, **options)

    class NanInPassBlock(kind):
        damaged = True

        def __call__(self, *arguments):
            output = super().__call__(*arguments)
            return output * torch.nan if met == [True] else output

    stage.forward = watched
    block.__class__ = NanInPassBlock


def put_wrong_labels(trainer, first, samples):
    """Put unpredictable labels into the step that begins with sample `first`."""
    if hasattr(trainer.loader, "damaged"):
        return
    trainer.loader.damaged, next_step = True, trainer.loader.next

    def bad():
        batch = next_step()
        if batch.first == first:
            for microbatch in batch.microbatches:
                keep = microbatch.labels_BS == IGNORE
                microbatch.labels_BS.copy_((60 - microbatch.labels_BS).masked_fill(keep, IGNORE))
        return batch

    trainer.loader.next = bad


def flip_bit(trainer, step, always=False):
    """Flip one bit of a weight, on one replica."""
    if (always and trainer.step == step) or begins_once(trainer, step):
        bucket = trainer.train_step.sharded_parameters.buckets[-1]
        bits = bucket.weights.view(torch.int64)
        bits[5] ^= 1 << 20
        bucket.publish_weights()


def slow_data_down(trainer, seconds):
    if not hasattr(trainer.loader, "slow"):
        trainer.loader.slow, next_step = True, trainer.loader.next

        def late():
            time.sleep(seconds)
            return next_step()

        trainer.loader.next = late


# Files that a run leaves.


def log(folder):
    return (Path(folder) / "run.log").read_text()
