"""Variables that ranks must agree on: at the start of training, and where layers keep state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.backend.graph.dependence import trace_back
from tfdist.backend.keras.attributes import stored_value
from tfdist.backend.keras.functional import without_values
from tfdist.collectives import broadcast
from tfdist.collectives.shared import is_shared
from tfdist.gradients.buckets import buckets
from tfdist.sharding.layout import replicated_variables
from tfdist.sharding.parts import deep_copy
from tfdist.sharding.states import average_states, layer_states
from tfdist.step.keras_step import KerasStep
from tfdist.step.local_steps import local_optimizer


def broadcast_variables(model: keras.Model) -> None:
    """Gives all ranks the chief's weights and optimizer state.

    Ranks that drew the same seeds already agree; what a user or a callback loaded on one rank
    only, they do not.
    """
    strategy = model.distribute_strategy
    kinds: dict[tuple[str, ...], list] = {}
    local = local_optimizer(model)
    # A checkpoint may just have given each rank what is its own.
    shared = local is None or not local.is_resumed
    for variable, axes in replicated_variables(model, after_sync=shared):
        kinds.setdefault(axes, []).append(variable)
    for axes, some in kinds.items():
        # By dtype, so that few buckets are needed.
        some.sort(key=lambda variable: variable.dtype)
        values = [(place, variable.value) for place, variable in enumerate(some)]
        for bucket in buckets(values, strategy.gradient_options.bucket_bytes):
            parts = [tf.reshape(tf.convert_to_tensor(some[p].value), [-1]) for p in bucket]
            flat = broadcast(tf.concat(parts, axis=0), strategy.group(*axes), name="variables")
            sizes = [part.shape.num_elements() for part in parts]
            # A variable that kept its part of a bucket's memory would keep all of it.
            for place, part in zip(bucket, tf.split(flat, sizes), strict=True):
                some[place].assign(tf.reshape(deep_copy(part), some[place].shape))


def synchronize_layer_states(model: keras.Model) -> None:
    """Averages what layers keep of the batches they saw, over the ranks that saw others.

    A BatchNormalization that is not `synchronized` follows its own rank's rows. Its moving
    averages are linear in what it saw, so averaging them when they are read gives what averaging
    after every step would.
    """
    average_states(layer_states(model), model.distribute_strategy.gradient_group)


def keep_metrics_without_samples(step: KerasStep) -> Callable:
    """Notes what metrics have counted; the returned function puts it back where a rank has no sample.

    Args:
        step: The Keras step under way.
    """
    metrics = [variable for metric in step.model.metrics for variable in metric.variables]
    return kept_where_empty(metrics, tf.convert_to_tensor(step.rows))


class StatesOfCall:
    """What a layer keeps of past samples, noted before it is called with a row that is not there.

    Args:
        layer: The layer.
        is_alone: Whether no other rank's samples move anything.
    """

    def __init__(self, layer: keras.layers.Layer, *, is_alone: bool):
        states = layer_states(layer, of_own_rows=not is_alone)
        self._states = [state for state in states if not without_values(state)]
        self._is_alone = is_alone
        self._before = [tf.identity(state.value) for state in self._states]
        self._begin = 0 if tf.executing_eagerly() else len(_graph().get_operations())

    def put_back(self, rows: tf.Tensor) -> None:
        """Undoes what the call has assigned, if there are no rows.

        States that follow what all ranks have gathered or added up stay as they are.
        """
        moved = range(len(self._states)) if tf.executing_eagerly() else self._moved()
        if not moved:
            return

        def put_back():
            for place in moved:
                self._states[place].assign(self._before[place])
            return rows

        tf.cond(tf.equal(rows, 0), put_back, lambda: rows)

    def _moved(self) -> list[int]:
        """The places of states that operations of the call assign by this rank's own rows."""
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
    """Whether what an operation assigns is made of nothing but what all ranks have."""
    is_assignment = operation.type.startswith("Assign") and operation.type.endswith("VariableOp")
    return is_assignment and trace_back(operation.inputs[1:], is_shared)[1]


def _graph() -> tf.Graph:
    return tf.compat.v1.get_default_graph()


def kept_where_empty(variables: Sequence[keras.Variable], rows: tf.Tensor) -> Callable:
    """Notes the values of variables; the returned function puts them back if there are no rows.

    Args:
        variables: The variables.
        rows: This rank's number of samples, an int32 scalar.
    """
    before = [tf.identity(variable.value) for variable in variables]

    def put_back():
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return rows

    return lambda: tf.cond(tf.equal(rows, 0), put_back, lambda: rows)
