"""What a run sets for CUDA and NCCL, and how the groups over NCCL are connected.

Each setting is a variable of CUDA, NCCL or torch. If the environment already has it, its value
counts. docs/guides/gpu.md has the rules behind the settings, with their sources.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megaframe.distributed.collectives import Group, Ring, all_to_all, pass_on, receive, send
from megaframe.errors import UserError

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues of a device, over which its streams are spread (CUDA C++ Programming Guide,
"CUDA Environment Variables")."""
MAX_CTAS = "NCCL_MAX_CTAS"
"""Thread blocks that a transfer may occupy."""
PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
"""1: the streams of transfers have a high priority."""
REGISTER = "NCCL_LOCAL_REGISTER"
"""1: NCCL reads and writes registered buffers without copying them to its own. Its own default is
1 too, but nothing is registered unless the environment asks for it, as torch's data parallelism
does not either (torch/csrc/distributed/c10d/reducer.cpp, `DDP_DISABLE_COMM_MEM`)."""
Ranks = tuple[int, ...]
_RANGES = {QUEUES: (1, 32), MAX_CTAS: (1, 64), PRIORITY: (0, 1), REGISTER: (0, 1)}
_DEFAULT_QUEUES = 8
"""Those that CUDA has if nothing is set."""
LINK_CTAS = 8
"""Thread blocks of a pipeline link. A receive is posted before its message is sent, and occupies
them until it comes. NCCL's own choice is one for each 14 GB/s of a network card, and two for each
NVLink between GPUs of a node (src/graph/paths.cc, `ncclTopoGetNchannels`). So this limits no card
up to 800 Gbit/s, and a link within a node need not be faster than that."""


@dataclass(frozen=True)
class Settings:
    """What a run sets for NCCL.

    link_ctas: thread blocks of a pipeline link; None to leave them to NCCL.
    high_priority: transfers start before products that have not begun.
    register: allocate gradients and values in memory that NCCL uses directly, where torch offers
    it.
    lines: for the log.
    warnings: for the console.
    """

    link_ctas: int | None = LINK_CTAS
    high_priority: bool = True
    register: bool = False
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def start(
        self, store: dist.Store, rank: int, world: int, device: torch.device, timeout: float
    ) -> None:
        """Make torch's default group, from whose communicator the others are split.

        Args:
            store: Shared by all ranks.
            rank: That of this process.
            world: The number of ranks.
            device: That of this rank.
            timeout: Seconds that a transfer may take.
        """
        options = self._options(timeout)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=rank,
            world_size=world,
            timeout=options._timeout,
            pg_options=options,
            device_id=device,
        )
        _bind(None)

    def split(
        self, members: Sequence[Ranks], device: torch.device, timeout: float, name: str
    ) -> dist.ProcessGroup | None:
        """Split the default group's communicator into one for each tuple of ranks, of which no two
        have a rank in common. All ranks of the world must call this.

        It takes one call of `ncclCommSplit`, where `dist.new_group` would need one for each tuple.
        The name of a group depends on how many groups a rank has (`_hash_ranks_to_str` in torch's
        distributed_c10d.py), so all ranks must be in equally many: those over axes are.

        Args:
            members: The same on all ranks.
            device: That of this rank.
            timeout: Seconds that a transfer may take.
            name: For NCCL's flight recorder.

        Returns:
            The group with this rank, if there is one.

        Raises:
            UserError: The communicator has other ranks.
        """
        if not members:
            return None
        options = self._options(timeout)
        _bind(device)
        try:
            made = dist.split_group(
                split_ranks=[list(ranks) for ranks in members],
                timeout=options._timeout,
                pg_options=options,
                group_desc=name,
            )
        finally:
            _bind(None)
        if made is not None:
            _check_size(made, made.size(), device)
        return made

    def new_link(self, ranks: Ranks, device: torch.device, timeout: float) -> dist.ProcessGroup:
        """Make a communicator for the two ranks of a link; see `split`. All ranks of the world must
        call this. Ranks have different numbers of links, so these are not split off."""
        options = self._options(timeout)
        if self.link_ctas is not None:
            options.config.max_ctas = self.link_ctas
        # The communicator is made at once. Otherwise torch would make it at the first message.
        return dist.new_group(
            ranks,
            timeout=options._timeout,
            pg_options=options,
            group_desc="link",
            device_id=device,
        )

    def _options(self, timeout: float) -> dist.ProcessGroupNCCL.Options:
        # Do not warn that messages run one after another: a link has one direction, so they should.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        options._timeout = timedelta(seconds=timeout)
        return options


