"""The server of pages: clients that are slow or many hold few threads, for a bounded time."""

import socket
import threading
import time
from http import HTTPStatus

import pytest
from patience import PATIENCE, wait_until

from megaframe.io.http import LOOPBACK, PageServer


@pytest.fixture
def serve():
    """serve(**limits) -> address of a server that answers every path with it."""
    servers = []

    def start(**limits):
        server = PageServer(
            LOOPBACK, 0, lambda path: (HTTPStatus.OK, "text/plain", path.encode()), **limits
        )
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server.server_address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def connect(address):
    line = socket.create_connection(address)
    line.settimeout(PATIENCE)
    return line


def ask(address, path):
    """Return what the server sends; empty if it closes the connection."""
    with connect(address) as line:
        try:
            line.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            return b"".join(iter(lambda: line.recv(4096), b""))
        except ConnectionError:
            return b""


def is_closed(line):
    """Return whether the server has closed a connection, within a moment."""
    line.settimeout(0.02)
    try:
        return line.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.0\r\n", b"GET / HTTP/1.0\r\nA: "])
def test_a_request_that_drips_is_cut_off(serve, begin):
    address = serve(request_seconds=0.3)
    with connect(address) as line:
        line.sendall(begin)

        def drip():
            try:
                line.sendall(b"x")  # more often than any timeout of a single read
            except ConnectionError:
                return True
            return is_closed(line)

        wait_until(drip)
    wait_until(lambda: ask(address, "/page").endswith(b"/page"))  # once it comes quickly enough


def test_connections_beyond_the_most_are_closed_until_one_ends(serve):
    address = serve(most_clients=3)
    idle = [connect(address) for _ in range(3)]
    assert ask(address, "/page") == b"", "none is free"
    assert not any(is_closed(line) for line in idle)
    for line in idle:
        line.close()
    wait_until(lambda: ask(address, "/page").endswith(b"/page"))


def test_a_request_in_pieces_is_answered(serve):
    with connect(serve()) as line:
        for piece in (b"GET /pa", b"ge HTTP/1.0\r\nHos", b"t: x\r\n", b"\r\n"):
            line.sendall(piece)
            time.sleep(0.02)
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.0 200") and answer.endswith(b"/page")
    assert b"Content-Security-Policy: default-src 'none'" in answer
