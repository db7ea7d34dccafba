"""The heartbeats themselves, without ranks: its two ends in one process, and strangers at its port."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import struct
import threading
import time

import pytest

from tfdist.runtime import Channel, connect
from tfdist.watchdog.heartbeat import HeartbeatClient, HeartbeatServer, Report

pytestmark = pytest.mark.usefixtures("no_old_garbage")

KEY = b"k" * 32
PURPOSE = "heartbeat server"


def slow(value):
    """A case for `make test-all`."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def server():
    server = HeartbeatServer(2, KEY, timeout=3.0)
    yield server
    server.close()


@pytest.fixture
def clients(server):
    """Both ranks, and the verdicts and warnings that they hear."""
    heard: list[str] = []
    found = [join(server, rank, heard) for rank in range(2)]
    yield found, heard
    for client in found:
        client.close()


def join(server, rank: int, heard: list[str], report=None) -> HeartbeatClient:
    return HeartbeatClient(
        rank,
        ("127.0.0.1", server.port),
        KEY,
        3.0,
        report=report or (lambda: Report(rank)),
        on_verdict=heard.append,
        on_warning=heard.append,
    )


def stranger(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10.0)


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_report_that_comes_after_the_goodbye_is_not_sent():
    server = HeartbeatServer(1, KEY, timeout=60.0)
    asked, go_on = threading.Event(), threading.Event()

    def report():
        if threading.current_thread().name == "tfdist-watchdog":
            asked.set()
            go_on.wait(10.0)
        return Report(0)

    verdicts: list[str] = []
    client = join(server, 0, verdicts, report)
    assert asked.wait(10.0)
    client.close()
    go_on.set()
    seen_out = threading.Thread(target=server.see_out, daemon=True)
    seen_out.start()
    seen_out.join(10.0)
    assert not seen_out.is_alive()
    assert not verdicts
    server.close()


@pytest.mark.parametrize("still_waits", [False, True])
def test_a_rank_may_end_before_the_others_report_the_end_of_their_wait(still_waits):
    """Rank 1 has waited for rank 0, which ends as soon as it has come; in the other case without it."""
    wait = {"name": "all_gather/state", "ranks": [0, 1], "occurrence": 1, "seconds": 20.0}
    waiting = [wait]
    server = HeartbeatServer(2, KEY, timeout=60.0)
    verdicts: list[str] = []
    first = join(server, 0, [])
    second = join(server, 1, verdicts, lambda: Report(1, waiting=list(waiting)))
    try:
        time.sleep(1.5)
        if not still_waits:
            waiting.clear()
        first.close()
        wait_until(lambda: bool(verdicts), 5.0)
        assert bool(verdicts) == still_waits
        assert not still_waits or "Rank 0 ended while rank 1 waits in all_gather" in verdicts[0]
    finally:
        second.close()
        server.close()


GARBAGE = [
    b"GET / HTTP/1.0\r\n\r\n",
    b"\n",
    b"[]\n",
    b"[" * 60_000,
    b'{"token": "x", "rank": 1, "ended": true}\n',
    b"",
    b"tfdist/1" + bytes(32),
    bytes(1 << 16),
    struct.pack("!I", 0xFFFFFFFF),
]


def test_garbage_ends_nothing(server, clients):
    for garbage in GARBAGE * 20:
        with stranger(server) as sock, contextlib.suppress(OSError):
            sock.sendall(garbage)
        assert server._thread.is_alive(), garbage
    time.sleep(4.0)  # Longer than a silent server is waited for.
    assert clients[1] == []
    assert still_watches(server, clients)


def test_a_line_without_an_end_costs_no_memory(server, clients):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with stranger(server) as sock, contextlib.suppress(OSError):
        for _ in range(640):  # 40 MiB
            sock.sendall(bytes(1 << 16))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10
    assert still_watches(server, clients)


@pytest.mark.slow
def test_more_idle_connections_than_descriptors(server, clients):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger(server)) for _ in range(200)]
        used = max(sock.fileno() for sock in strangers)
        # The server has no descriptor left for another caller.
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, limits[1]))
        try:
            began = time.process_time()
            time.sleep(4.0)
            assert time.process_time() - began < 1.0, "the server runs in circles"
            assert clients[1] == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert still_watches(server, clients)


def test_slow_strangers_hold_up_nobody(server):
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(stranger(server))
            with contextlib.suppress(OSError):
                sock.send(b"t")
        heard: list[str] = []
        began = time.monotonic()
        found = [join(server, rank, heard) for rank in range(2)]
        assert time.monotonic() - began < 10.0
        assert still_watches(server, (found, heard))


