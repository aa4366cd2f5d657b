"""Delays what hosts send: a relay between the switch's ends of their links and the bridge, for
kernels without `netem`. Imports nothing of the project, because it is started as a file.

    python delay.py PORT:BRIDGED:SECONDS ...

Every frame that arrives at PORT leaves at BRIDGED so many seconds later, and every frame that
arrives at BRIDGED leaves at PORT at once. "ready" is printed when all are relayed.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field

ALL_PROTOCOLS = 0x0003
"""ETH_P_ALL of linux/if_ether.h."""
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
"""Of linux/if_packet.h. With the header, frames that the sender has left for its card to cut and to
sum pass as they are, up to 64 KiB at once."""
LARGEST_FRAME = 1 << 17
QUEUE_BYTES = 1 << 25
FULL = {errno.ENOBUFS, errno.EAGAIN}


@dataclass
class Cable:
    """One direction of a link.

    Attributes:
        source, target: Raw sockets on the two interfaces.
        delay: Seconds.
        waiting: Frames, each with the moment at which it leaves.
    """

    source: socket.socket
    target: socket.socket
    delay: float
    waiting: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)

    def receive(self) -> None:
        """Take all frames that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = self.source.recv(LARGEST_FRAME)
                self.waiting.append((time.monotonic() + self.delay, frame))

    def send(self) -> float | None:
        """Send all frames that are due, and return the moment of the next one. A full queue behind
        the target loses a frame, as that of a switch does."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            try:
                self.target.send(self.waiting.popleft()[1])
            except OSError as error:
                if error.errno not in FULL | {errno.ENETDOWN}:
                    raise
        return self.waiting[0][0] if self.waiting else None


def open_interface(name: str) -> socket.socket:
    """Return a raw socket for all frames that arrive at an interface."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, 33, QUEUE_BYTES)  # SO_RCVBUFFORCE
    opened.setblocking(False)
    opened.bind((name, ALL_PROTOCOLS))
    return opened


def relay(cables: list[Cable]) -> None:
    """Relay until this process is killed."""
    with selectors.DefaultSelector() as selector:
        for cable in cables:
            selector.register(cable.source, selectors.EVENT_READ, cable)
        print("ready", flush=True)
        pause: float | None = None
        while True:
            for key, _ in selector.select(pause):
                key.data.receive()
            moments = [moment for cable in cables if (moment := cable.send()) is not None]
            pause = max(0.0, min(moments) - time.monotonic()) if moments else None


def main() -> None:
    cables = []
    for word in sys.argv[1:]:
        port, bridged, seconds = word.split(":")
        end, other = open_interface(port), open_interface(bridged)
        cables += [Cable(end, other, float(seconds)), Cable(other, end, 0.0)]
    relay(cables)


if __name__ == "__main__":
    main()
