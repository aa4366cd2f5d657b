"""Resumes a run from copies in memory (see `memory`), on whichever nodes they have survived.

Copies are read like a checkpoint, slice by slice and under any layout. Each rank's part is read and
checked by one rank that has it in its node's memory and sends the slices that others need. A step
can be used only if an intact copy of every rank's part of it exists somewhere.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import JsonValue, ValidationError
from torch import Tensor

from megaframe.checkpoint.load import Checkpoint
from megaframe.checkpoint.manifest import (
    DTYPES,
    SAVED_TENSORS,
    Manifest,
    SavedSlice,
    find_problem,
    merge_tensors,
)
from megaframe.checkpoint.shard_reader import verify_shard_file
from megaframe.checkpoint.stores.peer_memory import CopyRecord, MemoryFolder
from megaframe.distributed.collectives import Group, receive, send
from megaframe.distributed.object_collectives import gather_json, gather_rows
from megaframe.errors import UserError

_BEFORE_ALL_STEPS = -1
"""A step lower than all others."""


class PeerMemoryCheckpoint(Checkpoint):
    """The copies of one step, to be loaded like a checkpoint. `load` is collective: all ranks call
    it together.

    servers: for each file, the rank of the group that reads it, for itself and for all others.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, servers: Mapping[str, int], group: Group
    ) -> None:
        super().__init__(folder, manifest, io.BytesIO())
        self._servers, self._group = servers, group

    def __str__(self) -> str:
        return "copies in memory"

    def read(
        self,
        wanted: Mapping[str, Sequence[SavedSlice]],
        shared: Collection[tuple[str, SavedSlice]] = (),
    ) -> Iterator[tuple[str, SavedSlice, Tensor]]:
        """Yield the wanted slices as `Checkpoint.read` does: those that this rank serves, then
        those received from others. Meanwhile serve the other ranks. Collective."""
        here: dict[str, list[SavedSlice]] = {}
        elsewhere: set[tuple[str, SavedSlice]] = set()
        me = self._group.index
        for name, pieces in wanted.items():
            here[name] = [one for one in pieces if self._servers[one.file] == me]
            elsewhere |= {(name, one) for one in pieces if self._servers[one.file] != me}
        yield from super().read(here, shared)
        yield from self._exchange(elsewhere)

    def _exchange(
        self, wanted: set[tuple[str, SavedSlice]]
    ) -> Iterator[tuple[str, SavedSlice, Tensor]]:
        """Send the slices that others want and receive those that this rank wants.

        All ranks go through the transfers in the same order (by slice, then by receiving rank), so
        there is no deadlock.
        """
        every = [(name, piece) for name, one in self.tensors.items() for piece in one.slices]
        mine = [number for number, one in enumerate(every) if one in wanted]
        asked = gather_rows(self._group, torch.tensor(mine, dtype=torch.int64))
        me = self._group.index
        acts = sorted(
            (number, rank)
            for rank, numbers in enumerate(asked)
            for number in numbers.tolist()
            if me in (rank, self._servers[every[number][1].file])
        )
        for number, rank in acts:
            name, piece = every[number]
            server = self._servers[piece.file]
            if server == me:
                for _, _, found in super().read({name: [piece]}):
                    data = found.reshape(-1).view(torch.uint8)
                    send(data, self._group, to=rank).wait()
            else:
                yield name, piece, self._received(name, piece, server)

    def _received(self, name: str, piece: SavedSlice, server: int) -> Tensor:
        tensor = self.tensors[name]
        buffer = torch.empty(tensor.bytes_of(piece.shape), dtype=torch.uint8)
        receive(buffer, self._group, source=server).wait()
        if xxhash.xxh3_64_hexdigest(buffer.numpy().data) != piece.checksum:
            raise UserError(f"tensor {name} at {piece.offset} was damaged on its way from {server}")
        return buffer.view(DTYPES[tensor.dtype]).view(piece.shape)