def set_up(streams: int | None) -> Settings:
    """Set the variables of CUDA and NCCL. Must be called before CUDA starts.

    streams: those of the layout (`plan.streams`); None if it is not known yet.
    Raises `UserError` if the environment has a value that is out of range.
    """
    given = {name: _given(name) for name in _RANGES}
    _, most = _RANGES[QUEUES]
    wanted = most if streams is None else min(most, max(_DEFAULT_QUEUES, streams))
    queues = given[QUEUES] or wanted
    os.environ[QUEUES] = str(queues)
    chosen = {
        QUEUES: f"{QUEUES}={queues}, as the layout has {streams or 'up to as many'} streams",
        MAX_CTAS: f"links use up to {LINK_CTAS} thread blocks, other transfers as NCCL decides",
        PRIORITY: "transfers have streams of high priority",
        REGISTER: f"no buffers are registered with NCCL; {REGISTER}=1 does that where torch can",
    }
    for name, value in given.items():
        if value is not None:
            chosen[name] = f"{name}={value}, from the environment"
    return Settings(
        link_ctas=None if given[MAX_CTAS] is not None else LINK_CTAS,
        high_priority=given[PRIORITY] != 0,
        register=given[REGISTER] == 1,
        lines=tuple(f"nccl: {line}" for line in chosen.values()),
        warnings=_too_few(queues, wanted, streams),
    )


def _too_few(queues: int, wanted: int, streams: int | None) -> tuple[str, ...]:
    """Return a warning if there are fewer hardware queues than streams."""
    if streams is None or queues >= streams:
        return ()
    mend = f"; leave it unset, or use {wanted}" if queues < wanted else ""
    return (
        f"warning: {QUEUES}={queues} is less than the {streams} streams of this layout: a transfer "
        "that waits for others holds up what is behind it in its hardware queue, and ranks may "
        f"wait for each other forever{mend}",
    )


def _given(name: str) -> int | None:
    """Return the number that the environment has for a variable, or None."""
    text = os.environ.get(name)
    if text is None:
        return None
    least, most = _RANGES[name]
    if not text.isascii() or not text.isdigit() or not least <= int(text[:9]) <= most:
        raise UserError(
            f"{name}={text[:40]!r} in the environment is not a number from {least} to {most}; "
            "leave it unset, and the run chooses"
        )
    return int(text)


def allocate(
    length: int, dtype: torch.dtype, device: torch.device, group: Group, settings: Settings | None
) -> torch.Tensor:
    """Return zeros [length] for transfers over the group, in memory that is registered with its
    communicator if the settings ask for it and torch can do it on this device. What a CUDA graph
    allocates is in the graph's own memory."""
    if settings is not None and settings.register and group.handle is not None:
        backend, recorded = group.handle._get_backend(device), _is_recording(device)
        if backend.supports_tensor_alloc(device) and not recorded:
            return backend.allocate_tensor(length, dtype=dtype, device=device).zero_()
    return torch.zeros(length, dtype=dtype, device=device)


def _is_recording(device: torch.device) -> bool:
    """Return whether work on the device is recorded as a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _bind(device: torch.device | None) -> None:
    """Bind torch's default group to a device, or to none.

    torch splits only communicators of a group that is bound. While it is, `dist.new_group` splits
    it too, also for a group of gloo, where ranks that are not in the group then wait forever
    (pytorch/pytorch issue 145376).
    """
    default = dist.group.WORLD
    assert default is not None, "there is a default group"
    default.bound_device_id = device


def _check_size(handle: dist.ProcessGroup, size: int, device: torch.device) -> None:
    """Raise `UserError` if a communicator has not `size` ranks. torch tells the parts of a split
    apart by a hash of 31 bits, which may be the same for two of thousands of them."""
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=handle)
    if int(ones) != size:
        raise UserError(
            f"torch made a communicator of {int(ones)} ranks instead of {size}, as the hashes of "
            "two groups are the same; change the number of ranks or a size in parallel"
        )


def connect_link(link: Group, device: torch.device, *, sends: bool) -> None:
    """Send a first message over a link. Both of its ranks must call this, and all ranks must
    connect their links in the same order.

    NCCL connects two ranks at the first message from one to the other, and the host waits until
    both have started it (src/transport.cc, `ncclTransportP2pSetup`). In a step, a rank would wait
    there for another one that has yet to send something else. Over gloo this does nothing, because
    a group is connected when it is made.

    Args:
        link: A group of two ranks.
        device: Where its messages are.
        sends: This rank is the one that sends.
    """
    message = torch.zeros(1, device=device)
    if link.in_groups(message):
        (send if sends else receive)(message, link).wait()
        link.traffic.take()


def connect_ring(ring: Ring, device: torch.device) -> None:
    """Pass a first message around a ring, in both directions; see `connect_link`. All ranks of the
    ring must call this."""
    message = torch.zeros(1, device=device)
    if ring.size > 1 and ring.group.in_groups(message):
        for back in (False, True):
            pass_on(message, torch.empty_like(message), ring, back=back).wait()
        ring.group.traffic.take()


def connect_pairs(group: Group, device: torch.device) -> None:
    """Send a first message from each rank of a group to each other one; see `connect_link`. For
    groups that exchange parts of any sizes, of which some may be empty for many steps. All ranks of
    the group must call this."""
    messages = torch.zeros(group.size, device=device)
    if group.size > 1 and group.in_groups(messages):
        all_to_all(messages, group).wait()
        group.traffic.take()
