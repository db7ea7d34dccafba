"""Ranks without samples: their layers get one row of zeros, of which nothing is left at the end.

At the end of an epoch a rank may get no rows. Many kernels do not stand that: those of oneDNN, which
TensorFlow takes on newer CPUs, give tensors of other shapes or none, some end the process, and
gradients of depthwise convolutions are what the memory held before. So the outermost layer of a
call, which most often is the model, gets a row where there is none, and gives none back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from tfdist.graph.provenance import with_provenance
from tfdist.strategies.keras_seam.wrapping import Wrapper
from tfdist.strategies.replica import current_replica

__all__ = ["WRAPPERS", "is_made_up"]

_local = threading.local()


def is_made_up() -> tf.Tensor | None:
    """Whether the layers under way see a row that is not there: a bool; None outside of such a call."""
    return getattr(_local, "is_empty", None)


def _call(original, self, *args, **kwargs):
    replica = current_replica()
    if is_made_up() is not None or replica is None:
        return original(self, *args, **kwargs)
    flat = tf.nest.flatten((args, kwargs))
    places = [place for place, value in enumerate(flat) if _may_be_empty(value)]
    if replica.strategy.group("data").size == 1 or not places:
        return original(self, *args, **kwargs)
    rows = tf.shape(flat[places[0]])[0]
    for place in places:
        flat[place] = _with_a_row(flat[place])
    args, kwargs = tf.nest.pack_sequence_as((args, kwargs), flat)
    with _inside(rows == 0):
        outputs = original(self, *args, **kwargs)
    return tf.nest.map_structure(lambda value: _without_it(value, rows), outputs)


@contextlib.contextmanager
def _inside(is_empty) -> Iterator[None]:
    _local.is_empty = is_empty
    try:
        yield
    finally:
        _local.is_empty = None


def _may_be_empty(value) -> bool:
    """Whether this is a dense tensor that may have no rows on a rank.

    In a graph a size that is known is the same on all ranks.
    """
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return False
    return value.shape[0] == (0 if tf.executing_eagerly() else None)


def _with_a_row(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, or a row of zeros where it has none."""

    def row():
        return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], axis=0), tensor.dtype)

    # A condition passes the tensor on as it is; padding would copy it in every step.
    filled = tf.cond(tf.shape(tensor)[0] == 0, row, lambda: tensor)
    filled = tf.ensure_shape(filled, [None, *tensor.shape[1:]])
    mask = get_keras_mask(tensor)
    if mask is not None:
        set_keras_mask(filled, _with_a_row(mask))
    return filled


def _without_it(value, rows: tf.Tensor):
    """An output, without the row that was made up."""
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    is_batch = value.shape[0] is None or tf.executing_eagerly()
    if not is_batch:
        return value
    # Rows of samples only are cut off: a layer may make several of one sample.
    some = tf.where(rows == 0, 0, tf.shape(value)[0])
    return with_provenance(lambda part: part[:some], value)


WRAPPERS = (Wrapper(keras.layers.Layer, "__call__", ("self", "args", "kwargs"), _call),)
