"""First messages, by which ranks are connected before a step needs it."""

from __future__ import annotations

import torch

from megaframe.distributed.collectives import Group, Ring, all_to_all, receive, send, shift_ring


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
    if link.should_batch_messages(message):
        (send if sends else receive)(message, link).wait()
        link.traffic.take()


def connect_ring(ring: Ring, device: torch.device) -> None:
    """Pass a first message around a ring, in both directions; see `connect_link`. All ranks of the
    ring must call this."""
    message = torch.zeros(1, device=device)
    if ring.size > 1 and ring.group.should_batch_messages(message):
        for reverse in (False, True):
            shift_ring(message, torch.empty_like(message), ring, reverse=reverse).wait()
        ring.group.traffic.take()


def connect_pairs(group: Group, device: torch.device) -> None:
    """Send a first message from each rank of a group to each other one; see `connect_link`. For
    groups that exchange parts of any sizes, of which some may be empty for many steps. All ranks of
    the group must call this."""
    messages = torch.zeros(group.size, device=device)
    if group.size > 1 and group.should_batch_messages(messages):
        all_to_all(messages, group).wait()
        group.traffic.take()
