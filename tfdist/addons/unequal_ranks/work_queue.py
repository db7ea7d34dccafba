"""A queue of items that ranks request during an epoch, and the detection of its end.

The queue is on one rank. Each request has a number (the third item of this epoch, the seventh batch),
so that ranks which compute the same rows get the same items, and a training that is resumed from a
checkpoint gets those that it had.
"""

from __future__ import annotations

import logging
import random
import secrets
import selectors
import threading
from typing import Any

from tfdist.collectives.engine import Engine
from tfdist.collectives.objects import broadcast_object
from tfdist.runtime import Channel, Listener, bind, connect

_logger = logging.getLogger("tfdist")
_PURPOSE = "handing out of data"
_SECONDS = 60.0
#: The longest interval after which the listener closes connections of unknown processes.
_TICK_SECONDS = 1.0
#: The number of epochs that are kept: ranks are at most one apart.
_KEPT_EPOCHS = 3


class Books:
    """The items of each taker in an epoch, and the number of batches that each has made.

    Args:
        num_items: The number of items of an epoch.
        num_takers: The number of ranks, or groups of ranks with the same rows, that take items.
        seed: The seed of the order of items, which differs between epochs; None to keep the order.
    """

    def __init__(self, num_items: int, num_takers: int, seed: int | None):
        self._num_items, self._num_takers, self._seed = num_items, num_takers, seed
        self._taken: dict[int, list[list[int]]] = {}
        self._left: dict[int, list[int]] = {}
        self._made: dict[int, dict[int, int]] = {}
        self._dry: dict[int, set[int]] = {}

    def take(self, epoch: int, taker: int, number: int) -> int | None:
        """The item of this number of a taker: an assigned one, or the next; None at the end."""
        had = self._of(epoch)[taker]
        if number < len(had):
            return had[number]
        left = self._left[epoch]
        if not left or number > len(had):
            return None
        had.append(left.pop())
        return had[-1]

    def made(self, epoch: int, taker: int, count: int) -> None:
        """Records the number of batches that a taker has made."""
        made = self._made.setdefault(epoch, {})
        made[taker] = max(made.get(taker, 0), count)

    def ended(self, epoch: int, taker: int) -> None:
        """Records that a taker has no further items."""
        self._dry.setdefault(epoch, set()).add(taker)

    def goes_on(self, epoch: int, count: int) -> bool | None:
        """Whether any taker makes more than `count` batches; None while that is not known."""
        if max(self._made.get(epoch, {}).values(), default=0) > count:
            return True
        return False if len(self._dry.get(epoch, ())) == self._num_takers else None

    def state(self, epoch: int) -> list[list[int]]:
        """The items of an epoch by taker."""
        return [list(items) for items in self._of(epoch)]

    def restore(self, epoch: int, taken: list[list[int]]) -> None:
        """Resumes an epoch from the result of `state`."""
        self._begin(epoch)
        self._taken[epoch] = [list(items) for items in taken]
        gone = {item for items in taken for item in items}
        self._left[epoch] = [item for item in self._left[epoch] if item not in gone]

    def _of(self, epoch: int) -> list[list[int]]:
        if epoch not in self._taken:
            self._begin(epoch)
        return self._taken[epoch]

    def _begin(self, epoch: int) -> None:
        self._taken[epoch] = [[] for _ in range(self._num_takers)]
        order = list(range(self._num_items))
        if self._seed is not None:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        self._left[epoch] = order[::-1]
        for books in (self._taken, self._left, self._made, self._dry):
            for old in [each for each in books if each <= epoch - _KEPT_EPOCHS]:
                books.pop(old)


class Desk:
    """Answers requests of ranks, in a separate thread on the first rank.

    Args:
        books: The state of the queue.
        engine: The engine of the ranks. Each calls from two threads.
        taker_of: The taker of each rank.
    """

    def __init__(self, books: Books, engine: Engine, taker_of: list[int]):
        self._books, self._taker_of = books, taker_of
        self.key = secrets.token_bytes(32)
        self._listener = Listener(
            [bind(engine.host_address())], self.key, _PURPOSE, identities=range(2 * engine.size)
        )
        self.port: int = self._listener.addresses[0][1]
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, name="tfdist-handing-out", daemon=True).start()

    def state(self, epoch: int) -> list[list[int]]:
        """See `Books`."""
        with self._lock:
            return self._books.state(epoch)

    def restore(self, epoch: int, taken: list[list[int]]) -> None:
        """See `Books`."""
        with self._lock:
            self._books.restore(epoch, taken)

    def _serve(self) -> None:
        takers: dict[Channel, int] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(_TICK_SECONDS):
                    channel = key.fileobj
                    if not isinstance(channel, Channel):
                        continue
                    try:
                        while (message := channel.receive_now()) is not None:
                            self._hear(channel, takers[channel], message)
                    except (OSError, KeyError, TypeError) as error:
                        # A rank that ends closes its connection; the watchdog reports its error.
                        _logger.debug("A rank has closed its connection to the queue: %s", error)
                        selector.unregister(channel)
                        channel.close()
                for identity, sock in self._listener.poll():
                    channel = Channel(sock)
                    takers[channel] = self._taker_of[identity // 2]
                    selector.register(channel, selectors.EVENT_READ)

    def _hear(self, channel: Channel, taker: int, message: dict[str, Any]) -> None:
        kind, epoch, number = message["kind"], int(message["epoch"]), int(message["number"])
        with self._lock:
            if kind == "take":
                channel.send({"item": self._books.take(epoch, taker, number)}, _SECONDS)
            elif kind == "made":
                self._books.made(epoch, taker, number)
            else:
                self._books.ended(epoch, taker)
                channel.send({"goes_on": self._books.goes_on(epoch, number)}, _SECONDS)


class Clerk:
    """Sends the requests of one rank.

    Args:
        engine: The engine; all its ranks create a clerk at the same time.
        desk: The desk, on the first rank.
    """

    def __init__(self, engine: Engine, desk: Desk | None):
        contact = None if desk is None else (engine.host_address(), desk.port, desk.key)
        host, port, key = broadcast_object(contact, engine.group(), name="handing-out")

        def call(line: int) -> Channel:
            identity = 2 * engine.rank + line
            return Channel(connect((host, port), key, _PURPOSE, identity, timeout=_SECONDS))

        # One thread of a rank may query the end of the epoch while another takes items.
        self._items, self._steps = call(0), call(1)
        self._taking, self._stepping = threading.Lock(), threading.Lock()

    def take(self, epoch: int, number: int) -> int | None:
        """The next item; None at the end."""
        with self._taking:
            self._items.send({"kind": "take", "epoch": epoch, "number": number}, _SECONDS)
            return self._items.receive(_SECONDS)["item"]

    def made(self, epoch: int, count: int) -> None:
        """Sends the number of batches that this rank has made."""
        with self._stepping:
            self._steps.send({"kind": "made", "epoch": epoch, "number": count}, _SECONDS)

    def goes_on(self, epoch: int, count: int) -> bool | None:
        """Whether another rank makes more than `count` batches; None while that is not known."""
        with self._stepping:
            self._steps.send({"kind": "end", "epoch": epoch, "number": count}, _SECONDS)
            return self._steps.receive(_SECONDS)["goes_on"]
