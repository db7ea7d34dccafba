"""The last steps of a training, run again from the state that they began in.

What two runs of the same steps from the same state disagree about was a fault of one run, and what they
agree about is a fault of the machine or of the program: so Megatron-LM's rerun state machine tells
transient faults from persistent ones.
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
        function: Its training function, which takes an iterator.

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
        """Whether there is a state to begin with."""
        return self._state is not None

    def state(self) -> State:
        """A copy of all that a training step reads and changes."""
        return {id(each): stored_value(each).numpy() for each in _variables(self._model)}

    def begin(self, state: State | None) -> None:
        """Forgets the steps that are kept; the next one begins in a state, or it is not known in which."""
        self._state = state
        self._steps.clear()

    def run(self, iterator: tf.data.Iterator):
        """Makes a step with the next batch of an iterator, and keeps the batch; returns the logs.

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
        """Makes the kept steps once more, and returns the logs of the last one."""
        if self._feed is None or self._state is None:
            raise RuntimeError("No steps were kept that could be made once more.")
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
        """The learning rate where it is a variable, which callbacks may set."""
        rate = self._model.optimizer.learning_rate
        is_variable = any(variable is rate for variable in self._model.optimizer.variables)
        return rate.numpy() if is_variable else None


class _Feed:
    """An iterator of batches that are handed to it: to a graph it is as the one they came from.

    Args:
        spec: What that one says of its elements.
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
        # One that reads ahead would wait for a batch that nobody hands to it.
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        self._iterator = iter(dataset.with_options(options))

    def of(self, tensors: list[tf.Tensor]) -> Iterator:
        """The iterator, whose next element is a batch."""
        self._queue.enqueue(tensors)
        return self._iterator


def _variables(model: keras.Model) -> list[keras.Variable]:
    """All that a training step reads and changes."""
    found = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    for state in kept_states_of(model):
        found += [kept.variable for kept in state.arrays().values()]
    return list({id(v): v for v in found if v.dtype != "string"}.values())
