"""What gradient tapes record.

TensorFlow has no public function that says whether a tape is active: `record.could_possibly_record`
does, and tapes keep in `_recording` whether they are. `tests/backend/graph/test_tapes.py` fails where they move.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record


class _Local(threading.local):
    number: int | None = None
    sources: frozenset[int] | None = None


_local, _numbers = _Local(), itertools.count()


@contextlib.contextmanager
def passing(sources: Any) -> Iterator[None]:
    """Inside, a tape computes gradients: one backward pass.

    Args:
        sources: A nest of what it computes the gradients of.
    """
    before = _local.number, _local.sources
    _local.number = next(_numbers)
    _local.sources = frozenset(map(id, tf.nest.flatten(sources)))
    try:
        yield
    finally:
        _local.number, _local.sources = before


def current_pass() -> int | None:
    """The number of the backward pass that is under way; None outside of one."""
    return _local.number


def is_wanted(*variables: Any) -> bool:
    """Whether the gradient of one of some variables is asked for, as far as that is known.

    Tapes go through all that was recorded on the way, and drop what nobody has asked for.
    """
    return _local.sources is None or any(id(variable) in _local.sources for variable in variables)


def any_records() -> bool:
    """Whether a tape records what is computed now."""
    return bool(record.could_possibly_record())


def others_record(tape: tf.GradientTape) -> bool:
    """Whether another tape than this one records what is computed now."""
    with tape.stop_recording() if tape._recording else contextlib.nullcontext():
        return any_records()
