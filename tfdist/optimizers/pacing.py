"""Has gradients wait until those before them have left.

TensorFlow computes a gradient as soon as it can. Where ranks compute faster than they talk, all of
them would stand waiting for their turn, beside the buffers of those that are under way.

`Operation._add_control_inputs` is TensorFlow's own: the graph of the backward pass is there when it
is known what travels together. `tests/optimizers/test_pacing.py` fails where it moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["UNDER_WAY", "UNDER_WAY_SHARDED", "Pace"]

#: How many buckets are computed or under way at a time, where each rank has room for all gradients.
UNDER_WAY = 4
#: The same under ZeRO, where memory is what counts.
UNDER_WAY_SHARDED = 2


class Pace:
    """The order in which buckets of gradients are computed and leave.

    The more of them may be under way, the less often does the link wait for the backward pass, or it
    for the link; each takes the memory of what is computed, or has come, in it.

    Args:
        under_way: How many buckets are computed or under way at a time.

    ```python
    pace = Pace()
    for bucket in buckets:
        pace.begin(bucket)
        pace.end(reduce(bucket))
    ```
    """

    def __init__(self, under_way: int = UNDER_WAY):
        self._under_way = under_way
        self._done: list[list[tf.Operation]] = []
        #: What the outcomes of buckets that are waited for are made of.
        self._before: set[tf.Operation] = set()

    def begin(self, gradients: Sequence[tf.Tensor]) -> None:
        """Has what makes some gradients wait for the bucket before those under way."""
        if tf.executing_eagerly() or len(self._done) < self._under_way:
            return
        done = self._done[-self._under_way]
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
