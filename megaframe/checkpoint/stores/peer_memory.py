"""Copies every rank's part of a run into the memory of its own node and of another node.

Copies are made like checkpoints, but without a disk: each rank writes its file into its node's
folder in memory (`MemoryFolder`) and sends it to a peer on the next node, which keeps it as well.
Both copies survive killed processes; if a node is lost, the copies of its ranks on the next node
remain. Copies of the previous step are deleted only after all ranks have reported that this step's
copies are complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from pydantic import JsonValue
from torch import Tensor

from megaframe.checkpoint.background import BackgroundCopier, HostCopy
from megaframe.checkpoint.shard_file import CHUNK_BYTES, FileEntry, write_shard_file
from megaframe.checkpoint.shard_reader import verify_shard_file
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.stores.memory_folder import CopyRecord, MemoryFolder, encode_record
from megaframe.distributed.collectives import Group, all_gather, exchange_pairwise
from megaframe.distributed.object_collectives import gather_json
from megaframe.errors import UserError


def find_nodes(folder: MemoryFolder, group: Group) -> list[list[int]]:
    """Return the ranks of each node, by their first rank. Ranks that see the same folder are on one
    node, whatever hosts and `parallel.node_size` say: a second copy there would take the place of
    the first one, and be lost with it. Collective.

    Args:
        folder: This rank's folder in memory.
        group: All ranks of the run.
    """
    own_mark = folder.leave_mark()
    gather_json(group, None)  # all ranks have left their marks
    ranks_of_node: dict[str, list[int]] = {}
    for rank, mark in enumerate(gather_json(group, min(folder.list_marks(), default=own_mark))):
        ranks_of_node.setdefault(mark, []).append(rank)
    folder.remove_mark(own_mark)
    return list(ranks_of_node.values())


def find_keepers(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return, for each rank, the rank on the next node that keeps a copy for it. With one node
    there are none: its memory outlives its processes anyway.

    Args:
        nodes: The ranks of each node.
    """
    if len(nodes) == 1:
        return {}
    return {
        rank: next_ranks[place % len(next_ranks)]
        for ranks, next_ranks in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        for place, rank in enumerate(ranks)
    }


@dataclass(frozen=True)
class PeerRanks:
    """The ranks with which a rank exchanges copies.

    Attributes:
        to: The rank that keeps a copy for this rank, if any.
        sources: The ranks for which this rank keeps copies.
    """

    to: int | None
    sources: tuple[int, ...]

    @staticmethod
    def find(rank: int, nodes: Sequence[Sequence[int]]) -> PeerRanks:
        """Return the peers of a rank.

        Args:
            rank: The rank.
            nodes: The ranks of each node.
        """
        keepers = find_keepers(nodes)
        sources = sorted(source for source, keeper in keepers.items() if keeper == rank)
        return PeerRanks(keepers.get(rank), tuple(sources))


