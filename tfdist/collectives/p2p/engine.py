"""Peer-to-peer messages as an engine that wraps another.

An engine with a coordinator, such as Horovod, collects which tensors are ready on all ranks and decides
which operation runs next. That is efficient for many large gradients, but costs milliseconds, which matters
for latency-critical operations. Here a rank sends as soon as its tensor is ready: ranks agree only on the
name of the operation.

Each operation sends the minimum number of bytes (Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH"), from each rank to each other one; it is meant for small
groups. Sums are computed in group order: the result is bitwise the same on all members and in every run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Hashable, Iterable, Sequence

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.separate import caller_of_graph
from tfdist.backend.native import TRANSPORT, functions
from tfdist.collectives.engine import Engine, split_rows
from tfdist.collectives.flight_counts import outermost_is_eager
from tfdist.collectives.group import Group
from tfdist.collectives.p2p.hierarchy import Hierarchy, hierarchy_of

_FLUSH_SECONDS = 5.0

#: Below this number of elements each member sends its whole tensor to each other one, in one round of
#: messages instead of two.
_ONE_ROUND = 1 << 13


class P2PEngine(Engine):
    """Executes operations of small groups by messages between the ranks, all others by `inner`.

    `tfdist.collectives.p2p.with_p2p` connects the ranks and creates one.

    Args:
        inner: The engine that connected the ranks first.
        hosts: The host of each rank of the world.
        reached: The ranks to which this one has a connection.

    Attributes:
        inner: That engine.
        enabled: Whether messages are used; otherwise the inner engine executes all operations.
    """

    #: In larger groups a ring sends fewer messages, and needs fewer connections.
    max_group_size = 8
    sends_unused = True

    def __init__(self, inner: Engine, hosts: Sequence[Hashable], reached: Iterable[int]):
        super().__init__(inner.mesh)
        self.inner, self.enabled = inner, True
        self.name, self.is_deterministic = inner.name, inner.is_deterministic
        self._hosts = hosts
        self._reached = frozenset(reached)
        self._operations = TRANSPORT.load()
        self._tickets: dict[str, tf.Tensor] = {}
        self._steps: weakref.WeakKeyDictionary[tf.Graph, str] = weakref.WeakKeyDictionary()

    @classmethod
    def partners(cls, ranks: Sequence[int], rank: int, hosts: Sequence[Hashable]) -> set[int]:
        """The members of a group to which one of them must have a connection."""
        found = set(ranks) if len(ranks) <= cls.max_group_size else set()
        levels = cls._levels(ranks, rank, hosts)
        if levels is not None:
            found |= {*levels.local, *levels.across}
        return found - {rank}

    @classmethod
    def _levels(cls, ranks: Sequence[int], rank: int, hosts: Sequence[Hashable]):
        found = hierarchy_of(ranks, rank, hosts)
        if found and max(len(found.local), len(found.across)) <= cls.max_group_size:
            return found
        return None

    def uses_host(self, operation, dtype):
        """As the inner engine does."""
        return self.inner.uses_host(operation, dtype)

    def transport(self, group, *, reduces=False, on_host=False):
        """This engine for small groups, and for all-reduces in two levels over hosts; never for a GPU's memory."""
        if not self.enabled or not (on_host or not devices.has_gpu()):
            return self.inner
        is_hierarchical = reduces and self.hierarchy(group) is not None
        return self if is_hierarchical or self._reaches(group.ranks) else self.inner

    @property
    def lane(self) -> str:
        """A name other than that of the inner engine."""
        return "peer to peer"

    def host_address(self):
        """That of the inner engine."""
        return self.inner.host_address()

    def begin_run(self, run: int) -> None:
        """Discards the messages of steps of earlier runs."""
        super().begin_run(run)
        functions().tfdist_begin_run(run)

    def close(self) -> None:
        """Closes the connections, after all messages have left this process."""
        flush()
        functions().tfdist_close()

    def shutdown(self) -> None:
        """Closes the connections and the inner engine."""
        super().shutdown()
        self.close()
        self.inner.shutdown()

    def _check_group(self, ranks):
        if not self._reaches(ranks):
            self.inner._check_group(ranks)

    def _reaches(self, ranks) -> bool:
        return len(ranks) <= self.max_group_size and self._reached >= {*ranks} - {self.rank}

    def hierarchy(self, group: Group) -> Hierarchy | None:
        """The hierarchy of a group over hosts for an all-reduce; None if that is not hierarchical."""
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
        return self._joined(share, local, name, tensor)

    def _flat_all_reduce(self, tensor, group: Group, reduction: str, name: str):
        elements = tensor.shape.num_elements()
        if group.size == 2 or (elements is not None and elements < _ONE_ROUND):
            return self._reduce(self._exchange([tensor] * group.size, group, name), reduction)
        parts = _even_parts(tf.reshape(tensor, [-1]), group.size)
        share = self._reduce(self._exchange(parts, group, f"{name}/shares"), reduction)
        return self._joined(share, group, name, tensor)

    def _joined(self, share, group: Group, name: str, like):
        """The members' shares of a vector, gathered in the shape of `like`."""
        whole = tf.concat(self._exchange([share] * group.size, group, f"{name}/sums", None), axis=0)
        return tf.ensure_shape(tf.reshape(whole, tf.shape(like)), like.shape)

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
            step=self._step(),
            to=to,
            tag=name,
            in_graph=not tf.executing_eagerly(),
        )

    def _receive(self, after: tf.Tensor, dtype, source: int, name: str, shape):
        """The next tensor that a rank of the world sends under this name.

        Args:
            after: A tensor for which the operation waits.
            dtype: The dtype.
            source: The sender.
            name: The name.
            shape: The static shape, which may be partial.
        """
        return self._operations.tfdist_receive(
            ticket=self._ticket(f"receive/{source}/{name}"),
            after=after,
            step=self._step(),
            dtype=dtype,
            shape=shape,
            source=source,
            tag=name,
            in_graph=not tf.executing_eagerly(),
        )

    def _step(self) -> list:
        """The id of the step in which an operation of the current graph runs; empty for the step itself.

        TensorFlow gives each call of a function that it does not inline an id of its own. The order of these
        calls may differ between ranks, so the messages must bear the id of the caller's step.
        """
        caller = caller_of_graph(tf.compat.v1.get_default_graph())
        if caller is None:
            return []
        if caller not in self._steps:
            with caller.as_default(), tf.control_dependencies(None), tf.device("/CPU:0"):
                step = self._operations.tfdist_step(ticket=self._ticket("step"))
            self._steps[caller] = step.name
        return [caller.get_tensor_by_name(self._steps[caller])]

    def _reduce(self, parts: list, reduction: str):
        """Reduces the members' parts; the result is bitwise the same on all of them."""
        if reduction in ("max", "min"):
            return functools.reduce(tf.maximum if reduction == "max" else tf.minimum, parts)
        return self._operations.tfdist_sum(terms=parts, mean=reduction == "mean")

    def _ticket(self, name: str):
        """A resource that represents the side effect of an operation of this name."""
        found = self._tickets.get(name)
        if found is None or not outermost_is_eager():
            with tf.init_scope(), tf.device("/CPU:0"):
                found = tf.raw_ops.VarHandleOp(
                    dtype=tf.int32, shape=[], shared_name=f"tfdist-p2p/{name}"
                )
                # A resource of a graph of TensorFlow 1 can only be used in that graph.
                if tf.executing_eagerly():
                    self._tickets[name] = found
        return found

    def _exchange(self, parts: list, group: Group, name: str, shape=()):
        """Sends the i-th part to member i; returns the received ones in group order.

        Args:
            parts: A tensor for each member.
            group: The group.
            name: The name.
            shape: The shape of the received tensors; () means that of this rank's own part.
        """
        own = parts[group.rank]
        expected = own.shape if shape == () else tf.TensorShape(shape)
        others = [place for place in range(group.size) if place != group.rank]
        ranks = [group.ranks[place] for place in others]
        sent = self._send([parts[place] for place in others], ranks, name)
        return [
            own if place == group.rank else self._receive(sent[0], own.dtype, rank, name, expected)
            for place, rank in enumerate(group.ranks)
        ]


def _even_parts(flat, count: int) -> list:
    """Splits a vector of any length into `count` parts whose sizes differ by at most one."""
    size = tf.shape(flat, out_type=tf.int64)[0]
    ends = [size * i // count for i in range(count + 1)]
    return [flat[begin:end] for begin, end in itertools.pairwise(ends)]


def flush() -> None:
    """Waits up to five seconds until all messages have left this process."""
    functions().tfdist_flush(_FLUSH_SECONDS)
