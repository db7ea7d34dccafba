"""Recorded training steps, which can be run again from the state in which they began.

A difference between two runs of the same steps from the same state is a transient fault of one run; a
difference in both runs is a persistent fault of the machine or of the program. This is the criterion of
Megatron-LM's rerun state machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_value
from tfdist.sharding.kept import kept_states_of

#: Values of variables, by the ids of these.
State = dict[int, np.ndarray]


class RecordedSteps:
    """The batches of some training steps, and the state in which the first of them began.

    Args:
        model: A compiled model.
        function: Its training function, which is called with an iterator.

    Attributes:
        function: That function.
    """

    def __init__(self, model: keras.Model, function: Callable):
        self._model, self.function = model, function
        self._feed: _Feed | None = None
        self._state: State | None = None
        self._steps: list[tuple[list[tf.Tensor], np.ndarray | None]] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_begun(self) -> bool:
        """Whether the initial state of the steps is recorded."""
        return self._state is not None

    def state(self) -> State:
        """A copy of all variables that a training step reads or changes."""
        return {id(each): stored_value(each).numpy() for each in _variables(self._model)}

    def begin(self, state: State | None) -> None:
        """Discards the recorded steps. The next one begins in `state`, or in an unknown one if None."""
        self._state = state
        self._steps.clear()

    def run(self, iterator: tf.data.Iterator):
        """Runs a step with the next batch of an iterator, and records the batch; returns the logs.

        Raises:
            StopIteration: There is no further batch.
        """
        batch = next(iterator)
        if self._feed is None or self._feed.spec != iterator.element_spec:
            self._feed = _Feed(iterator.element_spec)
        tensors = [
            part for part in tf.nest.flatten(batch, expand_composites=True) if part is not None
        ]
        self._steps.append((tensors, self._rate()))
        return self.function(self._feed.of(tensors))

    def again(self):
        """Runs the recorded steps again, and returns the logs of the last one."""
        if self._feed is None or self._state is None:
            raise RuntimeError(
                "Steps must be recorded before they can be run again. Received: no recorded steps."
            )
        optimizer, rate = self._model.optimizer, self._rate()
        for variable in _variables(self._model):
            if id(variable) in self._state:  # The first step may have made it.
                stored_value(variable).assign(self._state[id(variable)])
        logs = None
        for tensors, then in self._steps:
            if then is not None:
                # A callback may have set it between two steps.
                optimizer.learning_rate = then
            logs = self.function(self._feed.of(tensors))
        if rate is not None:
            optimizer.learning_rate = rate
        return logs

    def _rate(self) -> np.ndarray | None:
        """The learning rate if it is a variable, which callbacks may set; else None."""
        rate = self._model.optimizer.learning_rate
        is_variable = any(variable is rate for variable in self._model.optimizer.variables)
        return rate.numpy() if is_variable else None


class _Feed:
    """An iterator of given batches, which has the type of the original iterator in a graph.

    Args:
        spec: The element spec of the original iterator.
    """

    def __init__(self, spec):
        self.spec = spec
        specs = tf.nest.flatten(spec, expand_composites=True)
        self._queue = tf.queue.FIFOQueue(1, [each.dtype for each in specs])

        def element(_):
            parts = self._queue.dequeue()
            parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
            for part, each in zip(parts, specs, strict=True):
                part.set_shape(each.shape)
            return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)

        dataset = tf.data.Dataset.from_tensors(0).repeat().map(element)
        options = tf.data.Options()
        # An iterator that prefetches would wait for a batch that is never enqueued.
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        self._iterator = iter(dataset.with_options(options))

    def of(self, tensors: list[tf.Tensor]) -> Iterator:
        """The iterator, whose next element is the given batch."""
        self._queue.enqueue(tensors)
        return self._iterator


def _variables(model: keras.Model) -> list[keras.Variable]:
    """All variables that a training step reads or changes."""
    found = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    for state in kept_states_of(model):
        found += [kept.variable for kept in state.arrays().values()]
    return list({id(v): v for v in found if v.dtype != "string"}.values())
