"""The HTTP that a run and the dashboard serve: GET only, with headers that let a page load nothing
from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

LOOPBACK = "127.0.0.1"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'"
)


def make_handler(
    answer: Callable[[str], tuple[HTTPStatus, str, bytes]],
) -> type[BaseHTTPRequestHandler]:
    """Return the class that handles a server's GET requests.

    Args:
        answer: Takes the path and query of a request, and returns status, content type and content.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            status, kind, content = answer(self.path)
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

    return Handler
