"""The handshake and the channel, with other sides that lie, stall, repeat and flood."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist.runtime import (
    AuthenticationError,
    Channel,
    Listener,
    ProtocolError,
    bind,
    connect,
)
from tfdist.runtime.handshake import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    PROOF_BYTES,
    CallerProof,
    ListenerProof,
)

KEY, PURPOSE = b"key of this job", "test"
FUZZ = settings(
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


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


# -- the handshake, without sockets ---------------------------------------------------------


@given(
    challenge_of=st.sampled_from(["key", "purpose", "nothing"]),
    proof=st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES),
    flipped=st.integers(0, 8 * PROOF_BYTES - 1),
    identity=st.integers(0, 2**64 - 1),
)
@settings(FUZZ, max_examples=1500)
def test_no_other_proof_is_taken(challenge_of, proof, flipped, identity):
    listener = ListenerProof(KEY, PURPOSE)
    caller = CallerProof(
        b"another" if challenge_of == "key" else KEY,
        "other" if challenge_of == "purpose" else PURPOSE,
        identity,
    )
    right = caller.proof(listener.challenge)
    if challenge_of == "nothing":
        assert listener.answer(right)[0] == identity
        damaged = bytearray(right)
        damaged[flipped // 8] ^= 1 << flipped % 8
        right = bytes(damaged)
    for wrong in (right, proof, right[:flipped]):
        with pytest.raises(AuthenticationError):
            listener.answer(wrong)


@given(answer=st.binary(max_size=64), flipped=st.integers(0, 8 * ANSWER_BYTES - 1))
@settings(FUZZ, max_examples=500)
def test_no_other_answer_is_taken(answer, flipped):
    listener, caller = ListenerProof(KEY, PURPOSE), CallerProof(KEY, PURPOSE, 1)
    _, right = listener.answer(caller.proof(listener.challenge))
    damaged = bytearray(right)
    damaged[flipped // 8] ^= 1 << flipped % 8
    for wrong in (answer, bytes(damaged), b""):
        with pytest.raises(AuthenticationError):
            caller.check(wrong)
    caller.check(right)


def test_an_answer_before_the_challenge_is_not_taken():
    with pytest.raises(AuthenticationError):
        CallerProof(KEY, PURPOSE, 1).check(b"")


@given(challenge=st.binary(max_size=CHALLENGE_BYTES))
@settings(FUZZ, max_examples=200)
def test_what_is_no_challenge_gets_no_proof(challenge):
    with pytest.raises(AuthenticationError):
        CallerProof(KEY, PURPOSE, 1).proof(challenge)


def test_a_proof_cannot_be_replayed_or_reflected():
    caller = CallerProof(KEY, PURPOSE, 1)
    first = ListenerProof(KEY, PURPOSE)
    proof = caller.proof(first.challenge)
    _, answer = first.answer(proof)
    with pytest.raises(AuthenticationError):
        ListenerProof(KEY, PURPOSE).answer(proof)  # Replayed on another connection.
    for purpose in ("tes", "test2", ""):
        other = ListenerProof(KEY, purpose)
        with pytest.raises(AuthenticationError):
            other.answer(CallerProof(KEY, PURPOSE, 1).proof(other.challenge))
    # A listener that knows no key sends the caller's own words back.
    for reflected in (proof[:32], proof[-32:]):
        with pytest.raises(AuthenticationError):
            caller.check(reflected)
    # A caller that knows no key makes a proof of a listener's answer.
    with pytest.raises(AuthenticationError):
        first.answer(proof[:40] + answer)


@pytest.mark.parametrize("identity", [-1, 2**64])
def test_identities_have_64_bits(identity):
    with pytest.raises(ValueError, match=f"Received: {identity}"):
        CallerProof(KEY, PURPOSE, identity)


def test_a_key_is_not_empty():
    with pytest.raises(ValueError, match="at least one byte"):
        ListenerProof(b"", PURPOSE)


# -- a listener, and callers that are none --------------------------------------------------

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
    with socket.create_connection(address_of(listener), 5.0) as sock:
        proof = CallerProof(KEY, PURPOSE, 1).proof(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        began = time.monotonic()
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
    calls = [0]

    def accept(self):
        calls[0] += 1
        if calls[0] < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        if calls[0] == 5:
            raise ConnectionAbortedError
        return taken(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    began = time.process_time()
    assert call(listener) == {"you": 1}
    assert time.process_time() - began < 0.5
    assert calls[0] >= 6


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
    assert "Hung up on a caller of the test" in caplog.text


def test_a_caller_with_another_key_is_told_in_time(serving):
    listener, served = serving
    with pytest.raises(AuthenticationError, match="the keys differ"):
        connect(address_of(listener), b"another", PURPOSE, timeout=1.0)
    assert served == []


def test_nobody_calls(listener):
    with pytest.raises(TimeoutError, match="nobody else called for the test"):
        listener.accept(time.monotonic() + 0.2)


def test_nobody_listens():
    with bind() as sock:
        address = sock.getsockname()
    with pytest.raises(TimeoutError, match=f"The test at 127.0.0.1:{address[1]} cannot be joined"):
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


# -- after the handshake ---------------------------------------------------------------------


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, max_bytes=1000)
    yield channel, theirs
    channel.close()
    theirs.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(messages=st.lists(st.dictionaries(st.text(max_size=10), JSON, max_size=3), max_size=4))
@settings(FUZZ, max_examples=100)
def test_messages_arrive_as_they_were_sent(messages):
    left, right = (Channel(sock) for sock in socket.socketpair())
    for message in messages:
        left.send(message, 5.0)
    assert [right.receive(5.0) for _ in messages] == messages
    left.close()
    with pytest.raises(ConnectionError):
        right.receive(5.0)
    right.close()


#: What an authenticated peer may send, cheap to draw: raw bytes, framed bytes, framed JSON, a length.
PART = st.one_of(
    st.binary(max_size=40),
    st.binary(max_size=40).map(lambda body: struct.pack("!I", len(body)) + body),
    st.sampled_from(["{}", '{"a": [1]}', "[]", "null", '{"a"', "1e999", '"', "{}{}"]).map(
        lambda text: struct.pack("!I", len(text)) + text.encode()
    ),
    st.integers(0, 2**32 - 1).map(lambda size: struct.pack("!I", size)),
)


@given(peers=st.lists(st.lists(PART, min_size=1, max_size=5), min_size=20, max_size=20))
@settings(FUZZ, max_examples=200)
def test_garbage_after_the_handshake_is_an_error_of_the_connection(peers):
    """Whatever comes: objects, or a `ConnectionError`; never another exception."""
    for parts in peers:  # 200 examples of 20 peers and more than 2 messages each
        ours, theirs = socket.socketpair()
        channel = Channel(ours, max_bytes=1000)
        for part in parts:
            theirs.sendall(part)
        theirs.close()
        with pytest.raises(ConnectionError):
            while True:
                assert isinstance(channel.receive(1.0), dict)
        assert len(channel._incoming) <= 1004 + (1 << 16)
        channel.close()


@pytest.mark.parametrize(
    "body", [b"[]", b"", b"{", b"[" * 900, b'{"a":' * 180, b"\xff", b"9" * 999], ids=range(7)
)
def test_what_is_no_message(pair, body):
    channel, theirs = pair
    theirs.sendall(struct.pack("!I", len(body)) + body)
    with pytest.raises(ProtocolError):
        channel.receive(5.0)


def test_a_message_that_is_too_long(pair):
    channel, theirs = pair
    with pytest.raises(ValueError, match="at most 1000 bytes"):
        channel.send({"text": "x" * 1000}, 5.0)
    theirs.sendall(struct.pack("!I", 1001))
    with pytest.raises(ProtocolError, match="1001 bytes"):
        channel.receive(5.0)


def test_another_side_that_does_not_read(pair):
    channel, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with pytest.raises(TimeoutError):
        for _ in range(100_000):
            channel.send({"text": "x" * 500}, 0.2)
    began = time.monotonic()
    assert not channel.offer({"text": "x" * 500})
    assert time.monotonic() - began < 0.1
    assert len(channel._outgoing) <= 1004
    # What was sent in part is still whole once the other side reads again.
    other = Channel(theirs)
    reader = threading.Thread(target=lambda: [other.receive(1.0) for _ in range(100)])
    reader.start()
    channel.send({"text": "last"}, 5.0)
    reader.join(10.0)


def test_half_a_message_is_waited_for(pair):
    channel, theirs = pair
    theirs.sendall(struct.pack("!I", 8) + b'{"a"')
    with pytest.raises(TimeoutError):
        channel.receive(0.2)
    theirs.sendall(b": 1}" + struct.pack("!I", 2) + b"{}")
    assert channel.receive(5.0) == {"a": 1}
    assert channel.receive(5.0) == {}


def test_descriptors_above_1024(pair):
    """`select` fails for them; the channel must not use it."""
    left, right = socket.socketpair()
    number = 1500
    os.dup2(left.fileno(), number)
    left.close()
    channel = Channel(socket.socket(fileno=number))
    right.sendall(struct.pack("!I", 2) + b"{}")
    assert channel.receive(5.0) == {}
    channel.close()
    right.close()
