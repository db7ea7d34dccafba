"""The differences between the clocks of the ranks."""

from __future__ import annotations

import secrets
import selectors
import time

from tfdist.collectives.engine import Engine
from tfdist.collectives.objects import all_gather_object, broadcast_object
from tfdist.runtime import Channel, Listener, bind, connect

_PURPOSE = "clocks of the ranks"
_SECONDS = 60.0
#: The fastest answer is the most accurate: its error is at most half its round trip.
_QUESTIONS = 40


def clock_offsets(engine: Engine) -> list[float]:
    """The seconds to add to the time of each rank's clock to get that of the chief's.

    Each rank requests the chief's time, and assumes that the answer is of the middle of its round
    trip, as NTP does (Mills 1991, "Internet Time Synchronization"). It is a collective.

    Args:
        engine: The engine of collectives among the ranks.

    Returns:
        The seconds by rank; the chief's are 0.

    Raises:
        OSError: The chief cannot be reached, or a rank does not respond within a minute.
    """
    if engine.size == 1:
        return [0.0]
    world, listener, contact = engine.group(), None, None
    if engine.rank == 0:
        key = secrets.token_bytes(32)
        host = engine.host_address()
        listener = Listener([bind(host)], key, _PURPOSE, identities=range(1, engine.size))
        contact = (host, listener.addresses[0][1], key)
    host, port, key = broadcast_object(contact, world, name="monitor/clock")
    if listener is not None:
        try:
            _answer(listener, engine.size - 1)
        finally:
            listener.close()
        own = 0.0
    else:
        own = _ask(Channel(connect((host, port), key, _PURPOSE, engine.rank, timeout=_SECONDS)))
    return all_gather_object(own, world, name="monitor/offsets")


def _ask(channel: Channel) -> float:
    best, offset = float("inf"), 0.0
    try:
        for _ in range(_QUESTIONS):
            asked = time.time()
            channel.send({}, _SECONDS)
            theirs = float(channel.receive(_SECONDS)["time"])
            answered = time.time()
            if answered - asked < best:
                best, offset = answered - asked, theirs - (asked + answered) / 2
        channel.send({"over": True}, _SECONDS)
    finally:
        channel.close()
    return offset


def _answer(listener: Listener, callers: int) -> None:
    """Sends the time to all callers until each has ended its requests."""
    deadline = time.monotonic() + _SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while callers:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{callers} ranks did not request the chief's time within {_SECONDS:g} s. Check "
                    "that they can reach its host."
                )
            for key, _ in selector.select(1.0):
                channel = key.fileobj
                if not isinstance(channel, Channel):
                    continue
                while (message := channel.receive_now()) is not None:
                    if message:
                        selector.unregister(channel)
                        channel.close()
                        callers -= 1
                        break
                    channel.send({"time": time.time()}, _SECONDS)
            for _, sock in listener.poll():
                selector.register(Channel(sock), selectors.EVENT_READ)
