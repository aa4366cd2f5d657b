"""The HTTP that a run and the dashboard serve: GET only, with headers that let a page load nothing
from elsewhere, to a bounded number of clients, each of which has a bounded time."""

from __future__ import annotations

import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOPBACK = "127.0.0.1"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'"
)
MOST_CLIENTS = 32
"""Connections at a time, each with a thread; a browser opens six."""
_REQUEST_SECONDS = 10.0
"""Time for a whole request to arrive, however its bytes are spread over it."""
_ANSWER_SECONDS = 60.0

Answer = Callable[[str], tuple[HTTPStatus, str, bytes]]
"""Takes the path and query of a request, and returns status, content type and content."""


class PageServer(ThreadingHTTPServer):
    """Answers GET requests. A connection beyond `most_clients` is closed at once.

    Args:
        host: Where it listens.
        port: Where it listens; 0 takes any free port.
        answer: What it answers.
        most_clients: Connections at a time.
        request_seconds: Time that a request has to arrive as a whole.

    Raises:
        OSError: It cannot listen there.
    """

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        answer: Answer,
        *,
        most_clients: int = MOST_CLIENTS,
        request_seconds: float = _REQUEST_SECONDS,
    ) -> None:
        self.answer, self.request_seconds = answer, request_seconds
        self._free = threading.BoundedSemaphore(most_clients)
        super().__init__((host, port), _PageHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, if there are not too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what is not the fault of a client that is slow or has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _PageHandler(BaseHTTPRequestHandler):
    """Handles one request of one connection."""

    server: PageServer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        reader = _TimedReader(self.connection, time.monotonic() + self.server.request_seconds)
        self.rfile = io.BufferedReader(reader)

    def do_GET(self) -> None:
        status, kind, content = self.server.answer(self.path)
        self.connection.settimeout(_ANSWER_SECONDS)  # of each of the two writes below
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing, because the path contains the token."""


class _TimedReader(io.RawIOBase):
    """Reads from a connection until a moment, after which every read is a timeout. A timeout of the
    socket itself would begin anew with every byte that a slow client sends."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        super().__init__()
        self._connection, self._end = connection, end

    def readable(self) -> bool:
        """Return true: that is all that it is for."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there, and wait for it until the moment."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
