"""Resumes a run from copies in memory (see `peer_memory`), on whichever nodes they have survived.

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
from megaframe.checkpoint.stores.memory_folder import CopyRecord, MemoryFolder
from megaframe.distributed.collectives import Group, receive, send
from megaframe.distributed.object_collectives import gather_json, gather_rows
from megaframe.errors import UserError

_BEFORE_ALL_STEPS = -1
"""A step lower than all others."""


class PeerMemoryCheckpoint(Checkpoint):
    """The copies of one step, to be loaded like a checkpoint.

    `load` is collective: all ranks call it together.

    Args:
        folder: The folder of the copies on this node.
        manifest: What all of them contain.
        servers: For each file, the rank of the group that reads it, for itself and for all
            others.
        group: A group of all ranks.
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
        requested: Mapping[str, Sequence[SavedSlice]],
        shared: Collection[tuple[str, SavedSlice]] = (),
    ) -> Iterator[tuple[str, SavedSlice, Tensor]]:
        """Yield the wanted slices as `Checkpoint.read` does: those that this rank serves, then
        those received from others. Meanwhile serve the other ranks. Collective."""
        own_slices: dict[str, list[SavedSlice]] = {}
        remote_slices: set[tuple[str, SavedSlice]] = set()
        own_rank = self._group.index
        for name, saved_slices in requested.items():
            own_slices[name] = [
                saved_slice
                for saved_slice in saved_slices
                if self._servers[saved_slice.file] == own_rank
            ]
            remote_slices |= {
                (name, saved_slice)
                for saved_slice in saved_slices
                if self._servers[saved_slice.file] != own_rank
            }
        yield from super().read(own_slices, shared)
        yield from self._exchange(remote_slices)

    def _exchange(
        self, requested: set[tuple[str, SavedSlice]]
    ) -> Iterator[tuple[str, SavedSlice, Tensor]]:
        """Send the slices that others want and receive those that this rank wants.

        All ranks go through the transfers in the same order (by slice, then by receiving rank), so
        there is no deadlock.
        """
        all_slices = [
            (name, saved_slice)
            for name, item in self.tensors.items()
            for saved_slice in item.slices
        ]
        wanted_numbers = [number for number, item in enumerate(all_slices) if item in requested]
        wanted_per_rank = gather_rows(self._group, torch.tensor(wanted_numbers, dtype=torch.int64))
        own_rank = self._group.index
        transfers = sorted(
            (number, rank)
            for rank, numbers in enumerate(wanted_per_rank)
            for number in numbers.tolist()
            if own_rank in (rank, self._servers[all_slices[number][1].file])
        )
        for number, rank in transfers:
            name, saved_slice = all_slices[number]
            server = self._servers[saved_slice.file]
            if server == own_rank:
                for _, _, contents in super().read({name: [saved_slice]}):
                    data = contents.reshape(-1).view(torch.uint8)
                    send(data, self._group, to=rank).wait()
            else:
                yield name, saved_slice, self._receive_slice(name, saved_slice, server)

    def _receive_slice(self, name: str, saved_slice: SavedSlice, server: int) -> Tensor:
        tensor = self.tensors[name]
        buffer = torch.empty(tensor.count_bytes(saved_slice.shape), dtype=torch.uint8)
        receive(buffer, self._group, source=server).wait()
        if xxhash.xxh3_64_hexdigest(buffer.numpy().data) != saved_slice.checksum:
            raise UserError(
                f"tensor {name} at {saved_slice.offset} was damaged on its way from {server}"
            )
        return buffer.view(DTYPES[tensor.dtype]).view(saved_slice.shape)