def open_peer_memory(
    ram: MemoryFolder, run: str, group: Group, newer_than: int | None, say: Callable[[str], None]
) -> PeerMemoryCheckpoint | None:
    """Find the newest complete copies of a run. Collective; all ranks get the same result.

    run: id of the run. newer_than: only steps above this one are considered; None: all. say: called
    with what was left out and why, and with the reason if there are no usable copies. Then None is
    returned.
    """
    found = {(record.step, record.rank): record for record in ram.records(run)}
    limit = _BEFORE_ALL_STEPS if newer_than is None else newer_than
    while True:
        told = gather_json(group, [(one.step, one.rank, one.world) for one in found.values()])
        step, servers, why = _choose_newest(told, limit)
        if step is None:
            if newer_than is not None or why:
                say(f"not resumed from copies in memory: {why or 'there are none'}")
            return None
        if why:
            say(f"not resumed from the newest copies in memory: {why}")
        served = [rank for rank, server in servers.items() if server == group.index]
        parts = gather_json(group, [_verify_copy(ram, found[step, rank]) for rank in served])
        wrong = [text for ones in parts for one in ones for text in one["wrong"]]
        if not wrong:
            break
        for text in wrong:
            say(f"a copy in memory is left out: {text}")
        for rank, one in zip(served, parts[group.index], strict=True):
            if one["wrong"]:
                del found[step, rank]
    manifest = _build_manifest(step, [one for ones in parts for one in ones])
    names = {f"rank-{rank:05d}.safetensors": server for rank, server in servers.items()}
    return PeerMemoryCheckpoint(ram.path(step, 0).parent, manifest, names, group)


def _choose_newest(
    told: Sequence[Sequence[tuple[int, int, int]]], limit: int
) -> tuple[int | None, dict[int, int], str]:
    """Choose the newest step above `limit` of which all parts exist.

    told: for each rank, (step, rank that made the part, world) of each part that it has. Returns
    the step (or None), the rank that serves each part, and why newer steps cannot be used. A part
    is served by the rank with the same number as its maker, if that one has it, because it will
    need most of it; otherwise by one of those that have it, chosen so that the load is spread.
    """
    holders: defaultdict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for holder, ones in enumerate(told):
        for step, rank, world in ones:
            holders[step, world].setdefault(rank, []).append(holder)
    why = ""
    for (step, world), parts in sorted(holders.items(), reverse=True):
        if step <= limit:
            return None, {}, why or f"they are of step {step}, and there is a checkpoint of {limit}"
        missing = [rank for rank in range(world) if rank not in parts]
        if not missing:
            servers = {
                rank: rank if rank in by else by[rank % len(by)] for rank, by in parts.items()
            }
            return step, servers, why
        few = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        why = why or f"those of step {step} lack the parts of ranks {few} of {world}"
    return None, {}, why


def _verify_copy(ram: MemoryFolder, record: CopyRecord) -> dict[str, Any]:
    """Read and check one copy. Returns its part of the manifest as plain data, or what is wrong
    with it as `wrong`."""
    path = ram.path(record.step, record.rank)
    try:
        tensors = verify_shard_file(path, record.file)
    except (UserError, OSError) as error:
        return {"wrong": [str(error)]}
    return {
        "wrong": [],
        "name": path.name,
        "file": record.file.model_dump(),
        "state": record.state if record.rank == 0 else None,
        "tensors": SAVED_TENSORS.dump_json(tensors).decode(),
    }


def _build_manifest(step: int, parts: Sequence[dict[str, Any]]) -> Manifest:
    state: dict[str, JsonValue] = next(one["state"] for one in parts if one["state"] is not None)
    try:
        manifest = Manifest(
            step=step,
            state=state,
            files={one["name"]: one["file"] for one in parts},
            tensors=merge_tensors(SAVED_TENSORS.validate_json(one["tensors"]) for one in parts),
        )
    except ValidationError as error:
        raise UserError(f"copies in memory of step {step} are not valid: {error}") from None
    wrong = find_problem(manifest)
    if wrong:
        raise UserError(f"copies in memory of step {step} are not valid: {wrong}")
    return manifest
