"""A listener, with callers that lie, stall, repeat and flood."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import socket
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fuzzing import FUZZ, KEY, PURPOSE
from tfdist.runtime import AuthenticationError, Channel, Listener, bind, connect
from tfdist.runtime.handshake import CHALLENGE_BYTES, PROOF_BYTES, CallerProof

pytestmark = pytest.mark.usefixtures("no_old_garbage")


@pytest.fixture
def listener():
    with Listener([bind()], KEY, PURPOSE, identities=range(100), handshake_seconds=1.0) as found:
        yield found


@pytest.fixture
def serving(listener):
    """A listener in a thread, that gives each proven caller an echo of one message."""
    served: list[int] = []
    over = threading.Event()

    def serve():
        while not over.is_set():
            for identity, sock in listener.poll(0.05):
                served.append(identity)
                channel = Channel(sock)
                with contextlib.suppress(OSError):
                    channel.send({"you": identity}, 5.0)
                channel.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener, served
    over.set()
    thread.join(10.0)
    assert not thread.is_alive()


def address_of(listener):
    return listener.addresses[0]


def call(listener, identity: int = 1, timeout: float = 10.0) -> dict:
    """What an honest caller is told."""
    channel = Channel(connect(address_of(listener), KEY, PURPOSE, identity, timeout=timeout))
    try:
        return channel.receive(10.0)
    finally:
        channel.close()


def test_both_sides_prove_themselves(serving):
    listener, served = serving
    assert call(listener, 7) == {"you": 7}
    assert served == [7]
    assert listener.dropped == 0


def test_over_a_unix_socket(tmp_path):
    path = str(tmp_path / "meeting")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    sock.listen()
    with Listener([sock], KEY, PURPOSE) as listener:
        found: list = []
        caller = threading.Thread(
            target=lambda: found.append(connect(path, KEY, PURPOSE, 3, timeout=10.0))
        )
        caller.start()
        proven = listener.accept(time.monotonic() + 10.0)
        caller.join(10.0)
        assert proven.identity == 3
        proven.sock.close()
        found[0].close()


#: What a stranger does: sends bytes, waits for some, sends a proof that is wrong in some way.
WORDS = st.one_of(
    st.binary(max_size=300).map(lambda data: ("send", data)),
    st.integers(0, 80).map(lambda size: ("read", size)),
    st.sampled_from(["key", "purpose", "identity", "replay", "cut"]).map(
        lambda how: ("prove", how)
    ),
    st.sampled_from([b"GET / HTTP/1.0\r\n\r\n", b"\n", b"[]\n", b"[" * 5000, bytes(1 << 16)]).map(
        lambda data: ("send", data)
    ),
    st.just(("reset", None)),
)


_replayed: list[bytes] = [bytes(PROOF_BYTES)]


def be_strange(sock: socket.socket, words) -> int:
    """Speaks as told; returns how many messages were sent."""
    sent = 0
    for kind, value in words:
        if kind == "send":
            sock.sendall(value)
            sent += 1
        elif kind == "read":
            sock.recv(value)
        elif kind == "prove":
            challenge = b""
            while len(challenge) < CHALLENGE_BYTES:
                part = sock.recv(CHALLENGE_BYTES - len(challenge))
                if not part:
                    return sent
                challenge += part
            proof = CallerProof(
                b"another" if value == "key" else KEY,
                "other" if value == "purpose" else PURPOSE,
                100 if value == "identity" else 1,
            ).proof(challenge)
            if value == "replay":
                proof, _replayed[0] = _replayed[0], proof
            sock.sendall(proof[:-1] if value == "cut" else proof)
            sent += 1
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            return sent
    return sent


def test_a_fuzzer_is_never_let_in(serving):
    listener, served = serving
    sent = [0]

    @given(callers=st.lists(st.lists(WORDS, min_size=1, max_size=4), min_size=1, max_size=8))
    @settings(FUZZ, max_examples=300)
    def attack(callers):
        with contextlib.ExitStack() as stack:
            for words in callers:
                sock = stack.enter_context(socket.create_connection(address_of(listener), 5.0))
                sock.settimeout(0.02)
                with contextlib.suppress(OSError):
                    sent[0] += be_strange(sock, words)
        assert served == []

    attack()
    assert call(listener, 5) == {"you": 5}
    assert served == [5]
    assert sent[0] > 500


def test_slow_bytes(serving):
    """A caller that knows the key, but sends a byte now and then, is too late."""
    listener, _served = serving
    began = time.monotonic()
    with socket.create_connection(address_of(listener), 5.0) as sock:
        proof = CallerProof(KEY, PURPOSE, 1).proof(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        with pytest.raises(OSError):
            for byte in proof:
                sock.send(bytes([byte]))
                time.sleep(0.05)
        assert 0.9 < time.monotonic() - began < 2.5
    assert call(listener) == {"you": 1}


def test_a_thousand_connections_at_once_hold_up_an_honest_caller_for_seconds(serving):
    listener, _ = serving
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address_of(listener))
        began = time.monotonic()
        assert call(listener, timeout=30.0) == {"you": 1}
        assert time.monotonic() - began < 15.0
        assert len(listener._callers) <= 64


@pytest.mark.slow
def test_a_flood_that_goes_on_keeps_nobody_out(serving):
    """As many strangers as come, of which each stays as long as it may."""
    listener, _ = serving
    over = threading.Event()

    def flood():
        held: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(address_of(listener), 1.0))
            for sock in held[:-200]:
                sock.close()
            del held[:-200]
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        for _ in range(3):
            assert call(listener, timeout=30.0) == {"you": 1}
    finally:
        over.set()
        for thread in threads:
            thread.join(10.0)


def test_without_descriptors_the_listener_waits(serving, monkeypatch):
    listener, _ = serving
    taken = socket.socket.accept
    calls = []

    def accept(self):
        calls.append(time.monotonic())
        if len(calls) < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        if len(calls) == 5:
            raise ConnectionAbortedError
        return taken(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    assert call(listener) == {"you": 1}
    assert len(calls) >= 6
    assert min(later - one for one, later in itertools.pairwise(calls[:5])) > 0.09


def test_bad_callers_are_counted_and_logged_now_and_then(listener, caplog):
    with caplog.at_level(logging.WARNING):
        for number in range(1, 26):
            with socket.create_connection(address_of(listener), 5.0):
                pass
            deadline = time.monotonic() + 10.0
            while listener.dropped < number and time.monotonic() < deadline:
                listener.poll(0.1)
    assert listener.dropped == 25
    assert [record.getMessage().split()[-3] for record in caplog.records] == ["1", "10"]
    assert "Closed a connection to the test from" in caplog.text


def test_a_caller_with_another_key_is_told_in_time(serving):
    listener, served = serving
    with pytest.raises(AuthenticationError, match="the keys differ"):
        connect(address_of(listener), b"another", PURPOSE, timeout=1.0)
    assert served == []


def test_nobody_calls(listener):
    with pytest.raises(TimeoutError, match="no process connected to the test"):
        listener.accept(time.monotonic() + 0.2)


def test_nobody_listens():
    with bind() as sock:
        address = sock.getsockname()
    with pytest.raises(
        TimeoutError, match=f"Could not connect to the test at 127.0.0.1:{address[1]}"
    ):
        connect(address, KEY, PURPOSE, timeout=0.5)


def test_what_listens_is_another_program():
    with bind() as sock:

        def answer():
            with sock.accept()[0] as caller:
                caller.sendall(b"HTTP/1.0 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises((AuthenticationError, TimeoutError)):
            connect(sock.getsockname(), KEY, PURPOSE, timeout=0.3)


def test_the_address_that_is_listened_at():
    with bind("127.0.0.1") as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with bind("localhost") as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with bind("192.0.2.77") as sock:  # Not of this machine: a router translates, say.
        assert sock.getsockname()[0] == "0.0.0.0"
