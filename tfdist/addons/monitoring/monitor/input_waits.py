"""Records when a training step begins to wait for its data."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable

import tensorflow as tf

from tfdist.backend.clock.stamps import Cell

_waits: contextvars.ContextVar[Cell | None] = contextvars.ContextVar("waits", default=None)


def note_waits(begin: Cell | None) -> None:
    """Makes iterators of graphs traced from now on record when they are read; None stops that."""
    _waits.set(begin)


@functools.cache
def watch_iterators() -> None:
    """Makes the iterators of datasets support `note_waits`.

    The iterator inside a graph is a different object than outside, so its class is patched.
    """
    owner = type(iter(tf.data.Dataset.from_tensors(0)))
    for name in ("get_next", "get_next_as_optional"):
        setattr(owner, name, _noting(getattr(owner, name)))


def _noting(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_next(self, *args, **kwargs):
        begin = _waits.get()
        if begin is None or tf.executing_eagerly():
            if begin is not None:
                begin.write(tf.timestamp())
            return original(self, *args, **kwargs)
        with tf.device("/CPU:0"):
            now = tf.timestamp()
            begin.write(now)
        with tf.control_dependencies([now]):
            return original(self, *args, **kwargs)

    return get_next
