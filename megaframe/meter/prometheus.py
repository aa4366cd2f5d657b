"""The latest line of a run, for Prometheus and whatever else reads its text form.

It listens on the loopback of the first rank's machine: an agent there collects it, and nothing
outside of the machine can ask.
"""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from megaframe.errors import UserError
from megaframe.meter.sinks import Line, flat

_LOOPBACK = "127.0.0.1"


class PrometheusSink:
    """Serves /metrics until it is closed. port: 0 takes a free one. run: its name, a label of every
    value. Raises `UserError` when the port is taken."""

    def __init__(self, port: int, run: str) -> None:
        self._text, self._run = b"", run
        sink = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30

            def do_GET(self) -> None:
                found = self.path == "/metrics"
                content = sink._text if found else b"/metrics is what there is\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:
                """The console is for the run."""

        try:
            self._server = ThreadingHTTPServer((_LOOPBACK, port), Handler)
        except OSError as error:
            raise UserError(
                f"meter.port={port} cannot be listened on: {error.strerror}; choose another, or 0 "
                "for a free one"
            ) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.address = f"http://{_LOOPBACK}:{self.port}/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def write(self, line: Line) -> None:
        """Show this line from now on."""
        self._text = exposition(line, self._run).encode()

    def flush(self) -> None:
        """Nothing is buffered."""

    def rewind(self, step: int) -> None:
        """The line of a later step is shown until the next one."""

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def exposition(line: Line, run: str) -> str:
    """A line in Prometheus's text form: what is nested is one metric with its names as a label."""
    metrics: dict[str, list[str]] = {}
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    for name, value in flat(line):
        first, _, rest = name.partition("/")
        metric = "megaframe_" + re.sub(r"[^a-zA-Z0-9_]", "_", first)
        of = f',of="{rest}"' if rest else ""
        metrics.setdefault(metric, []).append(f'{metric}{{run="{label}"{of}}} {float(value)!r}')
    groups = (f"# TYPE {metric} gauge\n" + "\n".join(rows) for metric, rows in metrics.items())
    return "\n".join(groups) + "\n"
