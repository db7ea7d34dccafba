"""A limit on the buckets of gradients that are in flight.

TensorFlow computes a gradient as soon as it can. Where ranks compute faster than they talk, all of
them would stand waiting for their turn, beside the buffers of those that are under way.

`Operation._add_control_inputs` is TensorFlow's own: the graph of the backward pass is there when it
is known what travels together. `tests/gradients/test_throttle.py` fails where it moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

#: How many buckets are computed or under way at a time, where each rank has room for all gradients.
MAX_IN_FLIGHT = 4
#: The same under ZeRO, where memory is what counts.
MAX_IN_FLIGHT_SHARDED = 2


class InFlightLimit:
    """The order in which buckets of gradients are computed and leave.

    The more of them may be under way, the less often does the link wait for the backward pass, or it
    for the link; each takes the memory of what is computed, or has come, in it.

    Args:
        max_in_flight: How many buckets are computed or under way at a time.

    ```python
    limit = InFlightLimit()
    for bucket in buckets:
        limit.begin(bucket)
        limit.end(reduce(bucket))
    ```
    """

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT):
        self._max_in_flight = max_in_flight
        self._done: list[list[tf.Operation]] = []
        #: What the outcomes of buckets that are waited for are made of.
        self._before: set[tf.Operation] = set()

    def begin(self, gradients: Sequence[tf.Tensor]) -> None:
        """Has what makes some gradients wait for the bucket before those under way."""
        if tf.executing_eagerly() or len(self._done) < self._max_in_flight:
            return
        done = self._done[-self._max_in_flight]
        self._before |= _ancestors(done, self._before)
        for gradient in gradients:
            operation = gradient.op
            # An argument of a function waits for nobody; what others were made of cannot wait.
            if operation.type != "Placeholder" and operation not in self._before:
                operation._add_control_inputs([o for o in done if o.graph is operation.graph])

    def end(self, reduced: Sequence[tf.Tensor]) -> None:
        """Takes in what has become of the bucket."""
        if not tf.executing_eagerly():
            self._done.append(list({tensor.op: None for tensor in reduced}))


def _ancestors(operations: Sequence[tf.Operation], known: set) -> set:
    """Operations and all that they are made of, but what is known."""
    found: set = set()
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation in found or operation in known:
            continue
        found.add(operation)
        waiting += [tensor.op for tensor in operation.inputs]
        waiting += operation.control_inputs
    return found
