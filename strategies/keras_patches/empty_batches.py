"""Ranks without samples: their inputs are padded with one row of zeros, which is removed from the outputs.

At the end of an epoch a rank may have no rows, which many kernels do not support: those of oneDNN, which
TensorFlow uses on newer CPUs, return tensors of wrong shapes, some end the process, and gradients of depthwise
convolutions are uninitialized memory. So the inputs of the outermost layer of a call, usually the model, are
padded. The same applies to losses and metrics: the loss of a rank without samples has no weight, the counts of
its metrics are restored at the end of the step, and the states of layers at the end of their call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.compiling import is_compiled
from tfdist.backend.graph.provenance import with_provenance
from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import CompileLoss, CompileMetrics
from tfdist.step.context import current_replica, current_step
from tfdist.strategies.keras_patches.losses import of_each_sample
from tfdist.strategies.keras_patches.parameters import call_gathered
from tfdist.strategies.keras_patches.synchronization import StatesOfCall, kept_where_empty

PATCHES = Patches()


@PATCHES.of(keras.layers.Layer, "__call__", "self", "args", "kwargs")
def _call(self, *args, original, **kwargs):
    """Pads the inputs of the outermost layer of a call if there are no rows."""
    replica = current_replica()
    if replica is None or replica.has_padding is not None:
        return call_gathered(original, self, *args, **kwargs)
    flat = tf.nest.flatten((args, kwargs))
    places = [place for place, value in enumerate(flat) if _may_be_empty(value)]
    if (replica.strategy.row_group.size == 1 and not replica.cuts) or not places:
        return call_gathered(original, self, *args, **kwargs)
    rows = tf.shape(flat[places[0]])[0]
    for place in places:
        flat[place] = _with_a_row(flat[place])
    args, kwargs = tf.nest.pack_sequence_as((args, kwargs), flat)
    step = replica.step
    states = StatesOfCall(self, is_alone=step is not None and step.gradient_group.size == 1)
    with replica.padded(rows == 0):
        outputs = call_gathered(original, self, *args, **kwargs)
    states.put_back(rows)
    return tf.nest.map_structure(lambda value: _without_it(value, rows), outputs)


def _may_be_empty(value) -> bool:
    """Whether this is a dense tensor that may have no rows on a rank.

    A size that is known in a graph is the same on all ranks.
    """
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return False
    return value.shape[0] == (0 if tf.executing_eagerly() else None)


def _with_a_row(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, or a row of zeros if it has no rows."""

    def filled(tensor):
        if tf.executing_eagerly():
            # The result of padding still has a gradient, even if it is empty.
            return tf.pad(tensor, [[0, 1]] + [[0, 0]] * (tensor.shape.rank - 1))

        if is_compiled():
            # XLA knows all sizes when it compiles, and then pads nothing; it has no condition of sizes.
            lacking = tf.cast(tf.equal(tf.shape(tensor)[0], 0), tf.int32)
            paddings = tf.pad([[0, lacking]], [[0, tensor.shape.rank - 1], [0, 0]])
            return tf.ensure_shape(tf.pad(tensor, paddings), [None, *tensor.shape[1:]])

        def row():
            return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], axis=0), tensor.dtype)

        # A condition passes the tensor without a copy; padding would copy it in every step.
        some = tf.cond(tf.shape(tensor)[0] == 0, row, lambda: tensor)
        return tf.ensure_shape(some, [None, *tensor.shape[1:]])

    return with_provenance(filled, tensor)


def _without_it(value, rows: tf.Tensor):
    """An output without the row of padding."""
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return value
    if value.shape[0] is not None and not tf.executing_eagerly():
        return value  # It has no batch dim.
    # A layer may return several rows for one sample.
    return with_provenance(lambda part: part[: _rows_of_outputs(part, rows)], value)


def _rows_of_outputs(part: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """The number of an output's rows without the row of padding."""
    count = tf.shape(part)[0]
    with devices.on_host():
        return tf.where(rows == 0, 0, count)


@PATCHES.of(CompileLoss, "call")
def _compile_loss(self, y_true, y_pred, sample_weight=None, *, original):
    with _padded(y_true, y_pred, sample_weight) as (given, _):
        return of_each_sample(original(self, *given))


@PATCHES.of(CompileMetrics, "update_state")
def _compile_metrics(self, y_true, y_pred, sample_weight=None, *, original):
    """Updates metrics, and restores their counts if there are no rows."""
    with _padded(y_true, y_pred, sample_weight) as (given, rows):
        if rows is None:
            return original(self, *given)
        if not self.built:
            self.build(*given[:2])
        put_back = kept_where_empty(self.variables, rows)
        original(self, *given)
        put_back()


@contextlib.contextmanager
def _padded(*given) -> Iterator[tuple]:
    """Pads targets, outputs and weights for a loss or metrics if there are no rows.

    Yields:
        The targets, outputs and weights, and this rank's number of rows; None if nothing is padded.
    """
    replica = current_replica()
    step = current_step()
    if replica is None or step is None or step.is_even or replica.has_padding is not None:
        yield given, None
        return
    given = tf.nest.map_structure(
        lambda part: _with_a_row(part) if _may_be_empty(part) else part, given
    )
    with replica.padded(tf.equal(step.rows, 0)):
        yield given, step.rows
