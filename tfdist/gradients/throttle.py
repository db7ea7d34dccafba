"""A limit on the buckets of gradients that are in flight.

TensorFlow computes a gradient as soon as it can. Where computation is faster than communication, all
gradients would wait in memory for their turn, in addition to the buffers of the buckets in flight.

`Operation._add_control_inputs` is private to TensorFlow: the graph of the backward pass exists before the
buckets are known. `tests/gradients/test_throttle.py` fails if it changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.backend import devices

#: The number of buckets that are computed or sent at a time, if each rank has memory for all gradients.
MAX_IN_FLIGHT = 4
#: The same under ZeRO, which has to save memory.
MAX_IN_FLIGHT_SHARDED = 2
#: The same under ZeRO on a GPU, with buckets of 64 MiB.
MAX_IN_FLIGHT_SHARDED_ON_GPUS = 4


def max_in_flight(*, sharded: bool = False) -> int | None:
    """The number of buckets that are computed or sent at a time; None for all.

    A GPU computes what was enqueued before: a limit would have the host wait for sums within the backward pass.

    Args:
        sharded: Whether gradients are reduced to shards.
    """
    if devices.has_gpu():
        return MAX_IN_FLIGHT_SHARDED_ON_GPUS if sharded else None
    return MAX_IN_FLIGHT_SHARDED if sharded else MAX_IN_FLIGHT


class InFlightLimit:
    """The order in which buckets of gradients are computed and sent.

    With more buckets in flight the network and the backward pass wait for each other less often, but each
    bucket requires memory for its gradients.

    Args:
        max_in_flight: The number of buckets that are computed or sent at a time; None for all.

    ```python
    limit = InFlightLimit(max_in_flight())
    for bucket in buckets:
        limit.begin(bucket)
        limit.end(reduce(bucket))
    ```
    """

    def __init__(self, max_in_flight: int | None):
        self._max_in_flight = max_in_flight
        self._done: list[list[tf.Operation]] = []
        #: The operations that buckets which others wait for depend on.
        self._before: set[tf.Operation] = set()

    def begin(self, gradients: Sequence[tf.Tensor]) -> None:
        """Makes the computation of gradients wait for an earlier bucket."""
        if self._max_in_flight is None or len(self._done) < self._max_in_flight:
            return
        if tf.executing_eagerly():
            return
        done = self._done[-self._max_in_flight]
        self._before |= _ancestors(done, self._before)
        for gradient in gradients:
            operation = gradient.op
            # An argument of a function cannot wait, nor can an operation that the bucket depends on.
            if operation.type != "Placeholder" and operation not in self._before:
                operation._add_control_inputs([o for o in done if o.graph is operation.graph])

    def end(self, reduced: Sequence[tf.Tensor]) -> None:
        """Records the results of the bucket."""
        if not tf.executing_eagerly():
            self._done.append(list({tensor.op: None for tensor in reduced}))


def _ancestors(operations: Sequence[tf.Operation], known: set) -> set:
    """Operations and all that they depend on, without the known ones."""
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
