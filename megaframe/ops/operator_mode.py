"""A context in which a class of ours sees every operator."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """A `TorchDispatchMode` that torch does not keep its compiler away from: to do so, it would
    import the compiler, which takes as long as torch itself, and nothing is compiled here."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
