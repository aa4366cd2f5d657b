"""The promise that layout never changes the answer, and the options of a config that break it.

docs/design.md has the same list with the measured effect of each option;
`tests/parity/test_invariance.py` compares both with real runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megaframe.config.schema import RunConfig


def find_layout_dependence(config: RunConfig) -> Iterator[str]:
    """Yield each option of a config that makes answers depend on the layout: key, value, reason."""
    model, train, parallel, optim = config.model, config.train, config.parallel, config.optim
    compressed = config.sync.compress != "none"
    if model.moe is not None and model.moe.capacity is not None:
        yield (
            f"model.moe.capacity={model.moe.capacity:g} (drops what an expert gets beyond this "
            "multiple of the mean load of a rank and microbatch)"
        )
    if train.fp8 != "none":
        yield f"train.fp8={train.fp8} (scales depend on the numbers that a rank has)"
    if parallel.reduce_precision != "master":
        yield (
            f"parallel.reduce_precision={parallel.reduce_precision} (rounds gradients "
            "before ranks sum them)"
        )
    if parallel.compress != "none":
        yield f"parallel.compress={parallel.compress} (leaves out some of what ranks sum)"
    if parallel.islands > 1:
        yield (
            f"parallel.islands={parallel.islands} (sums gradients within each island only; layouts "
            "of the ranks of an island do not matter"
            + (f", but for sync.compress={config.sync.compress}" if compressed else "")
            + ")"
        )
    if (server := config.sync.server) is not None:
        yield (
            f"sync.server={server} (each of sync.islands={config.sync.islands} sums gradients by "
            "itself"
            + (
                ""
                if config.sync.consistency == "bulk_synchronous"
                else f", and with sync.consistency={config.sync.consistency} answers depend on "
                "their speed"
            )
            + ")"
        )
    if optim.state == "int8":
        yield "optim.state=int8 (tensor ranks may cut the blocks that share a scale)"
    if optim.name == "lion" and model.qkv_bias:
        yield (
            "optim.name=lion (takes the sign of rounding errors for biases of keys, unless "
            "optim.frozen lists them)"
        )


def describe_layout_dependence(options: Iterable[str]) -> Iterator[str]:
    """Yield one line with all options that `find_layout_dependence` yields; nothing if there are
    none."""
    if joined := "; ".join(options):
        yield f"layout may change the answer: {joined}"
