"""Horovod's key-value store over HTTP, with callers that are no ranks."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time

import pytest

from benchmarks.attacks import attack
from tests.conftest import skip_without
from tfdist.runtime.rendezvous import Endpoint, environments


@pytest.fixture
def address():
    skip_without("horovod")
    with environments("horovod", [Endpoint()] * 2) as found:
        yield (
            found[0]["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
            int(found[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"]),
        )


def ask(address, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=20.0)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def works(address) -> bool:
    """Whether ranks can still tell each other their addresses."""
    value = os.urandom(200)
    return (
        ask(address, "PUT", "/some/key", value)[0] == 200
        and ask(address, "GET", "/some/key") == (200, value)
        and ask(address, "GET", "/some/other")[0] == 404
        and ask(address, "DELETE", "/some/key")[0] == 200
        and ask(address, "GET", "/some/key")[0] == 404
    )


def test_it_listens_at_the_loopback_address_alone(address):
    assert works(address)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", address[1]), timeout=5.0):
        pass


@pytest.mark.parametrize(
    ("method", "path"),
    [("HEAD", "/etc/passwd"), ("GET", "/"), ("GET", "/a/b/c"), ("POST", "/a/b"), ("PUT", "/a")],
)
def test_what_ranks_do_not_ask(address, method, path, capfd):
    assert ask(address, method, path)[0] == 400
    assert works(address)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("length", ["99999999999", "-1", "x", "", None, "1048577"])
def test_a_body_of_a_wrong_length(address, length, capfd):
    with socket.create_connection(address, timeout=10.0) as sock:
        header = "" if length is None else f"Content-Length: {length}\r\n"
        sock.sendall(f"PUT /a/b HTTP/1.1\r\n{header}\r\n".encode())
        assert b" 400 " in sock.recv(1000)
    assert works(address)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_who_takes_his_time_is_hung_up_on(address):
    with socket.create_connection(address, timeout=10.0) as sock:
        began = time.monotonic()
        with pytest.raises(OSError):
            while True:
                sock.sendall(b"G")
                time.sleep(0.3)
        assert time.monotonic() - began < 10.0
    assert works(address)


@pytest.mark.slow
def test_all_attacks_of_strangers(address, capfd):
    attack([address])
    began = time.monotonic()
    assert works(address)
    assert time.monotonic() - began < 10.0
    assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) < 200
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_thousand_connections_hold_up_ranks_for_seconds(address):
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
        began = time.monotonic()
        assert works(address)
        assert time.monotonic() - began < 20.0
