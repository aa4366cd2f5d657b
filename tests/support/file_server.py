"""A server of files over HTTP on loopback, with lists of its folders, whose answers can fail."""

import html
import os
import socket
import struct
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from loopback_server import LoopbackServer


class FileServer(LoopbackServer):
    """Serves a folder until `close`. Every request first calls `fault(method, path)`, which says
    how it is answered:

    None        as it should be
    a number    with that status
    "short"     with half of the bytes of a range, as if they were all
    "reset"     by breaking the connection after half of the bytes
    "whole"     with the whole file, whatever range was asked for

    requests: number of requests by path. lists: whether folders can be listed.
    """

    def __init__(self, folder, lists=True):
        self.folder, self.lists = Path(folder), lists
        self.requests = Counter()
        self.fault = lambda method, path: None
        self._start(0)
        self.port = self._server.server_address[1]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def _start(self, port):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.answer(self, "GET")

            def do_HEAD(self):
                outer.answer(self, "HEAD")

            def do_POST(self):
                outer.answer(self, "POST")

            def log_message(self, *args):
                pass

        class QuietServer(ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                """Say nothing: clients that give up are part of the tests."""

        self._server = QuietServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._serve()

    def answer(self, request, method):
        self._answer_file(request, method, unquote(request.path).lstrip("/"))

    def _answer_file(self, request, method, name):
        self.requests[name] += 1
        fault = self.fault(method, name)
        if fault == "short" and "Range" not in request.headers:
            fault = 503  # of a whole file nobody would notice it
        path = self.folder / name
        if isinstance(fault, int):
            self._send(request, method, fault, b"")
        elif path.is_dir() and fault == "reset":
            # With nothing to wait for, the end of the connection is a reset.
            option = struct.pack("ii", 1, 0)
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
            request.close_connection = True
            request.connection.close()
        elif path.is_dir():
            names = [f"{each}/" if (path / each).is_dir() else each for each in os.listdir(path)]
            links = "".join(f'<a href="{html.escape(each)}">{each}</a>\n' for each in names)
            self._send(request, method, 200 if self.lists else 403, links.encode())
        elif not path.is_file():
            self._send(request, method, 404, b"")
        else:
            self._send_file(request, method, path.read_bytes(), fault)

    def _send_file(self, request, method, content, fault):
        asked, status, headers = request.headers.get("Range"), 200, {"Accept-Ranges": "bytes"}
        if asked and fault != "whole":
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            end = min(int(stop) + 1 if stop else len(content), len(content))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            content, status = content[int(start) : end], 206
        if fault == "short":
            content = content[: len(content) // 2]
        if fault == "reset" and method == "GET":
            request.send_response(status)
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content[: len(content) // 2])
            request.wfile.flush()
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(request, method, status, content, headers)

    def _send(self, request, method, status, content, headers=()):
        request.send_response(status)
        for name, value in dict(headers).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if method == "GET":
            request.wfile.write(content)
