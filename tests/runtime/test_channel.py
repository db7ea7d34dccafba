"""A channel after the handshake, with another side that lies and stalls."""

from __future__ import annotations

import os
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fuzzing import FUZZ
from tfdist.runtime import Channel, ProtocolError


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


def test_another_side_that_does_not_read(pair, monkeypatch):
    channel, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with pytest.raises(TimeoutError):
        for _ in range(100_000):
            channel.send({"text": "x" * 500}, 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "_wait", lambda *_: pytest.fail("An offer waits."))
        assert not channel.offer({"text": "x" * 500})
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
