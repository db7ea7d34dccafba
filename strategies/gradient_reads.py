"""Gradients that a custom training step reads: whole gradients of the global batch.

`optimizer.apply` reduces gradients over the ranks, so that a step that only passes them on has the cost of
one reduction. A step that reads them before (clips, logs a norm, adds them up) would see the gradients of
this rank. Tracing the step shows which calls of `tape.gradient` are read: the tape returns handles, and an
operation that uses a handle reads it. Then the step is traced again, and these calls return reduced gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.graph.loops import is_called_by_loop
from tfdist.backend.graph.tapes import others_record
from tfdist.backend.keras.attributes import stored_value
from tfdist.gradients.origins import Marks, Origin, parts_of_gradient
from tfdist.sharding.layout import layout_of
from tfdist.step.context import ReplicaContext
from tfdist.step.local_steps import local_optimizer
from tfdist.strategies.whole_gradients import gather_flat_gradients, is_part, whole_gradients
from tfdist.utils.places import replace_at
from tfdist.utils.temporary import attributes_set
from tfdist.zero.sharded_gradients import rows_of_gradients


def call_step(replica: ReplicaContext, fn: Callable, *args, **kwargs) -> Any:
    """Calls a custom training step; the gradients that it reads are global.

    Args:
        replica: The replica context, in a Keras step.
        fn: The step.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The return value of the step.

    Raises:
        ValueError: It reads gradients of which each rank has a part, or that a tf.function inside it computes,
            or passes gradients to an optimizer for which no reduction gives the gradient of the global batch.
    """
    call = functools.partial(fn, *args, **kwargs)
    if tf.executing_eagerly():
        with GradientReads(replica, None).current():
            return call()
    reads = GradientReads(replica, frozenset())
    traced = _traced(reads, call)
    if reads.found():
        again = GradientReads(replica, reads.found())
        traced = _traced(again, call)
        if again.num_calls < reads.num_calls:
            raise ValueError(
                "Gradients that a training step reads, or gets from a tf.function, require two traces of the "
                "function that computes them, so it must not be a tf.function: remove it. Received: a step of "
                f"`{type(reads.step.model).__name__}` that calls one."
            )
    return traced()


def _traced(reads: GradientReads, call: Callable[[], Any]):
    """The traced step, which may be discarded."""

    @tf.function(autograph=False)
    def step():
        with reads.current():
            outputs = call()
        reads.step.note_outputs(outputs)
        # A gradient that is returned unchanged is read.
        return tf.nest.map_structure(
            lambda output: tf.identity(output) if tf.is_tensor(output) else output, outputs
        )

    return step.get_concrete_function()


class GradientReads:
    """The calls of `tape.gradient` in one call of a step.

    Args:
        replica: The replica context.
        calls: The numbers of the calls that return global gradients; None for all of them.

    Attributes:
        marks: The origins of gradients.
        num_calls: The number of these calls so far.
    """

    def __init__(self, replica: ReplicaContext, calls: frozenset[int] | None):
        self._replica, self._calls = replica, calls
        self.step: Any = replica.step
        self._model: Any = None if replica.step is None else replica.step.model
        self.marks = Marks()
        self.num_calls = 0
        self._is_in_call = False
        #: Handles, the gradients that they represent, and the numbers of their calls.
        self._handles: list[tuple[Any, Any, int]] = []
        self._by_memory: dict[int, keras.Variable] = {}

    def current(self) -> contextlib.AbstractContextManager[None]:
        """A context in which tapes and optimizers use this object."""
        return attributes_set(self._replica, gradient_reads=self, gradient_marks=self.marks)

    def found(self) -> frozenset[int]:
        """The numbers of the calls whose gradients the traced step has read."""
        return frozenset(
            number
            for handle, _, number in self._handles
            if any(part.consumers() for part in parts_of_gradient(handle))
        )

    def gradient(self, original: Callable, tape, target, sources, *args, **kwargs):
        """The result of `tape.gradient` for the step."""
        if self._is_in_call:
            return original(tape, target, sources, *args, **kwargs)
        with attributes_set(self, _is_in_call=True), rows_of_gradients() as rows:
            found = original(tape, target, sources, *args, **kwargs)
        flat = tf.nest.flatten(found)
        variables = [self._variable(source) for source in tf.nest.flatten(sources)]
        places = [
            place
            for place, (gradient, variable) in enumerate(zip(flat, variables, strict=True))
            if gradient is not None
            and variable is not None
            and not getattr(variable, "overwrite_with_gradient", False)
        ]
        if not places:
            return found
        some, own = [flat[place] for place in places], [variables[place] for place in places]
        if others_record(tape) or is_called_by_loop(call_step.__code__):
            # Gradients of shards were reduced when they were computed.
            some = gather_flat_gradients([_like(each, each) for each in some], own, rows)
            self.marks.put(some, Origin.LOCAL)
        else:
            some = self._of_a_call(some, own, rows)
        replace_at(flat, places, some)
        return tf.nest.pack_sequence_as(found, flat)

    def _of_a_call(self, gradients: Sequence, variables: Sequence, rows) -> list:
        number = self.num_calls
        self.num_calls += 1
        if self._calls is None or number in self._calls:
            if not self._has_parts(variables):
                found = whole_gradients(gradients, variables, self._replica, rows)
                self.marks.put(found, Origin.GLOBAL)
                return found
            # It is not known in advance whether an eager step reads them.
            if self._calls is not None:
                raise self._refused()
        handles = []
        for gradient, variable in zip(gradients, variables, strict=True):
            handles.append(_handle(gradient, variable, rows))
            self._handles.append((handles[-1], gradient, number))
            if layout_of(variable).flat is not None:
                # It is reduced, and so are the gradients that a loss scale computes from it.
                self.marks.put([gradient], Origin.PART)
        self.marks.put(handles, Origin.HANDLE)
        return handles

    def _has_parts(self, variables: Sequence) -> bool:
        """Whether no rank has the whole gradients, or ranks train different parameters."""
        return local_optimizer(self._model) is not None or any(map(is_part, variables))

    def _refused(self) -> ValueError:
        return ValueError(
            "A training step cannot read gradients of variables that are split over ranks by a tensor, "
            "pipeline or expert axis, or that an optimizer of `tfdist.addons.slow_links.local_sgd` trains: each "
            "rank has a part, or different ones. Received: the gradients of a "
            f"`{type(self._model).__name__}`, read before they are passed to the optimizer. Use `strategy.global_norm(gradients, variables)` or "
            "`strategy.clip_by_global_norm(gradients, variables, clip_norm)`, or the optimizer's "
            "`clipnorm`, `global_clipnorm` or `clipvalue`."
        )

    def _variable(self, source):
        """The variable of a source of a tape; None for a tensor."""
        if isinstance(source, keras.Variable):
            return source
        if not isinstance(source, tf.Variable):
            return None
        if not self._by_memory:
            self._by_memory = {id(stored_value(each)): each for each in self._model.variables}
        return self._by_memory.get(id(source), source)

    def behind(self, gradients: Sequence) -> list:
        """Replaces handles by the gradients that they represent."""
        known = {id(handle): own for handle, own, _ in self._handles}
        return [known.get(id(gradient), gradient) for gradient in gradients]

    def is_as_taken(self, gradient) -> bool:
        """Whether a gradient is None, sparse, or unchanged since a tape returned it."""
        is_dense = tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices)
        return not is_dense or any(own is gradient for _, own, _ in self._handles)

    def summed(self, reduce: Callable, value):
        """A sum over the replicas in the step, in which handles are replaced by local gradients."""
        given = tf.nest.flatten(value)
        sums = reduce(tf.nest.pack_sequence_as(value, self.behind(given)))
        for part, total in zip(given, tf.nest.flatten(sums), strict=True):
            if tf.is_tensor(part) and self.marks.of(part) is not None:
                self.marks.put([total], Origin.SUM)
        return sums

    def origins(self, gradients: Sequence, variables: Sequence) -> list[Origin]:
        """The origins of the gradients that an optimizer receives.

        Args:
            gradients: Tensors, IndexedSlices or None.
            variables: Their variables.

        Returns:
            For each gradient `LOCAL`, if it must still be reduced, `GLOBAL` or `PART`.

        Raises:
            ValueError: One is computed from global and local gradients, is a sum over replicas, or is
                computed from parts.
        """
        known = {id(own) for _, own, _ in self._handles}

        def origin(gradient, variable) -> Origin:
            if gradient is None or id(gradient) in known:
                # Gradients of shards were reduced when they were computed.
                return Origin.LOCAL if layout_of(variable).flat is None else Origin.PART
            return self._origin(gradient, variable)

        return [origin(*pair) for pair in zip(gradients, variables, strict=True)]

    def _origin(self, gradient, variable) -> Origin:
        found, is_same = self.marks.trace(gradient)
        name = getattr(variable, "path", variable.name)
        if Origin.SUM in found:
            raise ValueError(
                "An optimizer in a training step of Keras requires the mean of the ranks' gradients, and not "
                f"their sum, which is {self._replica.num_replicas_in_sync} times larger. Received: a gradient "
                f"of `{name}` that the step has summed over the replicas. Remove the sum, use the mean, or "
                "call `apply_gradients(..., skip_gradients_aggregation=True)`."
            )
        if Origin.HANDLE in found:
            if tf.executing_eagerly():
                raise self._refused()
            return Origin.GLOBAL  # It is global when the step is traced again.
        if tf.executing_eagerly() and not found and self._has_parts([variable]):
            raise self._refused()
        if Origin.PART in found:
            return Origin.PART
        if Origin.GLOBAL not in found:
            return Origin.LOCAL
        if Origin.LOCAL in found:
            raise ValueError(
                "A gradient cannot be computed from both a global and a local one. Received: such a "
                f"gradient of `{name}`. A gradient that a tape returns in a loop, while another tape records, or by "
                "`jacobian` is local: pass it to the optimizer in a separate call, or use "
                "`tf.distribute.get_replica_context().all_reduce('MEAN', gradient)` first."
            )
        # A mean keeps equal dense gradients, but would duplicate rows.
        return Origin.GLOBAL if is_same or isinstance(gradient, tf.IndexedSlices) else Origin.LOCAL


def _handle(gradient, variable, rows):
    """A handle for a gradient, with the shape of the gradient in one process."""
    shard = layout_of(variable).flat
    if shard is None:
        return _like(gradient, gradient)
    if isinstance(gradient, tf.IndexedSlices):
        return _like(gradient, rows.of(variable))
    return tf.zeros(shard.array_shape, gradient.dtype)


def _like(gradient, found):
    """A new tensor with the values of a gradient."""
    if not isinstance(found, tf.IndexedSlices):
        return tf.identity(found)
    return tf.IndexedSlices(
        tf.identity(found.values), tf.identity(found.indices), found.dense_shape
    )
