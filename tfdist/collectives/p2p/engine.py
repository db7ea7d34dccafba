"""Peer-to-peer messages as an engine that wraps another.

An engine with a coordinator, as Horovod is, gathers what is ready on all ranks and decides what
runs next. That pays for many large gradients that nobody waits for, and costs milliseconds where
an operation is latency-critical. Here a rank sends as soon as it has something to send: the name of
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
from collections.abc import Hashable, Iterable, Sequence

import tensorflow as tf

from tfdist.backend.native import TRANSPORT, functions
from tfdist.collectives.engine import Engine, split_rows
from tfdist.collectives.flight_counts import outermost_is_eager
from tfdist.collectives.group import Group
from tfdist.collectives.p2p.hierarchy import Hierarchy, hierarchy_of

_FLUSH_SECONDS = 5.0

#: Below this many elements each member sends all it has to each other one, in one round of
#: messages instead of two.
_ONE_ROUND = 1 << 13


class P2PEngine(Engine):
    """Carries operations of groups of a few ranks by messages between them, all else by `inner`.

    `tfdist.collectives.p2p.with_p2p` connects the ranks and makes one.

    Args:
        inner: The engine that brought the ranks together.
        hosts: The host of each rank of the world.
        reached: The ranks that this one has a connection to.

    Attributes:
        inner: That engine.
        enabled: Whether messages are used; without them all goes by the inner engine.
    """

    #: Above this a ring sends fewer messages, and holds fewer connections.
    most_members = 8
    sends_unused = True

    def __init__(self, inner: Engine, hosts: Sequence[Hashable], reached: Iterable[int]):
        super().__init__(inner.mesh)
        self.inner, self.enabled = inner, True
        self.name, self.is_deterministic = inner.name, inner.is_deterministic
        self._hosts = hosts
        self._reached = frozenset(reached)
        self._operations = TRANSPORT.load()
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

    def transport(self, group, *, reduces=False):
        """This engine for groups of a few, and for all-reduces that it does in two levels over hosts."""
        if not self.enabled:
            return self.inner
        if reduces and self.hierarchy(group) is not None:
            return self
        if not self._reaches(group.ranks):
            return self.inner
        return self

    @property
    def lane(self) -> str:
        """Its own, beside that of the inner engine."""
        return "peer to peer"

    def host_address(self):
        """The inner engine's."""
        return self.inner.host_address()

    def begin_run(self, run: int) -> None:
        """Drops the messages that steps of earlier runs left behind."""
        super().begin_run(run)
        functions().tfdist_begin_run(run)

    def close(self) -> None:
        """Ends the connections, once all that was sent has left this process."""
        flush()
        functions().tfdist_close()

    def shutdown(self) -> None:
        """Ends the connections and the inner engine."""
        super().shutdown()
        self.close()
        self.inner.shutdown()

    def _check_group(self, ranks):
        if not self._reaches(ranks):
            self.inner._check_group(ranks)

    def _reaches(self, ranks) -> bool:
        return len(ranks) <= self.most_members and self._reached >= {*ranks} - {self.rank}

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
        share = self._reduce(self._exchange(parts, local, f"{name}/local"), reduction)
        share = self._flat_all_reduce(share, across, reduction, f"{name}/across")
        whole = tf.concat(self._exchange([share] * local.size, local, f"{name}/sums", None), axis=0)
        return tf.ensure_shape(tf.reshape(whole, tf.shape(tensor)), tensor.shape)

    def _flat_all_reduce(self, tensor, group: Group, reduction: str, name: str):
        elements = tensor.shape.num_elements()
        if group.size == 2 or (elements is not None and elements < _ONE_ROUND):
            return self._reduce(self._exchange([tensor] * group.size, group, name), reduction)
        flat = tf.reshape(tensor, [-1])
        parts = _even_parts(flat, group.size)
        share = self._reduce(self._exchange(parts, group, f"{name}/shares"), reduction)
        whole = tf.concat(self._exchange([share] * group.size, group, f"{name}/sums", None), axis=0)
        return tf.ensure_shape(tf.reshape(whole, tf.shape(tensor)), tensor.shape)

    def all_gather(self, tensor, group: Group, name: str):
        """As `Engine.all_gather`."""
        return tf.concat(self._exchange([tensor] * group.size, group, name), axis=0)

    def all_gather_uneven(self, tensor, group: Group, name: str):
        """As `Engine.all_gather_uneven`."""
        parts = self._exchange([tensor] * group.size, group, name, [None, *tensor.shape[1:]])
        return tf.concat(parts, axis=0)

    def reduce_scatter(self, tensor, group: Group, reduction: str, name: str):
        """As `Engine.reduce_scatter`."""
        parts = tf.unstack(split_rows(tensor, group.size), num=group.size)
        return self._reduce(self._exchange(parts, group, name), reduction)

    def all_to_all(self, tensor, group: Group, name: str):
        """As `Engine.all_to_all`."""
        parts = tf.unstack(split_rows(tensor, group.size), num=group.size)
        return tf.concat(self._exchange(parts, group, name), axis=0)

    def all_to_all_uneven(self, tensor, splits, group: Group, name: str):
        """As `Engine.all_to_all_uneven`."""
        parts = tf.split(tensor, splits, num=group.size)
        received = self._exchange(parts, group, name, [None, *tensor.shape[1:]])
        rows = tf.stack([tf.shape(part)[0] for part in received])
        return tf.concat(received, axis=0), rows

    def broadcast(self, tensor, root: int, group: Group, name: str):
        """As `Engine.broadcast`."""
        if group.rank != root:
            return self._receive(tensor, tensor.dtype, group.ranks[root], name, tensor.shape)
        others = [rank for rank in group.ranks if rank != group.ranks[root]]
        return self._send([tensor] * len(others), others, name)[0]

    def send(self, tensor, to, name):
        """As `Engine.send`."""
        return self._send([tensor], [to], name)[0]

    def receive(self, after, size, dtype, source, name):
        """As `Engine.receive`."""
        return self._receive(after, dtype, source, name, [size if isinstance(size, int) else None])

    def _send(self, tensors: list, to: list[int], name: str) -> list:
        """Sends a tensor to each of some ranks of the world; returns the tensors."""
        return self._operations.tfdist_send(
            ticket=self._ticket(f"send/{name}"),
            tensors=tensors,
            to=to,
            tag=name,
            in_graph=not tf.executing_eagerly(),
        )

    def _receive(self, after: tf.Tensor, dtype, source: int, name: str, shape):
        """The next tensor that a rank of the world sends under this name, of a maybe partial shape.

        Args:
            after: A tensor that the operation waits for.
            dtype: The dtype.
            source: The sender.
            name: The name.
            shape: What is known of the shape.
        """
        return self._operations.tfdist_receive(
            ticket=self._ticket(f"receive/{source}/{name}"),
            after=after,
            dtype=dtype,
            shape=shape,
            source=source,
            tag=name,
            in_graph=not tf.executing_eagerly(),
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
                    dtype=tf.int32, shape=[], shared_name=f"tfdist-p2p/{name}"
                )
                # One of a graph of TensorFlow 1 is of use in that graph alone.
                if tf.executing_eagerly():
                    self._tickets[name] = found
        return found

    def _exchange(self, parts: list, group: Group, name: str, shape=()):
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
        sent = self._send(
            [parts[place] for place in others], [group.ranks[place] for place in others], name
        )
        return [
            own if place == group.rank else self._receive(sent[0], own.dtype, rank, name, expected)
            for place, rank in enumerate(group.ranks)
        ]


def _even_parts(flat, count: int) -> list:
    """Cuts a vector of any length into `count` parts that differ by one element at most."""
    size = tf.shape(flat, out_type=tf.int64)[0]
    ends = [size * i // count for i in range(count + 1)]
    return [flat[begin:end] for begin, end in itertools.pairwise(ends)]


def flush(seconds: float = _FLUSH_SECONDS) -> None:
    """Waits until what was sent has left this process, for as long as `seconds`."""
    functions().tfdist_flush(seconds)
