"""One `train_step` or `test_step` on this rank's rows, and its logs for the callbacks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdist.collectives import all_gather, all_reduce
from tfdist.sharding.parts import flattened, unflattened
from tfdist.sharding.updates import unwrapped
from tfdist.step.context import ReplicaContext
from tfdist.step.hooks import active_hooks
from tfdist.step.keras_step import KerasStep
from tfdist.strategies.keras_patches.metric_reads import bind_metrics
from tfdist.strategies.keras_patches.synchronization import keep_metrics_without_samples

#: Packages whose steps pass gradients to optimizers unchanged.
_LIBRARIES = ("keras", "tfdist")


@contextlib.contextmanager
def keras_step(step: KerasStep, fn: Callable, replica: ReplicaContext) -> Iterator[Callable]:
    """A context around a Keras step in replica context.

    The caller sets `step.outputs`; on exit, the logs of a custom step are reduced.

    Args:
        step: The step.
        fn: Its function.
        replica: The replica context.

    Yields:
        The function to call in place of `fn`.
    """
    with contextlib.ExitStack() as stack:
        for hook in active_hooks(step.model):
            stack.enter_context(hook.around_step(step))
        if replica.strategy.mesh.size > 1 and step.kind == "train" and _reads_gradients(step, fn):
            from tfdist.strategies.gradient_reads import call_step

            fn = functools.partial(call_step, replica, fn)
        if step.group.size == 1:
            yield fn
            return
        # Created in the graph of the step, and not in an inner graph that uses them first.
        _ = step.gradient_share, step.has_samples
        put_back = None if step.is_even else keep_metrics_without_samples(step)
        bind_metrics(step.model)
        yield fn
        if put_back is not None:
            put_back()
        step.outputs = _with_reduced_metrics(step)
        names = (f"{step.kind}_step", "compute_metrics")
        if any(getattr(type(step.model), n) is not getattr(keras.Model, n) for n in names):
            step.outputs = _average_logs(step.outputs, step, replica)


def _with_reduced_metrics(step: KerasStep):
    """The logs of a step; if they have more or fewer than its metrics, Keras reports those of the last step."""
    logs, (results, reduced) = step.outputs, step.results
    step.note_outputs(logs)
    if not step.metric_logs or logs.keys() == results.keys():
        return logs
    found = reduced()
    return logs | {name: found[name] for name in step.metric_logs if name in found}


def _reads_gradients(step: KerasStep, fn) -> bool:
    """Whether custom code receives gradients before they are reduced."""
    optimizer = type(unwrapped(step.model.optimizer))
    functions = (fn, *(getattr(optimizer, name, fn) for name in ("apply", "apply_gradients")))
    return any(function.__module__.split(".")[0] not in _LIBRARIES for function in functions)


def count_rows(data) -> int | tf.Tensor:
    """The number of samples in a batch: an int if it is the same on all ranks.

    A shape that is known in a graph is the same on all ranks: batches are split in this way, and separate
    datasets are checked. The shapes of eager tensors may differ between ranks.
    """
    for part in tf.nest.flatten(data):
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int32)
        if isinstance(part, tf.SparseTensor):
            return tf.cast(part.dense_shape[0], tf.int32)
        if tf.is_tensor(part) and part.shape.rank:
            if part.shape[0] is not None and not tf.executing_eagerly():
                return part.shape[0]
            return tf.shape(part)[0]
    raise ValueError(
        "A batch must have at least one tensor with a batch dim. Received: "
        f"{tf.nest.map_structure(lambda part: getattr(part, 'shape', part), data)}."
    )


def _average_logs(logs, step: KerasStep, replica: ReplicaContext):
    """The mean over samples of each floating tensor that a custom step returned.

    Such a step may return values that are not from metrics, and Keras shows the last ones unchanged. Results of
    metrics, which are global already, do not change. Tensors with a number for each row, if that can be
    detected, are concatenated.
    """
    flat = [_as_tensor(value) for value in tf.nest.flatten(logs)]
    places = [
        place
        for place, value in enumerate(flat)
        if isinstance(value, tf.Tensor) and value.dtype.is_floating
    ]
    for place in [place for place in places if _has_rows(flat[place], step)]:
        flat[place] = replica.all_gather(flat[place], 0)
        places.remove(place)
    if places:
        exact = any(flat[place].dtype == tf.float64 for place in places)
        wire = tf.float64 if exact else tf.float32
        values = [tf.cast(flat[place], wire) for place in places]
        own = tf.math.multiply_no_nan(flattened(values), tf.cast(step.share, wire))
        means = unflattened(all_reduce(own, step.group, name="logs"), values)
        for place, mean in zip(places, means, strict=True):
            flat[place] = tf.cast(mean, flat[place].dtype)
    return tf.nest.pack_sequence_as(logs, flat)


def _as_tensor(value):
    """Converts a log that may differ between ranks to a tensor; in a graph, numbers are constants."""
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    if is_variable or (
        tf.executing_eagerly() and isinstance(value, float | np.floating | np.ndarray)
    ):
        return tf.convert_to_tensor(value)
    return value


def _has_rows(value: tf.Tensor, step: KerasStep) -> bool:
    """Whether dim 0 is that of the rows: it is unknown in a graph, or differs between ranks."""
    if value.shape.rank == 0:
        return False
    if not tf.executing_eagerly():
        return not value.shape.is_fully_defined()
    sizes = all_gather(tf.shape(value)[:1], step.group, name="logs/rows")
    return bool(tf.reduce_any(sizes != sizes[0]))
