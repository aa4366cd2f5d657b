"""The HTTP that a run, the dashboard and a chat serve, with headers that let a page load nothing
from elsewhere, to a bounded number of clients, each of which has a bounded time. Only a chat takes
requests with a body, of bounded size, and answers in pieces."""

from __future__ import annotations

import hmac
import io
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

LOOPBACK = "127.0.0.1"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'"
)
MOST_CLIENTS = 32
"""Connections at a time, each with a thread; a browser opens six."""
_NO_TOKEN = b"This page needs the token that the server printed when it started.\n"
_REQUEST_SECONDS = 10.0
"""Time for a whole request to arrive, however its bytes are spread over it."""
_ANSWER_SECONDS = 60.0

MOST_BODY = 1 << 20
"""Bytes of the body of a request."""

Query = Mapping[str, Sequence[str]]
"""The values of each name in the query of a request."""
Answer = Callable[[str], tuple[HTTPStatus, str, bytes]]
"""Takes the path and query of a request, and returns status, content type and content."""
PostAnswer = Callable[[str, bytes], tuple[HTTPStatus, str, Generator[bytes]]]
"""Takes the path and query and the body of a request, and returns status, content type and pieces
of content, which are sent as they come. They are closed if the client is gone."""


class PageServer(ThreadingHTTPServer):
    """Answers requests. A connection beyond `most_clients` is closed at once.

    Args:
        host: Where it listens.
        port: Where it listens; 0 takes any free port.
        answer: What it answers.
        answer_post: What it answers to POST requests; None refuses them.
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
        answer_post: PostAnswer | None = None,
        most_clients: int = MOST_CLIENTS,
        request_seconds: float = _REQUEST_SECONDS,
    ) -> None:
        self.answer, self.answer_post = answer, answer_post
        self.request_seconds = request_seconds
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


class TokenServer:
    """Serves a page to those who have its token, from `start` or `run` until `close`.

    Args:
        host: Where it listens.
        port: Where it listens; 0 takes any free port.
        answer: Takes the path and the query of a request, and returns what `Answer` does.
        answer_post: Takes the path and the body, and returns what `PostAnswer` does; None refuses
            POST requests.

    Attributes:
        token: What a request must have in its query.

    Raises:
        OSError, OverflowError, UnicodeError: It cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[str, Query], tuple[HTTPStatus, str, bytes]],
        answer_post: PostAnswer | None = None,
    ) -> None:
        self.token = secrets.token_urlsafe(18)
        self._host, self._answer, self._answer_post = host, answer, answer_post
        post = None if answer_post is None else self._check_post
        self._server = PageServer(host, port, self._check, answer_post=post)

    @property
    def address(self) -> str:
        """The URL for a browser, with the token."""
        port = self._server.server_address[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}/?token={self.token}"

    def run(self) -> None:
        """Serve until interrupted."""
        self._server.serve_forever(poll_interval=0.2)

    def start(self) -> None:
        """Serve from a thread."""
        threading.Thread(target=self.run, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def _split(self, target: str) -> tuple[str, Query, bool]:
        """Return the path and query of a request, and whether it has the token."""
        path, _, query_string = target.partition("?")
        query = parse_qs(query_string)
        token = query.get("token", [""])[0]
        return path, query, hmac.compare_digest(token.encode(), self.token.encode())

    def _check(self, target: str) -> tuple[HTTPStatus, str, bytes]:
        path, query, is_known = self._split(target)
        if not is_known:
            return HTTPStatus.FORBIDDEN, "text/plain", _NO_TOKEN
        return self._answer(path, query)

    def _check_post(self, target: str, body: bytes) -> tuple[HTTPStatus, str, Generator[bytes]]:
        path, _, is_known = self._split(target)
        if not is_known or self._answer_post is None:
            return HTTPStatus.FORBIDDEN, "text/plain", (text for text in (_NO_TOKEN,))
        return self._answer_post(path, body)


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
        self._send_head(status, kind, len(content))
        self.wfile.write(content)

    def do_POST(self) -> None:
        if self.server.answer_post is None:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED)
            return
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or len(size) > len(str(MOST_BODY)) or int(size) > MOST_BODY:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        status, kind, pieces = self.server.answer_post(self.path, self.rfile.read(int(size)))
        with closing(pieces):
            self._send_head(status, kind, None)
            for piece in pieces:
                self.wfile.write(piece)

    def _send_head(self, status: HTTPStatus, kind: str, size: int | None) -> None:
        """Send status and headers. size: of the content; None if it ends with the connection."""
        self.connection.settimeout(_ANSWER_SECONDS)  # of each write
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

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