class PeerMemoryWriter(BackgroundCopier):
    """Makes the copies of one rank.

    If a rank's copy fails, all ranks raise an error, in the same way as `CheckpointWriter`.

    Args:
        folder: The folder of copies on this node.
        group: A group of all ranks, used for nothing else.
        peers: The ranks with which this one exchanges copies.
        run_id: Id of the run.
        kept_step: Step of existing copies to keep until the next ones are complete; all others
            are deleted at once.
    """

    def __init__(
        self,
        folder: MemoryFolder,
        group: Group,
        peers: PeerRanks,
        run_id: str,
        kept_step: int | None,
    ) -> None:
        super().__init__()
        self._folder, self._group, self._peers, self._run_id = folder, group, peers, run_id
        self._complete_step = kept_step
        folder.remove(keep_step=kept_step)

    def save(self, step: int, slices: Sequence[Slice], state: Mapping[str, JsonValue]) -> None:
        """Start making copies in the background; see `CheckpointWriter.save`. The step must be
        higher than those of all earlier saves since `forget`.

        Args:
            step: Step of the copies.
            slices: What this rank has of the tensors.
            state: Plain data of the run.
        """
        state_copy = json.loads(json.dumps(dict(state)))
        self.start(slices, lambda entries, data: self._make_copies(step, state_copy, entries, data))

    def forget(self) -> None:
        """Delete all copies. No save may be in progress."""
        self._complete_step = None
        self._folder.remove()

    def close(self) -> None:
        """Delete the folder with all copies. To be called when the run and its last save are
        complete, so that the copies are no longer needed."""
        self._folder.close()

    def _make_copies(
        self, step: int, state: dict[str, JsonValue], entries: list[FileEntry], data: HostCopy
    ) -> None:
        if self._complete_step is not None:
            self._folder.remove(below=self._complete_step)
        failures: list[str] = []
        own_file = self._write(step, state, entries, data, failures)
        if self._peers.to is not None:
            self._exchange(step, own_file, failures)
        failures_per_rank = gather_json(self._group, failures)
        messages = [
            f"rank {rank}: {text}" for rank, texts in enumerate(failures_per_rank) for text in texts
        ]
        if messages:
            listed = "; ".join(messages[:3])
            omitted = f" (and {len(messages) - 3} more)" if len(messages) > 3 else ""
            raise UserError(f"copies of step {step} in memory could not be made: {listed}{omitted}")
        self._complete_step = step

    def _write(
        self,
        step: int,
        state: dict[str, JsonValue],
        entries: list[FileEntry],
        data: HostCopy,
        failures: list[str],
    ) -> _OutgoingFile:
        """Write this rank's file and its record. Returns what is to be sent to the peer; that is
        empty if writing failed, which is added to `failures`."""
        path, rank = self._folder.get_path(step, self._group.index), self._group.index
        try:
            self._folder.prepare(step, rank)
            file = write_shard_file(path, entries, data.wait_for_entry, data.wait_for_memory())
            verify_shard_file(path, file)
            record = encode_record(
                CopyRecord(
                    run=self._run_id,
                    step=step,
                    rank=rank,
                    world=self._group.size,
                    state=state,
                    file=file,
                )
            )
            self._folder.commit(step, rank, record)
        except (OSError, UserError) as error:
            failures.append(_describe_error(error, path, data.size))
            return _OutgoingFile()
        return _OutgoingFile(path, file.bytes, record)

    def _exchange(self, step: int, own_file: _OutgoingFile, failures: list[str]) -> None:
        """Send this rank's file and record to its peer, and store those that arrive from its
        sources. Files travel in chunks, one in each direction at a time."""
        sizes = torch.tensor([[len(own_file.record), own_file.size]])
        sizes = all_gather(sizes, self._group).wait()
        with ExitStack() as stack:
            own_handle = None
            if own_file.path is not None:
                try:
                    own_handle = stack.enter_context(open(own_file.path, "rb"))
                except OSError as error:  # it was deleted; the peer still expects its bytes
                    failures.append(_describe_error(error, own_file.path, own_file.size))
            incoming_files = {
                rank: _IncomingFile(self._folder, step, rank, *sizes[rank].tolist())
                for rank in self._peers.sources
            }
            for incoming in incoming_files.values():
                stack.callback(incoming.close)
            records = [torch.zeros(0, dtype=torch.uint8)] * self._group.size
            for rank, incoming in incoming_files.items():
                records[rank] = torch.empty(incoming.record_size, dtype=torch.uint8)
            self._send_and_receive(_as_tensor(own_file.record), records)
            chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
            receive_buffers = {rank: torch.empty_like(chunk) for rank in incoming_files}
            longest = max([own_file.size, *(incoming.size for incoming in incoming_files.values())])
            for start in range(0, longest, CHUNK_BYTES):
                outgoing = chunk[: max(0, min(CHUNK_BYTES, own_file.size - start))]
                if own_handle is not None and len(outgoing):
                    own_handle.readinto(outgoing.numpy().data)
                incoming_parts = [chunk[:0]] * self._group.size
                for rank, incoming in incoming_files.items():
                    incoming_parts[rank] = receive_buffers[rank][
                        : max(0, min(CHUNK_BYTES, incoming.size - start))
                    ]
                self._send_and_receive(outgoing, incoming_parts)
                for rank, incoming in incoming_files.items():
                    incoming.write(incoming_parts[rank])
            for rank, incoming in incoming_files.items():
                failures += incoming.finish(records[rank])

    def _send_and_receive(self, outgoing: Tensor, incoming: list[Tensor]) -> None:
        per_rank = [outgoing[:0]] * self._group.size
        assert self._peers.to is not None
        per_rank[self._peers.to] = outgoing
        exchange_pairwise(outgoing, per_rank, incoming, self._group, kind="copies").wait()


@dataclass(frozen=True)
class _OutgoingFile:
    """A file to be sent to the peer, with its record; empty if the file could not be written."""

    path: Path | None = None
    size: int = 0
    record: bytes = b""


@dataclass
class _IncomingFile:
    """Stores what arrives from one rank. After an error it goes on receiving and discards the data,
    so that the sender does not hang."""

    folder: MemoryFolder
    step: int
    rank: int
    record_size: int
    size: int
    error: str = ""
    file: BinaryIO | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        path = self.folder.get_path(self.step, self.rank)
        try:
            self.folder.prepare(self.step, self.rank)
            if self.size:
                self.file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by `close`)
                os.posix_fallocate(self.file.fileno(), 0, self.size)
        except (OSError, UserError) as error:
            self.error = _describe_error(error, path, self.size)

    def write(self, data: Tensor) -> None:
        try:
            remaining = data.numpy().data
            while len(remaining) and self.file is not None and not self.error:
                remaining = remaining[self.file.write(remaining) :]
        except OSError as error:
            self.error = _describe_error(
                error, self.folder.get_path(self.step, self.rank), self.size
            )

    def finish(self, record: Tensor) -> list[str]:
        """Write the record, if the file is complete.

        Returns:
            The error, if there was one.
        """
        if self.size and not self.error:
            try:
                self.folder.commit(self.step, self.rank, record.numpy().tobytes())
            except OSError as error:
                self.error = _describe_error(
                    error, self.folder.get_path(self.step, self.rank), self.size
                )
        return [self.error] if self.error else []

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _describe_error(error: Exception, path: Path, needed: int) -> str:
    if not isinstance(error, OSError):
        return str(error)
    free = ""
    with suppress(OSError):
        space = os.statvfs(path.parent.parent)
        free = f" and {space.f_bavail * space.f_frsize:,} bytes are free"
    return (
        f"cannot write {path}: {error.strerror} (it needs {needed:,} bytes{free}); give "
        "checkpoint.memory_dir more room, or use checkpoint.memory_every=0"
    )


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0).byte()