@pytest.mark.parametrize(
    "message",
    [
        {},
        slow({"rank": 0}),
        slow({**Report(1).to_message(), "more": 1}),
        slow({**Report(1).to_message(), "rank": 7}),
        slow({**Report(1).to_message(), "rank": True}),
        slow({**Report(1).to_message(), "waiting": [{"name": "sum"}]}),
        slow({**Report(1).to_message(), "waiting": [[]]}),
        slow({**Report(1).to_message(), "doing": None}),
        Report(0).to_message(),
        slow(
            Report(
                1, waiting=[{"name": "sum", "ranks": [9], "occurrence": 1, "seconds": 9.0}]
            ).to_message()
        ),
        Report(
            1, waiting=[{"name": "sum", "ranks": [0], "occurrence": 1, "seconds": float("nan")}]
        ).to_message(),
    ],
)
def test_a_rank_that_talks_nonsense_counts_as_gone(server, message, caplog):
    heard: list[str] = []
    client = join(server, 0, heard)
    channel = Channel(connect(("127.0.0.1", server.port), KEY, PURPOSE, 1, timeout=10.0))
    channel.send(Report(1).to_message(), 5.0)
    channel.send(message, 5.0)
    with caplog.at_level(logging.WARNING):
        assert wait_until(lambda: heard)
    assert heard[0].startswith("Rank 1 is gone")
    assert "Rank 1 counts as gone: it sent a report" in caplog.text
    client.close()
    channel.close()


@pytest.mark.parametrize(
    "sent",
    [
        slow(b"[]"),
        b"{",
        b"[" * 60_000,
        *[slow(sent) for sent in (b"\xff\xfe", b"1" * 5000, b"null")],
    ],
    ids=range(6),
)
def test_what_is_no_message_comes_from_a_rank_that_is_gone(server, sent):
    heard: list[str] = []
    client = join(server, 0, heard)
    sock = connect(("127.0.0.1", server.port), KEY, PURPOSE, 1, timeout=10.0)
    for body in (json.dumps(Report(1).to_message()).encode(), sent):
        sock.sendall(struct.pack("!I", len(body)) + body)
    assert wait_until(lambda: heard)
    assert heard[0].startswith("Rank 1 is gone")
    client.close()
    sock.close()


def test_a_second_connection_of_a_rank_is_closed(server, clients):
    sock = connect(("127.0.0.1", server.port), KEY, PURPOSE, 1, timeout=10.0)
    sock.settimeout(10.0)
    assert sock.recv(1) == b""
    assert still_watches(server, clients)


def test_a_rank_that_calls_again_before_its_first_report_is_the_same_rank(server):
    heard: list[str] = []
    client = join(server, 0, heard)
    connect(("127.0.0.1", server.port), KEY, PURPOSE, 1, timeout=10.0).close()
    other = join(server, 1, heard)
    time.sleep(2.0)
    assert heard == []
    assert still_watches(server, ([client, other], heard))


@pytest.mark.slow
def test_errors_of_what_is_called_do_not_end_the_threads(server, caplog):
    """A report that cannot be made, and a judgement that fails."""
    heard: list[str] = []

    def report():
        if threading.current_thread().name == "tfdist-watchdog":
            raise TypeError("as planned")
        return Report(1)

    found = [join(server, 0, heard), join(server, 1, heard, report)]
    judge = server._judge
    server._judge = lambda: 1 / 0
    time.sleep(5.0)
    assert heard == []
    assert caplog.text.count("TypeError: as planned") == 1
    assert caplog.text.count("ZeroDivisionError:") == 1
    server._judge = judge
    assert still_watches(server, (found, heard))


def still_watches(server, clients) -> bool:
    """Whether a death is still told to the others."""
    found, heard = clients
    found[1]._channel._sock.shutdown(socket.SHUT_RDWR)
    assert wait_until(lambda: "Rank 1 is gone: its process died." in heard), heard
    return server._thread.is_alive()


@pytest.mark.parametrize(
    "ranks", [[3], [0, 1], list(range(2000)), list(range(5, 2000, 8)), [*range(40), 77], [5] * 20]
)
def test_ranks_of_large_groups_are_packed(ranks):
    wait = {"name": "g", "ranks": ranks, "occurrence": 1, "seconds": 2.0}
    message = json.loads(json.dumps(Report(1, waiting=[wait]).to_message()))
    found = Report.from_message(message, 2000)
    assert list(found.waiting[0]["ranks"]) == ranks
    if ranks[-1] - ranks[0] > 100:
        assert len(json.dumps(message)) < 250


@pytest.mark.parametrize(
    "ranks",
    [
        {"first": 0, "last": 10**9, "step": 1},
        {"first": -1, "last": 3, "step": 1},
        {"first": 0, "last": 3, "step": 0},
        {"first": 0, "last": 3, "step": True},
        {"first": 3, "last": 0, "step": 1},
        {"first": 0, "last": 3},
        {},
        "012",
    ],
)
def test_ranks_that_are_none_are_refused(ranks):
    message = Report(1).to_message()
    message["waiting"] = [{"name": "g", "ranks": ranks, "occurrence": 1, "seconds": 2.0}]
    with pytest.raises(ValueError, match="not valid"):
        Report.from_message(message, 2000)
