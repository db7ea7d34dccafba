"""What gradient tapes record.

TensorFlow has no public function that says whether a tape is active: `record.could_possibly_record`
does, and tapes keep in `_recording` whether they are. `tests/graph/test_tapes.py` fails where they move.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf
from tensorflow.python.eager import record

__all__ = ["others_record"]


def others_record(tape: tf.GradientTape) -> bool:
    """Whether another tape than this one records what is computed now."""
    with tape.stop_recording() if tape._recording else contextlib.nullcontext():
        return bool(record.could_possibly_record())
