"""Synchronization of variables at the start of training, and of the states of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.backend.graph.dependence import trace_back
from tfdist.backend.keras.attributes import stored_value
from tfdist.backend.keras.functional import is_deferred
from tfdist.collectives import broadcast
from tfdist.collectives.shared import is_shared
from tfdist.gradients.buckets import buckets
from tfdist.sharding.layout import replicated_variables
from tfdist.sharding.parts import deep_copy, flattened, unflattened
from tfdist.sharding.states import average_accumulated, average_states, layer_states
from tfdist.step.keras_step import KerasStep
from tfdist.step.local_steps import local_optimizer


def broadcast_variables(model: keras.Model) -> None:
    """Broadcasts the chief's weights and optimizer state to all ranks.

    Initial values are the same on all ranks already, but a user or a callback may have loaded weights on one
    rank only.
    """
    strategy = model.distribute_strategy
    kinds: dict[tuple[str, ...], list] = {}
    local = local_optimizer(model)
    # A checkpoint may just have restored the state of each rank.
    shared = local is None or not local.is_resumed
    for variable, axes in replicated_variables(model, after_sync=shared):
        kinds.setdefault(axes, []).append(variable)
    for axes, some in kinds.items():
        # By dtype, so that few buckets are needed.
        some.sort(key=lambda variable: variable.dtype)
        values = [(place, variable.value) for place, variable in enumerate(some)]
        for bucket in buckets(values, strategy.gradient_options.bucket_bytes):
            own = [tf.convert_to_tensor(some[place].value) for place in bucket]
            flat = broadcast(flattened(own), strategy.group(*axes), name="variables")
            for place, value in zip(bucket, unflattened(flat, own), strict=True):
                # A view would keep the memory of the whole bucket.
                some[place].assign(deep_copy(value))


def synchronize_layer_states(model: keras.Model) -> None:
    """Averages the states of layers, and gradients of a part of an update, over ranks with different batches.

    The moving averages of a BatchNormalization that is not `synchronized` depend on the rows of its rank. They
    are linear in the statistics of the batches, so averaging them when they are read gives the same result as
    averaging after every step.
    """
    average_states(layer_states(model), model.distribute_strategy.gradient_group)
    average_accumulated(model)


def keep_metrics_without_samples(step: KerasStep) -> Callable:
    """Records the counts of metrics; the returned function restores them if a rank has no samples.

    Args:
        step: The current Keras step.
    """
    metrics = [variable for metric in step.model.metrics for variable in metric.variables]
    return kept_where_empty(metrics, tf.convert_to_tensor(step.rows))


class StatesOfCall:
    """The states of a layer that depend on past samples, recorded before a call with padding.

    Args:
        layer: The layer.
        is_alone: Whether no state depends on samples of other ranks.
    """

    def __init__(self, layer: keras.layers.Layer, *, is_alone: bool):
        states = layer_states(layer, of_own_rows=not is_alone)
        self._states = [state for state in states if not is_deferred(state)]
        self._is_alone = is_alone
        self._before = [tf.identity(state.value) for state in self._states]
        self._begin = 0 if tf.executing_eagerly() else len(_graph().get_operations())

    def put_back(self, rows: tf.Tensor) -> None:
        """Restores states that the call has assigned, if there are no rows.

        States that are computed from the rows of all ranks are not restored.
        """
        moved = range(len(self._states)) if tf.executing_eagerly() else self._moved()
        if moved:
            states, before = [self._states[p] for p in moved], [self._before[p] for p in moved]
            _restore_where_empty(states, before, rows)

    def _moved(self) -> list[int]:
        """The places of states that operations of the call assign from this rank's rows."""
        graph = _graph()
        places = {
            graph.capture(stored_value(state).handle).name: place
            for place, state in enumerate(self._states)
        }
        found = set()
        for operation in graph.get_operations()[self._begin :]:
            if operation.type == "ReadVariableOp":
                continue
            for tensor in operation.inputs:
                place = places.get(tensor.name)
                if place is not None and (self._is_alone or not _is_same_on_all_ranks(operation)):
                    found.add(place)
        return sorted(found)


def _is_same_on_all_ranks(operation: tf.Operation) -> bool:
    """Whether an operation assigns a value that is the same on all ranks."""
    is_assignment = operation.type.startswith("Assign") and operation.type.endswith("VariableOp")
    return is_assignment and trace_back(operation.inputs[1:], is_shared)[1]


def _graph() -> tf.Graph:
    return tf.compat.v1.get_default_graph()


def kept_where_empty(variables: Sequence[keras.Variable], rows: tf.Tensor) -> Callable:
    """Records the values of variables; the returned function restores them if there are no rows.

    Args:
        variables: The variables.
        rows: This rank's number of samples, an int32 scalar.
    """
    before = [tf.identity(variable.value) for variable in variables]
    return lambda: _restore_where_empty(variables, before, rows)


def _restore_where_empty(variables: Sequence, values: Sequence, rows: tf.Tensor) -> None:
    def restore():
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return rows

    tf.cond(tf.equal(rows, 0), restore, lambda: rows)