def open_peer_memory(
    folder: MemoryFolder,
    run_id: str,
    group: Group,
    newer_than: int | None,
    log: Callable[[str], None],
) -> PeerMemoryCheckpoint | None:
    """Find the newest complete copies of a run.

    Collective; all ranks get the same result.

    Args:
        folder: This rank's folder in memory.
        run_id: Id of the run.
        group: All ranks of the run.
        newer_than: Only steps above this one are considered; None: all.
        log: Called with what was left out and why, and with the reason if there are no usable
            copies. Then None is returned.
    """
    own_records = {(record.step, record.rank): record for record in folder.read_records(run_id)}
    limit = _BEFORE_ALL_STEPS if newer_than is None else newer_than
    while True:
        copies_per_rank = gather_json(
            group, [(part.step, part.rank, part.world) for part in own_records.values()]
        )
        step, servers, reason = _choose_newest(copies_per_rank, limit)
        if step is None:
            if newer_than is not None or reason:
                log(f"not resumed from copies in memory: {reason or 'there are none'}")
            return None
        if reason:
            log(f"not resumed from the newest copies in memory: {reason}")
        served_ranks = [rank for rank, server in servers.items() if server == group.index]
        parts = gather_json(
            group, [_verify_copy(folder, own_records[step, rank]) for rank in served_ranks]
        )
        problems = [
            text for parts_of_rank in parts for part in parts_of_rank for text in part["wrong"]
        ]
        if not problems:
            break
        for text in problems:
            log(f"a copy in memory is left out: {text}")
        for rank, part in zip(served_ranks, parts[group.index], strict=True):
            if part["wrong"]:
                del own_records[step, rank]
    manifest = _build_manifest(step, [part for parts_of_rank in parts for part in parts_of_rank])
    names = {f"rank-{rank:05d}.safetensors": server for rank, server in servers.items()}
    return PeerMemoryCheckpoint(folder.get_path(step, 0).parent, manifest, names, group)


def _choose_newest(
    copies_per_rank: Sequence[Sequence[tuple[int, int, int]]], limit: int
) -> tuple[int | None, dict[int, int], str]:
    """Choose the newest step above `limit` of which all parts exist.

    Args:
        copies_per_rank: For each rank, (step, rank that made the part, world) of each part that it
            has.

    Returns:
        The step (or None), the rank that serves each part, and why newer steps cannot be used. A
        part is served by the rank with the same number as its maker, if that one has it, because it
        will need most of it; otherwise by one of those that have it, chosen so that the load is
        spread.
    """
    holders: defaultdict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for holder, copies in enumerate(copies_per_rank):
        for step, rank, world in copies:
            holders[step, world].setdefault(rank, []).append(holder)
    reason = ""
    for (step, world), parts in sorted(holders.items(), reverse=True):
        if step <= limit:
            return (
                None,
                {},
                reason or f"they are of step {step}, and there is a checkpoint of {limit}",
            )
        missing = [rank for rank in range(world) if rank not in parts]
        if not missing:
            servers = {
                rank: rank if rank in holder_ranks else holder_ranks[rank % len(holder_ranks)]
                for rank, holder_ranks in parts.items()
            }
            return step, servers, reason
        listed = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        reason = reason or f"those of step {step} lack the parts of ranks {listed} of {world}"
    return None, {}, reason


def _verify_copy(folder: MemoryFolder, record: CopyRecord) -> dict[str, Any]:
    """Read and check one copy. Returns its part of the manifest as plain data, or what is wrong
    with it as `wrong`."""
    path = folder.get_path(record.step, record.rank)
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
    state: dict[str, JsonValue] = next(part["state"] for part in parts if part["state"] is not None)
    try:
        manifest = Manifest(
            step=step,
            state=state,
            files={part["name"]: part["file"] for part in parts},
            tensors=merge_tensors(SAVED_TENSORS.validate_json(part["tensors"]) for part in parts),
        )
    except ValidationError as error:
        raise UserError(f"copies in memory of step {step} are not valid: {error}") from None
    mistake = find_problem(manifest)
    if mistake:
        raise UserError(f"copies in memory of step {step} are not valid: {mistake}")
    return manifest
