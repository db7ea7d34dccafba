"""Ring attention: keys and values go from rank to rank while each computes with those it has.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite
Context"; Brandon et al. 2023, "Striped Attention", on equal work for causal attention.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.collectives.raw import receive_tensor, send_tensor, shape_of
from tfdist.layers.context_parallel.pairs import Pairs

__all__ = ["ring_forward", "ring_gradients"]


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
    found = None
    for source, key, value in _travelling(key, value, group, f"{name}/keys", lambda: found):
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
    size = key.shape[-1]
    of_query = own = moving = None
    sent: list[tf.Tensor] = []
    step = 0
    for source, key, value in _travelling(key, value, group, f"{name}/keys", lambda: of_query):
        of_rows, *of_columns = pairs.gradients(rows, key, value, source)
        found = tf.concat(of_columns, axis=-1)
        of_query = of_rows if of_query is None else of_query + of_rows
        if own is None:
            own = found
        else:
            if moving is not None:
                found += moving
            moving = _pass_on(found, group, f"{name}/gradients/{step}", sent)
        step += 1
    with tf.control_dependencies(sent):
        own += moving
    return of_query, own[..., :size], own[..., size:]


def _travelling(key, value, group: Group, name: str, so_far):
    """Keys and values of one rank after the other, those of this rank first.

    The next are on their way while the caller computes with these. It begins with the next when it is
    done with these, so that no more than two sets stand at once.

    Args:
        key: This rank's keys.
        value: Its values.
        group: The ranks.
        name: For messages.
        so_far: Returns what the caller has computed so far, a nest.

    Yields:
        The place of the rank that they are of, the keys and the values.
    """
    size = key.shape[-1]
    here = tf.concat([key, value], axis=-1)
    for step in range(group.size):
        after: list = []
        if step:
            after = [tensor for tensor in tf.nest.flatten(so_far()) if tensor is not None]
        arrived = here
        if step + 1 < group.size:
            sent: list[tf.Tensor] = []
            coming = _pass_on(here, group, f"{name}/{step}", sent)
            # What was sent, so that nothing takes the sending for something that leads nowhere.
            (arrived,) = sent
        with tf.control_dependencies(after):
            now = tf.identity(arrived)
        yield (group.rank - step) % group.size, now[..., :size], now[..., size:]
        if step + 1 < group.size:
            here = coming


def _pass_on(tensor: tf.Tensor, group: Group, name: str, sent: list) -> tf.Tensor:
    """Sends a tensor to the next rank; returns the one of the rank before."""

    def send():
        sent.append(send_tensor(tensor, group, (group.rank + 1) % group.size, name=name))

    def receive():
        before = (group.rank - 1) % group.size
        return receive_tensor(shape_of(tensor), tensor.dtype, group, before, name=name)

    # Where an engine has no messages of its own, an eager one waits for the other rank.
    if group.rank % 2 and tf.executing_eagerly():
        found = receive()
        send()
        return found
    send()
    return receive()
