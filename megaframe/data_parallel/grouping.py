"""Grouping: which units of a stage share buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from megaframe.architecture.buckets import group_blocks_into_buckets
from megaframe.distributed.mesh import Mesh
from megaframe.parameters.parameter import Module

TABLES = ("embedding", "head")
"""Roles of parameters that are used only at one end of the model."""
VECTORS = ("gain", "bias", "balance")
"""Roles of parameters that are so small that ranks keep their values whole at any ZeRO stage."""


def bucket_units(
    units: Sequence[Module], mesh: Mesh, least: int | Literal["auto"]
) -> Iterator[tuple[Sequence[Module], bool]]:
    """Yield the units of a stage in order, those together that share buckets, each time with
    whether the late part of the (only) unit has buckets of its own. least:
    `parallel.bucket_size`; half a block as long as it is not decided."""
    blocks = [unit for unit in units if _is_block(unit)]
    sizes = [_halves(block, mesh) for block in blocks]
    groups = group_blocks_into_buckets(sizes, 1 if least == "auto" else least)
    by_first = {id(blocks[of.start]): (blocks[of.start : of.stop], of.halves) for of in groups}
    for unit in units:
        if not _is_block(unit):
            yield [unit], unit.second_half is not None
        elif id(unit) in by_first:
            yield by_first[id(unit)]


def _is_block(unit: Module) -> bool:
    """Return whether a unit is a block of the model. An embedding, a predictor and the head, which
    use tables, do not share buckets."""
    return unit.second_half is not None and all(
        p.spec.role not in TABLES for p in unit.parameters()
    )


def _halves(block: Module, mesh: Mesh) -> tuple[int, int]:
    """Return the elements of the matrices of a block's late part, and of its others. They are those
    of the first rank, which has the most, so that all ranks put the same blocks together."""
    first, sizes = dict.fromkeys(mesh.coordinate, 0), mesh.layout.sizes
    behind = set() if block.second_half is None else {*block.second_half.parameters()}
    late = rest = 0
    for p in block.parameters():
        size = 0 if p.spec.role in VECTORS else p.spec.local(first, sizes).size
        late, rest = (late + size, rest) if p in behind else (late, rest + size)
    return late, rest
