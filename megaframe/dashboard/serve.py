"""The live page: a server that shows runs while they are written, to those who have its token.

By default it listens on this machine's loopback. It answers two paths only, and reads no files
except those of the runs that it was started for.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from megaframe.dashboard.page import render_page
from megaframe.dashboard.page_data import build_page_data
from megaframe.dashboard.run_set import RunSet
from megaframe.errors import UserError
from megaframe.io.http import LOOPBACK, PageServer


class DashboardServer:
    """Serves runs from `start` or `run` until `close`.

    Args:
        runs: The runs of the page.
        host: Where it listens.
        port: Where it listens; 0 takes any free port.
        prediction: A predicted step, beside the runs; None for none.

    Raises:
        UserError: If it cannot listen there.
    """

    def __init__(
        self,
        runs: RunSet,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        prediction: dict[str, Any] | None = None,
    ) -> None:
        self.token = secrets.token_urlsafe(18)
        self._runs, self._prediction, self._host = runs, prediction, host
        self._lock = threading.Lock()
        self._cached: tuple[str, dict[str, Any]] | None = None
        try:
            self._server = PageServer(host, port, self._answer)
        except (OSError, OverflowError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no such address"
            raise UserError(
                f"cannot listen on {host}:{port}: {why}; choose another --port or --host"
            ) from None

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

    def _answer(self, target: str) -> tuple[HTTPStatus, str, bytes]:
        """Return status, content type and content for the path and query of a request."""
        path, _, query_string = target.partition("?")
        query = parse_qs(query_string)
        token = query.get("token", [""])[0]
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            text = b"This page needs the token that the server printed when it started.\n"
            return HTTPStatus.FORBIDDEN, "text/plain", text
        version, data = self._build_data()
        if path == "/":
            return HTTPStatus.OK, "text/html", render_page(data, self.token).encode()
        if path != "/data":
            return HTTPStatus.NOT_FOUND, "text/plain", b"There is no such page.\n"
        if query.get("version", [""])[0] == version:
            data = {}
        answer = json.dumps({**data, "version": version}, allow_nan=False)
        return HTTPStatus.OK, "application/json", answer.encode()

    def _build_data(self) -> tuple[str, dict[str, Any]]:
        with self._lock:
            self._runs.read()
            version = self._runs.version
            if self._cached is None or self._cached[0] != version:
                data = build_page_data(self._runs.runs, self._prediction, notes=self._runs.notes)
                self._cached = version, data
            return self._cached
