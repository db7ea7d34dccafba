"""Ring attention: keys and values are passed from rank to rank while each rank computes with its current ones.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite
Context"; Brandon et al. 2023, "Striped Attention", on equal work for causal attention.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.run import receive_tensor, send_tensor, shape_of


class Ring:
    """The keys and values of one rank after the other, this rank's first, and their gradients.

    The next ones are received while the caller computes with the current ones. The gradients that each
    rank adds to them follow one step behind, and reach their rank after the last step.

    Args:
        key: This rank's keys, shape [batch, groups, 2 chunks, size].
        value: This rank's values, of the same shape.
        group: The ranks.
        name: For messages.
    """

    def __init__(self, key, value, group: Group, name: str):
        self._columns = [key, value]
        self._group, self._name, self._step = group, name, 0
        self._own_gradients: list = []
        self._moving: list = []
        self._sent: list = []

    def next(self) -> tuple:
        """Keys, values and the place of their rank."""
        step, columns = self._step, self._columns
        self._step += 1
        if self._step < self._group.size:
            # The tensors that were sent, so that TensorFlow does not prune the send operations.
            columns, self._columns = self._pass_on(columns, f"keys/{self._step}")
        return *columns, (self._group.rank - step) % self._group.size

    def add(self, gradients: list) -> None:
        """Adds this rank's part of the gradients of the keys and values that `next` returned last."""
        step = self._step - 1
        if step == 0:
            self._own_gradients = gradients
            return
        if self._moving:
            gradients = _sums(gradients, self._moving)
        passed, self._moving = self._pass_on(gradients, f"gradients/{step}")
        self._sent += passed

    def gradients(self) -> list:
        """The gradients of this rank's keys and values, summed over ranks."""
        with tf.control_dependencies(self._sent):
            return _sums(self._own_gradients, self._moving)

    def _pass_on(self, tensors: list, name: str) -> tuple[list, list]:
        """Sends tensors to the next rank; returns them, and those that the previous rank sends."""
        group = self._group
        after, before = ((group.rank + step) % group.size for step in (1, -1))
        named = [(x, f"{self._name}/{name}/{number}") for number, x in enumerate(tensors)]

        def send():
            return [send_tensor(x, group, after, name=name) for x, name in named]

        def receive():
            return [
                receive_tensor(shape_of(x), x.dtype, group, before, name=name) for x, name in named
            ]

        # An engine without point-to-point messages blocks an eager send until the other rank receives.
        if group.rank % 2 and tf.executing_eagerly():
            arrived = receive()
            return send(), arrived
        return send(), receive()


def _sums(first: list, second: list) -> list:
    return [one + other for one, other in zip(first, second, strict=True)]
