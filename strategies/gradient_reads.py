"""Gradients that a step of a user's own reads: of the global batch, and whole.

`optimizer.apply` reduces gradients over the ranks, so that a step which only hands them on pays for
one reduction. A step that looks at them before (clips, logs a norm, adds them up) would see this rank's
own. Which of its calls of `tape.gradient` are looked at is known once the step is traced: what the tape
returns is a handle, and whoever uses a handle is a reader. Then the step is traced again, and those
calls return what is reduced already.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
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
from tfdist.zero.sharded_gradients import rows_of_gradients


def call_step(replica: ReplicaContext, fn: Callable, *args, **kwargs) -> Any:
    """Calls a training step of a user's own; what it reads of gradients is global.

    Args:
        replica: The replica context, in a Keras step.
        fn: The step.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What it returned.

    Raises:
        ValueError: It reads gradients of which each rank has a part, or gives an optimizer what no
            reduction makes right.
    """
    call = functools.partial(fn, *args, **kwargs)
    if tf.executing_eagerly():
        with GradientReads(replica, None).under_way():
            return call()
    reads = GradientReads(replica, frozenset())
    traced = _traced(reads, call)
    if reads.found():
        reads = GradientReads(replica, reads.found())
        traced = _traced(reads, call)
    return traced()


def _traced(reads: GradientReads, call: Callable[[], Any]):
    """The step as a function, which can be dropped again."""

    @tf.function(autograph=False)
    def step():
        with reads.under_way():
            outputs = call()
        # A gradient that is returned as it is has a reader.
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
        marks: Where gradients come from.
    """

    def __init__(self, replica: ReplicaContext, calls: frozenset[int] | None):
        self._replica, self._calls = replica, calls
        self._model: Any = None if replica.step is None else replica.step.model
        self.marks = Marks()
        self._num_calls = 0
        self._is_in_call = False
        #: Handles, what they stand for, and the numbers of their calls.
        self._handles: list[tuple[Any, Any, int]] = []
        self._by_memory: dict[int, keras.Variable] = {}

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, tapes and optimizers ask here."""
        replica = self._replica
        before = replica.gradient_reads, replica.gradient_marks
        replica.gradient_reads, replica.gradient_marks = self, self.marks
        try:
            yield
        finally:
            replica.gradient_reads, replica.gradient_marks = before

    def found(self) -> frozenset[int]:
        """The numbers of the calls whose gradients the step, which was traced, has read."""
        return frozenset(
            number
            for handle, _, number in self._handles
            if any(part.consumers() for part in parts_of_gradient(handle))
        )

    # -- at the tape ------------------------------------------------------------------------

    def gradient(self, original: Callable, tape, target, sources, *args, **kwargs):
        """What `tape.gradient` returns to the step."""
        if self._is_in_call:
            return original(tape, target, sources, *args, **kwargs)
        self._is_in_call = True
        try:
            with rows_of_gradients() as rows:
                found = original(tape, target, sources, *args, **kwargs)
        finally:
            self._is_in_call = False
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
            # Those of shards were reduced on the way.
            some = gather_flat_gradients([_like(each, each) for each in some], own, rows)
            self.marks.put(some, Origin.LOCAL)
        else:
            some = self._of_a_call(some, own, rows)
        for place, gradient in zip(places, some, strict=True):
            flat[place] = gradient
        return tf.nest.pack_sequence_as(found, flat)

    def _of_a_call(self, gradients: Sequence, variables: Sequence, rows) -> list:
        number = self._num_calls
        self._num_calls += 1
        is_global = self._calls is None or number in self._calls
        if is_global and self._has_parts(variables):
            if self._calls is not None:
                raise self._refused()
            # Of an eager step nobody knows before whether it reads them.
            is_global = False
        if is_global:
            found = whole_gradients(gradients, variables, self._replica, rows)
            self.marks.put(found, Origin.GLOBAL)
            return found
        handles = [
            _handle(gradient, variable, rows)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        self._handles += [
            (handle, gradient, number) for handle, gradient in zip(handles, gradients, strict=True)
        ]
        for gradient, variable in zip(gradients, variables, strict=True):
            if layout_of(variable).flat is not None:
                # What a loss scale makes of it was reduced, too.
                self.marks.put([gradient], Origin.PART)
        self.marks.put(handles, Origin.HANDLE)
        return handles

    def _has_parts(self, variables: Sequence) -> bool:
        """Whether no rank has the whole gradients, or they are not those of one model."""
        return local_optimizer(self._model) is not None or any(map(is_part, variables))

    def _refused(self) -> ValueError:
        return ValueError(
            "A training step cannot read gradients whose variables are split over ranks by a tensor, "
            "pipeline or expert axis, or that an optimizer of `tfdist.addons.slow_links.local_sgd` trains: each rank has "
            f"a part, or its own. Received: the gradients of a `{type(self._model).__name__}`, read "
            "before they reach the optimizer. Use `strategy.global_norm(gradients, variables)` or "
            "`strategy.clip_by_global_norm(gradients, variables, clip_norm)`, or the optimizer's "
            "`clipnorm`, `global_clipnorm` or `clipvalue`."
        )

    def _variable(self, source):
        """The variable that a source of a tape is; None for a tensor."""
        if isinstance(source, keras.Variable):
            return source
        if not isinstance(source, tf.Variable):
            return None
        if not self._by_memory:
            self._by_memory = {id(stored_value(each)): each for each in self._model.variables}
        return self._by_memory.get(id(source), source)

    # -- at the optimizer -------------------------------------------------------------------

    def behind(self, gradients: Sequence) -> list:
        """What handles stand for; other gradients as they are."""
        known = {id(handle): own for handle, own, _ in self._handles}
        return [known.get(id(gradient), gradient) for gradient in gradients]

    def is_as_taken(self, gradient) -> bool:
        """Whether there is no gradient, it is sparse, or a tape returned this very one."""
        is_dense = tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices)
        return not is_dense or any(own is gradient for _, own, _ in self._handles)

    def summed(self, reduce: Callable, value):
        """A sum over the replicas, taken by the step: of gradients it is of the ranks' own."""
        given = tf.nest.flatten(value)
        sums = reduce(tf.nest.pack_sequence_as(value, self.behind(given)))
        for part, total in zip(given, tf.nest.flatten(sums), strict=True):
            if tf.is_tensor(part) and self.marks.of(part) is not None:
                self.marks.put([total], Origin.SUM)
        return sums

    def origins(self, gradients: Sequence, variables: Sequence) -> list[Origin]:
        """Of each gradient that an optimizer is given, whether it is global and in which form.

        Args:
            gradients: Tensors, IndexedSlices or None.
            variables: Their variables.

        Returns:
            For each `LOCAL`, which is still to be reduced, `GLOBAL` or `PART`.

        Raises:
            ValueError: One is made of global and of local gradients, is a sum over replicas, or is
                computed from parts.
        """
        known = {id(own) for _, own, _ in self._handles}

        def origin(gradient, variable) -> Origin:
            if gradient is None or id(gradient) in known:
                # Gradients of shards were reduced as they came.
                return Origin.LOCAL if layout_of(variable).flat is None else Origin.PART
            return self._origin(gradient, variable)

        return [origin(*pair) for pair in zip(gradients, variables, strict=True)]

    def _origin(self, gradient, variable) -> Origin:
        found, is_same = self.marks.trace(gradient)
        name = getattr(variable, "path", variable.name)
        if Origin.SUM in found:
            raise ValueError(
                "An optimizer in a training step of Keras expects the mean of the ranks' gradients, of "
                f"which their sum is {self._replica.num_replicas_in_sync} times. Received: a gradient of "
                f"`{name}` that the step has summed over the replicas. Leave the sum out, take the mean, "
                "or call `apply_gradients(..., skip_gradients_aggregation=True)`."
            )
        if Origin.HANDLE in found:
            if tf.executing_eagerly():
                raise self._refused()
            return Origin.GLOBAL  # So it will be, when the step is traced again.
        if tf.executing_eagerly() and not found and self._has_parts([variable]):
            raise self._refused()
        if Origin.PART in found:
            return Origin.PART
        if Origin.GLOBAL not in found:
            return Origin.LOCAL
        if Origin.LOCAL in found:
            raise ValueError(
                "A gradient cannot be made of a global and a local one. Received: a gradient of "
                f"`{name}` that is. What a tape returns in a loop, while another tape records, or by "
                "`jacobian` is this rank's own: give it to the optimizer in a call of its own, or take "
                "`tf.distribute.get_replica_context().all_reduce('MEAN', gradient)` first."
            )
        # Rows would come twice, where dense gradients that are the same stay as they are.
        return Origin.GLOBAL if is_same or isinstance(gradient, tf.IndexedSlices) else Origin.LOCAL


def _handle(gradient, variable, rows):
    """What stands for a gradient, of the shape that it has in one process."""
    shard = layout_of(variable).flat
    if shard is None:
        return _like(gradient, gradient)
    if isinstance(gradient, tf.IndexedSlices):
        return _like(gradient, rows.of(variable))
    return tf.zeros(shard.array_shape, gradient.dtype)


def _like(gradient, found):
    """A tensor of its own with the values of a gradient."""
    if not isinstance(found, tf.IndexedSlices):
        return tf.identity(found)
    return tf.IndexedSlices(
        tf.identity(found.values), tf.identity(found.indices), found.dense_shape
    )
