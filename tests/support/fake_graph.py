"""A CPU's stand-in for a CUDA graph: what a function launches is written down with the very tensors
of that time, and replayed without any of the function's Python code. So a number that is not in the
same memory any more, or that the host would have to supply, shows in the results.

Operators, kernels and transfers are written down. Recording fails on what a GPU could not record: a
wait for something started before, a transfer that nobody waits for, a query whether a transfer has
arrived, a number that the host must know, and numbers that come from the host.
"""

import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from host_waits import forbid_host_waits
from megaframe_kernels import device
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from megaframe.distributed import pending
from megaframe.distributed.pending import Pending
from megaframe.ops.operator_mode import OperatorMode


class GraphRecording(OperatorMode):
    """Writes down what is launched. steps: what is replayed. works: transfers in flight, by number.
    order: the axes of all transfers, in the order in which they were started."""

    def __init__(self):
        super().__init__()
        self.steps, self.works, self.kept_alive, self.order = [], {}, [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        name = function.__name__.split(".")[0]
        assert name != "lift_fresh", "numbers come from the host"
        # Detached, so that no autograd graph of an argument is kept.
        inputs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        outputs = [x.detach() for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        input_storages = {x.untyped_storage().data_ptr() for x in list_tensors(inputs)}
        fresh = [x.untyped_storage().data_ptr() not in input_storages for x in outputs]
        self.kept_alive.append((inputs, outputs))
        if function._schema.is_mutable:
            self.steps.append(lambda: function(*inputs[0], **inputs[1]))
        elif any(fresh) and "empty" not in name:
            assert all(fresh), f"{function} gives a view and something new"
            self.steps.append(partial(write_into, outputs, function, inputs))
        return output

    def replay(self):
        with torch.no_grad():
            for step in self.steps:
                step()


def list_tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def write_into(outputs, function, inputs):
    results = list_tensors(function(*inputs[0], **inputs[1]))
    for old, new in zip(outputs, results, strict=True):
        old.copy_(new)


def record(compute, order):
    """Record, as `megaframe.training.cuda_graph.record_cuda` does on a GPU. order: is
    extended by the axes of each transfer, in order."""
    recording = GraphRecording()
    with forbid_host_waits(), watch_transfers(recording), recording:
        passed = compute()
    assert not recording.works, "a transfer is recorded that nobody waits for"
    order += recording.order
    return passed, recording.replay


@contextmanager
def watch_transfers(recording):
    """Return a context in which a recording also gets transfers and kernels, which torch's
    dispatcher does not see."""
    started, finish, launch = pending.start_pending, Pending._wait_for_all, device.launch
    numbers = {}

    def begin(number, start):
        recording.works[number] = start()

    def start_one(value, group, start, *arguments, **options):
        number = len(numbers)
        with _disable_current_modes():
            pending = started(value, group, start, *arguments, **options)
        numbers[id(pending)] = number, pending
        recording.works[number] = None
        recording.order.append(group.axes)
        recording.steps.append(lambda: begin(number, start))
        return pending

    def finish_one(self):
        if self._work is not None:
            assert id(self) in numbers, "a graph waits for what was started before it"
            number, _ = numbers[id(self)]
            del recording.works[number]
            recording.steps.append(lambda: recording.works.pop(number).wait())
        finish(self)

    def launch_one(inner, *arguments, **options):
        inner(*arguments, **options)
        # With an empty stack this is inside an operator, which is itself written down.
        if torch._C._len_torch_dispatch_stack():
            recording.steps.append(partial(launch, *arguments, **options))

    def refuse_query(self):
        raise AssertionError("a graph cannot tell what has arrived")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "_wait_for_all", finish_one)
        patch.setattr(Pending, "is_complete", refuse_query)
        for name, module in list(sys.modules.items()):
            if name.startswith("megaframe") and getattr(module, "start_pending", None) is started:
                patch.setattr(module, "start_pending", start_one)
            if name.startswith("megaframe_kernels") and hasattr(module, "launch"):
                patch.setattr(module, "launch", partial(launch_one, module.launch))
        yield
