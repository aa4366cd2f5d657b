"""Ports at which ranks of one machine meet."""

import secrets
import socket

import pytest

from megaframe.io import local_rendezvous
from megaframe.io.local_rendezvous import find_free_port, is_port_in_use

FIRST, ANY = 10000, 10100  # the ports that it may take, and those that the system gives


@pytest.fixture
def ranges(tmp_path, monkeypatch):
    """Returns what sets the first of the ports that the system gives to whoever asks for any."""
    monkeypatch.setattr(local_rendezvous, "_ANY_PORTS", tmp_path / "ip_local_port_range")

    def set_first(first):
        (tmp_path / "ip_local_port_range").write_text(f"{first}\t60999\n")

    return set_first


def test_no_port_is_one_that_the_system_gives_to_others(ranges):
    ranges(ANY)
    ports = [find_free_port() for _ in range(20)]
    assert all(FIRST <= port < ANY for port in ports) and len(set(ports)) > 1


def test_a_port_in_use_is_passed_over(ranges, monkeypatch):
    ranges(ANY)
    free = find_free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        choices = iter([taken, taken, free])
        monkeypatch.setattr(secrets, "randbelow", lambda others: next(choices) - FIRST)
        assert find_free_port() == free


@pytest.mark.parametrize("first", [None, 1024], ids=["not linux", "no others"])
def test_where_the_system_gives_all_ports_it_gives_one(ranges, first):
    if first:
        ranges(first)
    port = find_free_port()
    assert port and not is_port_in_use("127.0.0.1", port)
