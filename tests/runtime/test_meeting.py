"""The meeting of ranks that a scheduler started, with strangers and with ranks that lie."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time

import pytest

from tfdist.runtime import AuthenticationError, Channel, connect
from tfdist.runtime.rendezvous import free_ports
from tfdist.runtime.schedulers import Hello, _call, _receive

pytestmark = pytest.mark.usefixtures("no_old_garbage")

KEY, PURPOSE = b"key of this job", "rendezvous of ranks"


@pytest.fixture
def meeting():
    """Rank 0 of three, which waits for the others, and its answer."""
    address = ("127.0.0.1", free_ports(1)[0])
    answer: list = []

    def wait():
        try:
            answer.append(
                _receive("tensorflow", address, KEY, 3, Hello("here", 5000), time.monotonic() + 20)
            )
        except BaseException as error:
            answer.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield address, answer
    thread.join(30.0)
    assert not thread.is_alive()


def call(address, rank, found):
    deadline = time.monotonic() + 20
    found[rank] = _call(address, KEY, rank, Hello("here", 5000 + rank), deadline)


def meet(address, answer) -> None:
    """Has the other ranks call, and looks at what all are told."""
    found: dict = {}
    callers = [threading.Thread(target=call, args=(address, rank, found)) for rank in (1, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30.0)
    deadline = time.monotonic() + 10
    while not answer and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = ["127.0.0.1:5000", "127.0.0.1:5001", "127.0.0.1:5002"]
    for rank, variables in enumerate([answer[0], found[1], found[2]]):
        config = json.loads(variables["TF_CONFIG"])
        assert config["cluster"] == {"worker": workers}
        assert config["task"]["index"] == rank


def test_ranks_meet(meeting):
    meet(*meeting)


@pytest.mark.parametrize(
    "words", [b"", b"\n", b"GET / HTTP/1.0\r\n\r\n", b"[" * 60_000, b'{"rank": 1}\n', bytes(5000)]
)
def test_strangers_change_nothing(meeting, words):
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                while sock.connect_ex(meeting[0]):
                    time.sleep(0.05)
                sock.sendall(words)
        began = time.monotonic()
        meet(*meeting)
        assert time.monotonic() - began < 10.0


def rank_one(address) -> Channel:
    return Channel(connect(address, KEY, PURPOSE, 1, timeout=10.0))


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"host": "here"},
        {"host": "here", "port": 0},
        {"host": "here", "port": 1 << 16},
        {"host": "here", "port": True},
        {"host": "here\n", "port": 5000},
        {"host": "", "port": 5000},
        {"host": "x" * 300, "port": 5000},
        {"host": ["here"], "port": 5000},
        {"host": "here", "port": 5000, "rank": 99},
    ],
)
def test_a_malformed_hello_ends_the_call(meeting, hello):
    channel = rank_one(meeting[0])
    channel.send(hello, 5.0)
    with pytest.raises(ConnectionError):
        channel.receive(10.0)
    channel.close()
    meet(*meeting)


def test_a_message_that_is_none_ends_the_call(meeting):
    sock = connect(meeting[0], KEY, PURPOSE, 1, timeout=10.0)
    sock.settimeout(10.0)
    sock.sendall(struct.pack("!I", 1 << 30))
    assert sock.recv(1) == b""
    sock.close()
    meet(*meeting)


def test_a_rank_that_says_nothing_holds_up_nobody(meeting):
    channel = rank_one(meeting[0])
    began = time.monotonic()
    meet(*meeting)
    assert time.monotonic() - began < 4.0
    channel.close()


def test_a_rank_that_goes_may_come_again(meeting):
    channel = rank_one(meeting[0])
    channel.send({"host": "elsewhere", "port": 9}, 5.0)
    time.sleep(0.5)
    channel.close()
    meet(*meeting)


@pytest.mark.parametrize("rank", [0, 3, 99, 2**64 - 1])
def test_there_is_no_such_rank(meeting, rank):
    with pytest.raises(AuthenticationError):
        connect(meeting[0], KEY, PURPOSE, rank, timeout=1.0)
    meet(*meeting)


def test_a_rank_that_is_there_is_not_replaced(meeting):
    channel = rank_one(meeting[0])
    channel.send({"host": "here", "port": 5001}, 5.0)
    time.sleep(0.5)
    other = rank_one(meeting[0])
    other.send({"host": "here", "port": 6666}, 5.0)
    with pytest.raises(ConnectionError):
        other.receive(10.0)
    other.close()
    found: dict = {}
    call(meeting[0], 2, found)
    assert "6666" not in found[2]["TF_CONFIG"]
    assert json.loads(channel.receive(10.0)["TF_CONFIG"])["task"]["index"] == 1
    channel.close()


def test_another_key_is_told(meeting, monkeypatch):
    monkeypatch.setattr("tfdist.runtime.caller._REFUSED_SECONDS", 0.5)
    with pytest.raises(AuthenticationError, match=r"do not share a key.*Set TFDIST_JOB_TOKEN"):
        _call(meeting[0], b"another", 1, Hello("here", 5001), time.monotonic() + 20)
    meet(*meeting)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"LD_PRELOAD": "x"}, {"TF_CONFIG": 1}, {"HOROVOD_": "\0"}])
def test_the_first_rank_sets_what_engines_read_alone(variables):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = sock.getsockname()
        from tfdist.runtime import Listener

        with Listener([sock], KEY, PURPOSE) as listener:

            def answer():
                deadline = time.monotonic() + 10
                while time.monotonic() < deadline:
                    for _, caller in listener.poll(0.1):
                        Channel(caller).send(variables, 5.0)

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            with pytest.raises(TimeoutError, match="it must not set"):
                _call(address, KEY, 1, Hello("here", 5001), time.monotonic() + 0.5)
            thread.join(20.0)
    assert os.environ.get("LD_PRELOAD") != "x"
