"""A real S3-compatible server on loopback whose answers can be made to fail."""

import io
import logging
import os
import socket
import threading
from collections import Counter

from loopback_server import LoopbackServer
from werkzeug.serving import make_server

BUCKET = "bucket"
SECRET = "Zq8-secret-of-the-tests"


class Server(LoopbackServer):
    """Serves until `close`. Every request first calls `fault(method, path)`: None answers it, a
    number answers with that status, "reset" breaks the connection halfway through the body.

    sent: bytes of request bodies received by path, those of failed requests included.
    puts: number of PUT requests by path.
    """

    def __init__(self):
        from moto.moto_server import werkzeug_app as moto  # takes a second to import

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._application = moto.DomainDispatcherApplication(moto.create_backend_app)
        self.clear()
        self._server = None
        self._start(0)
        self.port = self._server.port
        self._lock = threading.Lock()

    @property
    def environment(self):
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "id-of-the-tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # so all retries are megaframe's
        }

    def clear(self):
        self.sent, self.puts = Counter(), Counter()
        self.fault = lambda method, path: None

    def _start(self, port):
        self._server = make_server("127.0.0.1", port, self._answer, threaded=True)
        self._serve()

    def _answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        size = int(environ.get("CONTENT_LENGTH") or 0)
        with self._lock:
            fault = self.fault(method, path)
        if fault == "reset":
            received = len(environ["wsgi.input"].read(size // 2))
            self._count(method, path, received)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        body = environ["wsgi.input"].read(size)
        self._count(method, path, len(body))
        if fault is not None:
            start_response(f"{fault} Injected", [("Content-Length", "0")])
            return [b""]
        environ["wsgi.input"] = io.BytesIO(body)
        return self._application(environ, start_response)

    def _count(self, method, path, size):
        if method == "PUT":
            with self._lock:
                self.sent[path] += size
                self.puts[path] += 1


def use(environment):
    """Make this process a client of the server, and create the bucket if it is missing."""
    os.environ.update(environment)
    import fsspec

    system = fsspec.filesystem("s3")
    if not system.exists(BUCKET):
        system.mkdir(BUCKET)
