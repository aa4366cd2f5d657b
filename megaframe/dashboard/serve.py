"""The live page: a server that shows runs while they are written, to those who have its token.

By default it listens on this machine's loopback. It answers two paths only, and reads no files
except those of the runs that it was started for.
"""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from typing import Any

from megaframe.dashboard.page import render_page
from megaframe.dashboard.page_data import build_page_data
from megaframe.dashboard.run_set import RunSet
from megaframe.errors import explain_failed_listen
from megaframe.io.http import LOOPBACK, Query, TokenServer


class DashboardServer(TokenServer):
    """Serves runs.

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
        self._runs, self._prediction = runs, prediction
        self._lock = threading.Lock()
        self._cached: tuple[str, dict[str, Any]] | None = None
        with explain_failed_listen(host, port):
            super().__init__(host, port, self._answer_page)

    def _answer_page(self, path: str, query: Query) -> tuple[HTTPStatus, str, bytes]:
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
