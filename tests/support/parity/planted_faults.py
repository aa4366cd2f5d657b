"""`run` with a mistake in it, to see that random runs find it."""

from unittest.mock import patch

from parity_runs import run

from megaframe.architecture.spec import ParamSpec

_find_reduction_axes = ParamSpec.find_reduction_axes


def run_without_summing_gains(*arguments):
    """Run with gains of norms whose gradients are not summed over tensor ranks."""

    def find_fewer_axes(self, sizes):
        axes = _find_reduction_axes(self, sizes)
        return tuple(axis for axis in axes if axis != "tensor" or self.role != "gain")

    with patch.object(ParamSpec, "find_reduction_axes", find_fewer_axes):
        return run(*arguments)
