"""Collectives made of messages that go straight from rank to rank.

An engine with a negotiator, as Horovod is, gathers what is ready on all ranks and decides what
runs next. That pays for many large gradients that nobody waits for, and costs milliseconds where a
layer waits for a few numbers. Here a rank sends as soon as it has something to send: the name of
the operation is all that the ranks agree on.

Each operation sends the fewest bytes that any algorithm can (Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"), from each rank to each other one;
it is meant for groups of a few. Sums are taken in group order: all members get the same bits, in
every run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import tensorflow as tf

from tfdist.collectives.engine import split_rows
from tfdist.collectives.flight_recorder import outermost_is_eager
from tfdist.collectives.group import Group
from tfdist.collectives.p2p.hierarchy import Hierarchy, hierarchy_of
from tfdist.native import load

__all__ = ["Direct"]

#: Below this many elements each member sends all it has to each other one, in one round of
#: messages instead of two.
_ONE_ROUND = 1 << 13


class Direct:
    """The operations of an `Engine`, over the transport of this process.

    All tensors have rank one or more. Connections to the members are there already:
    `tfdist.collectives.p2p.connections` makes them.

    Args:
        hosts: The host of each rank of the world.
        reached: The ranks that this one has a connection to.
    """

    #: Above this a ring sends fewer messages, and holds fewer connections.
    most_members = 8
    #: As of an `Engine`: nothing that it must do in another dtype.
    reduce_as: Mapping[tf.DType, tf.DType] = {}
    move_as: Mapping[tf.DType, tf.DType] = {}

    def __init__(self, hosts: Sequence[Hashable], reached: Iterable[int]):
        self._hosts = hosts
        self.reached = frozenset(reached)
        self._operations = load()
        self._tickets: dict[str, tf.Tensor] = {}

    @classmethod
    def partners(cls, ranks: Sequence[int], rank: int, hosts: Sequence[Hashable]) -> set[int]:
        """Those of a group's members that one of them has to reach."""
        found = set(ranks) if len(ranks) <= cls.most_members else set()
        levels = cls._levels(ranks, rank, hosts)
        if levels is not None:
            found |= {*levels.local, *levels.across}
        return found - {rank}

    @classmethod
    def _levels(cls, ranks: Sequence[int], rank: int, hosts: Sequence[Hashable]):
        found = hierarchy_of(ranks, rank, hosts)
        if found is None or max(len(found.local), len(found.across)) > cls.most_members:
            return None
        return found

    def hierarchy(self, group: Group) -> Hierarchy | None:
        """How a group sums up over hosts; None where it does so as if there was one."""
        return self._levels(group.ranks, group.ranks[group.rank], self._hosts)

    def all_reduce(self, tensor, group: Group, reduction: str, name: str):
        """As `Engine.all_reduce`; over hosts in two levels."""
        levels = self.hierarchy(group)
        if levels is None:
            return self._flat_all_reduce(tensor, group, reduction, name)
        local = dataclasses.replace(group, ranks=levels.local, label=f"{group.label}-local")
        across = dataclasses.replace(group, ranks=levels.across, label=f"{group.label}-across")
        parts = _even_parts(tf.reshape(tensor, [-1]), local.size)
        share = self._reduce(self._swap(parts, local, f"{name}/local"), reduction)
        share = self._flat_all_reduce(share, across, reduction, f"{name}/across")
        whole = tf.concat(self._swap([share] * local.size, local, f"{name}/sums", None), axis=0)
        return tf.ensure_shape(tf.reshape(whole, tf.shape(tensor)), tensor.shape)

    def _flat_all_reduce(self, tensor, group: Group, reduction: str, name: str):
        elements = tensor.shape.num_elements()
        if group.size == 2 or (elements is not None and elements < _ONE_ROUND):
            return self._reduce(self._swap([tensor] * group.size, group, name), reduction)
        flat = tf.reshape(tensor, [-1])
        parts = _even_parts(flat, group.size)
        share = self._reduce(self._swap(parts, group, f"{name}/shares"), reduction)
        whole = tf.concat(self._swap([share] * group.size, group, f"{name}/sums", None), axis=0)
        return tf.ensure_shape(tf.reshape(whole, tf.shape(tensor)), tensor.shape)

    def all_gather(self, tensor, group: Group, name: str):
        """As `Engine.all_gather`."""
        return tf.concat(self._swap([tensor] * group.size, group, name), axis=0)

    def all_gather_uneven(self, tensor, group: Group, name: str):
        """As `Engine.all_gather_uneven`."""
        parts = self._swap([tensor] * group.size, group, name, [None, *tensor.shape[1:]])
        return tf.concat(parts, axis=0)

    def reduce_scatter(self, tensor, group: Group, reduction: str, name: str):
        """As `Engine.reduce_scatter`."""
        parts = tf.unstack(split_rows(tensor, group.size), num=group.size)
        return self._reduce(self._swap(parts, group, name), reduction)

    def all_to_all(self, tensor, group: Group, name: str):
        """As `Engine.all_to_all`."""
        parts = tf.unstack(split_rows(tensor, group.size), num=group.size)
        return tf.concat(self._swap(parts, group, name), axis=0)

    def all_to_all_uneven(self, tensor, splits, group: Group, name: str):
        """As `Engine.all_to_all_uneven`."""
        parts = tf.split(tensor, splits, num=group.size)
        received = self._swap(parts, group, name, [None, *tensor.shape[1:]])
        rows = tf.stack([tf.shape(part)[0] for part in received])
        return tf.concat(received, axis=0), rows

    def broadcast(self, tensor, root: int, group: Group, name: str):
        """As `Engine.broadcast`."""
        if group.rank != root:
            return self.receive(tensor, group.ranks[root], name)
        others = [rank for rank in group.ranks if rank != group.ranks[root]]
        return self.send([tensor] * len(others), others, name)[0]

    def send(self, tensors: list, to: list[int], name: str) -> list:
        """Sends a tensor to each of some ranks of the world.

        Returns:
            The tensors.
        """
        return self._operations.tfdist_send(
            ticket=self._ticket(f"send/{name}"), tensors=tensors, to=to, tag=name
        )

    def receive(self, like, source: int, name: str, shape=None):
        """The next tensor that the rank `source` of the world sends under this name.

        Args:
            like: A tensor of its dtype, and of its shape unless that is given.
            source: The sender.
            name: The name.
            shape: A shape, maybe partial.
        """
        return self._operations.tfdist_receive(
            ticket=self._ticket(f"receive/{source}/{name}"),
            after=like,
            dtype=like.dtype,
            shape=like.shape if shape is None else shape,
            source=source,
            tag=name,
        )

    def _reduce(self, parts: list, reduction: str):
        """What is left of a part of each member: the same bits on all of them."""
        if reduction == "max":
            return functools.reduce(tf.maximum, parts)
        if reduction == "min":
            return functools.reduce(tf.minimum, parts)
        return self._operations.tfdist_sum(terms=parts, mean=reduction == "mean")

    def _ticket(self, name: str):
        """A resource that stands for what an operation of this name does."""
        found = self._tickets.get(name)
        if found is None or not outermost_is_eager():
            with tf.init_scope(), tf.device("/CPU:0"):
                found = tf.raw_ops.VarHandleOp(
                    dtype=tf.int32, shape=[], shared_name=f"tfdist-direct/{name}"
                )
                # One of a graph of TensorFlow 1 is of use in that graph alone.
                if tf.executing_eagerly():
                    self._tickets[name] = found
        return found

    def _swap(self, parts: list, group: Group, name: str, shape=()):
        """Sends the i-th part to member i; what came from each, in group order.

        Args:
            parts: A tensor for each member.
            group: The group.
            name: The name.
            shape: The shape of what comes; () stands for that of this rank's own part.
        """
        own = parts[group.rank]
        expected = own.shape if shape == () else tf.TensorShape(shape)
        others = [place for place in range(group.size) if place != group.rank]
        sent = self.send(
            [parts[place] for place in others], [group.ranks[place] for place in others], name
        )
        return [
            own if place == group.rank else self.receive(sent[0], rank, name, expected)
            for place, rank in enumerate(group.ranks)
        ]


def _even_parts(flat, count: int) -> list:
    """Cuts a vector of any length into `count` parts that differ by one element at most."""
    size = tf.shape(flat, out_type=tf.int64)[0]
    ends = [size * i // count for i in range(count + 1)]
    return [flat[begin:end] for begin, end in itertools.pairwise(ends)]
