"""Serves the latest line of a run to Prometheus, and to anything else that reads its text format.

It listens on the loopback of the first rank's machine only: an agent there collects the metrics,
and nothing outside the machine can connect.
"""

from __future__ import annotations

import re
import threading
from http import HTTPStatus

from megaframe.errors import UserError
from megaframe.extensions.sink import Line, Sink
from megaframe.io.http import LOOPBACK, PageServer
from megaframe.metrics.sinks import flatten


class PrometheusSink(Sink):
    """Serves /metrics until it is closed.

    Args:
        port: The port; 0 takes a free one.
        run_name: Name of the run, a label of every value.

    Raises:
        UserError: If the port is taken.
    """

    def __init__(self, port: int, run_name: str) -> None:
        self._text, self._run = b"", run_name
        try:
            self._server = PageServer(LOOPBACK, port, self._answer)
        except OSError as error:
            raise UserError(
                f"cannot listen on metrics.port={port}: {error.strerror}; choose another, or 0 "
                "for a free one"
            ) from None
        self.port: int = self._server.server_address[1]
        self.address = f"http://{LOOPBACK}:{self.port}/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        if path == "/metrics":
            return HTTPStatus.OK, "text/plain; version=0.0.4", self._text
        return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics is what there is\n"

    def write(self, line: Line) -> None:
        """Serve this line from now on, also when the run goes back, until the next one."""
        self._text = to_exposition_format(line, self._run).encode()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def to_exposition_format(line: Line, run_name: str) -> str:
    """Return a line in Prometheus's text format. A nested value is one metric, whose inner names
    are the label `of`."""
    metrics: dict[str, list[str]] = {}
    label = run_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    for name, value in flatten(line):
        first, _, inner = name.partition("/")
        metric = "megaframe_" + re.sub(r"[^a-zA-Z0-9_]", "_", first)
        of = f',of="{inner}"' if inner else ""
        metrics.setdefault(metric, []).append(f'{metric}{{run="{label}"{of}}} {float(value)!r}')
    groups = (f"# TYPE {metric} gauge\n" + "\n".join(rows) for metric, rows in metrics.items())
    return "\n".join(groups) + "\n"
