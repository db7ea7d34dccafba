"""The state of gradient tapes.

TensorFlow has no public function that returns whether a tape is active: `record.could_possibly_record` and
the attribute `_recording` of tapes are used. `tests/backend/graph/test_tapes.py` fails if they change.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from tfdist.utils.temporary import attributes_set


class _Local(threading.local):
    number: int | None = None
    sources: frozenset[int] | None = None


_local, _numbers = _Local(), itertools.count()


def passing(sources: Any) -> contextlib.AbstractContextManager[None]:
    """Marks the code inside as one backward pass, in which a tape computes gradients.

    Args:
        sources: A nest of the variables or tensors whose gradients are computed.
    """
    wanted = frozenset(map(id, tf.nest.flatten(sources)))
    return attributes_set(_local, number=next(_numbers), sources=wanted)


def current_pass() -> int | None:
    """The number of the current backward pass; None outside of one."""
    return _local.number


def is_wanted(*variables: Any) -> bool:
    """Whether the gradient of one of some variables is requested, as far as that is known.

    Tapes differentiate all recorded operations, and discard gradients that were not requested.
    """
    return _local.sources is None or any(id(variable) in _local.sources for variable in variables)


def any_records() -> bool:
    """Whether a tape records the current operations."""
    return bool(record.could_possibly_record())


def others_record(tape: tf.GradientTape) -> bool:
    """Whether another tape than this one records the current operations."""
    with tape.stop_recording() if tape._recording else contextlib.nullcontext():
        return any_records()
