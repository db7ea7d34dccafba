"""Ring attention: keys and values go from rank to rank while each computes with those it has.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite
Context"; Brandon et al. 2023, "Striped Attention", on equal work for causal attention.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.run import receive_tensor, send_tensor, shape_of
from tfdist.context_parallel.pairs import Pairs, in_turn


def ring_forward(query, key, value, pairs: Pairs, group: Group, name: str):
    """Attends to the keys of all ranks.

    Args:
        query: Shape [batch, heads, 2 chunks, size].
        key: Shape [batch, groups, 2 chunks, size].
        value: Of that shape.
        pairs: What is computed.
        group: The ranks.
        name: For messages.

    Returns:
        The output and the log-sum-exp; see `attention_parts`.
    """
    travel = _Travel(key, value, group, f"{name}/keys")
    found = None
    for _ in range(group.size):
        # The next keys are asked for in turn too, so that no more than two sets stand at once.
        with in_turn(found):
            source, key, value = travel.next()
            found = pairs.attend(query, key, value, source, found)
    return found


def ring_gradients(rows, key, value, pairs: Pairs, group: Group, name: str):
    """The gradients of query, key and value.

    Keys and values make the round once more. What they get of each rank makes it one step behind
    them, and arrives at home after the last.

    Args:
        rows: As in `Pairs.gradients`.
        key: As in `ring_forward`.
        value: As there.
        pairs: As there.
        group: As there.
        name: As there.
    """
    travel = _Travel(key, value, group, f"{name}/keys")
    of_query: Any = None
    own: list = []
    moving: list = []
    sent: list = []
    for step in range(group.size):
        with in_turn(of_query):
            source, key, value = travel.next()
            of_rows, *found = pairs.gradients(rows, key, value, source)
        of_query = of_rows if of_query is None else of_query + of_rows
        if step == 0:
            own = found
            continue
        if moving:
            found = [one + other for one, other in zip(found, moving, strict=True)]
        passed, moving = _pass_on(found, group, f"{name}/gradients/{step}")
        sent += passed
    with tf.control_dependencies(sent):
        of_key, of_value = (one + other for one, other in zip(own, moving, strict=True))
    return of_query, of_key, of_value


class _Travel:
    """The keys and values of one rank after the other, as they come by; those of this rank first.

    The next are on their way while the caller computes with these.

    Args:
        key: This rank's keys.
        value: Its values.
        group: The ranks.
        name: For messages.
    """

    def __init__(self, key, value, group: Group, name: str):
        self._here = [key, value]
        self._group, self._name, self._step = group, name, 0

    def next(self) -> tuple:
        """The place of the rank that they are of, the keys and the values."""
        step, here = self._step, self._here
        self._step += 1
        if self._step < self._group.size:
            # What was sent, so that nothing takes the sending for something that leads nowhere.
            here, self._here = _pass_on(here, self._group, f"{self._name}/{step}")
        return (self._group.rank - step) % self._group.size, *here


def _pass_on(tensors: list, group: Group, name: str) -> tuple[list, list]:
    """Sends tensors to the next rank, and returns them; and what the rank before sends."""
    after, before = ((group.rank + step) % group.size for step in (1, -1))

    def send():
        return [
            send_tensor(tensor, group, after, name=f"{name}/{number}")
            for number, tensor in enumerate(tensors)
        ]

    def receive():
        return [
            receive_tensor(shape_of(like), like.dtype, group, before, name=f"{name}/{number}")
            for number, like in enumerate(tensors)
        ]

    # Where an engine has no messages of its own, an eager one waits for the other rank.
    if group.rank % 2 and tf.executing_eagerly():
        arrived = receive()
        return send(), arrived
    return send(), receive()
