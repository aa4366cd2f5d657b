"""Finds what makes a host wait for its device."""

import sys
from contextlib import contextmanager

import pytest
import torch
from megaframe_kernels import device

from megaframe.ops.operator_mode import OperatorMode


class _Waits(OperatorMode):
    """Fails on operators whose result the host must know before it can go on."""

    NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "bincount",
        "is_nonzero",
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        boolean = name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])
        assert name not in self.NAMES and not boolean, f"the host waits for {function}"
        return function(*args, **(kwargs or {}))


@contextmanager
def forbid_host_waits():
    """Return a context that fails on every operator and tensor method that brings numbers to the
    host, except inside Triton's interpreter."""
    inside = []

    def forbidden(name, real):
        def method(self, *arguments):
            assert inside, f"the host asks for Tensor.{name}"
            return real(self, *arguments)

        return method

    def launched(*arguments, **options):
        inside.append(1)
        with torch.utils._python_dispatch._disable_current_modes():
            launch(*arguments, **options)
        inside.pop()

    launch = device.launch
    names = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("megaframe_kernels") and getattr(module, "launch", None) is launch:
                patch.setattr(module, "launch", launched)
        for name in names:
            patch.setattr(torch.Tensor, name, forbidden(name, getattr(torch.Tensor, name)))
        with _Waits():
            yield
