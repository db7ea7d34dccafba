"""When a training step begins to wait for its data."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable

import tensorflow as tf

from tfdist.backend.clock.stamps import Cell

_waits: contextvars.ContextVar[Cell | None] = contextvars.ContextVar("waits", default=None)


def note_waits(begin: Cell | None) -> None:
    """From now on iterators that a graph asks for data note when; with None they do not any more."""
    _waits.set(begin)


@functools.cache
def watch_iterators() -> None:
    """Has the iterators of data sets look whether somebody watches, from now on.

    Inside of a graph an iterator is another object than outside, so its class is what is changed.
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
