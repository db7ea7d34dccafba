"""The interface of engines: the basic operations on which `tfdist.collectives` is built."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Collection, Mapping

import tensorflow as tf

from tfdist.backend import devices
from tfdist.collectives.flight_recorder import FlightRecorder
from tfdist.collectives.group import Group
from tfdist.mesh import Mesh

REDUCTIONS = ("sum", "mean", "max", "min")


class Engine(abc.ABC):
    """Sends and reduces tensors among the ranks of a mesh.

    An engine implements the seven abstract methods for tensors of rank one or more of the dtypes that
    it supports; `tfdist.collectives.operations` adds dtypes, scalars, other dims, gradients, names and
    the flight recorder. All members of a group call the same operation with the same name.

    Attributes:
        mesh: The resolved mesh.
        recorder: Records the operations under way.
    """

    #: The engine's name in messages.
    name: str = "engine"
    #: Whether the same numbers on the same ranks always have the same sum, bitwise.
    is_deterministic: bool = True
    #: For dtypes that the engine cannot add or compare: the dtype in which it reduces them.
    reduce_as: Mapping[tf.DType, tf.DType] = {}
    #: For dtypes that the engine cannot send: a dtype of the same width whose bits it sends, or
    #: a wider one that can represent every value.
    move_as: Mapping[tf.DType, tf.DType] = {}
    #: Whether `send` is executed in a graph even if its result is not used.
    sends_unused: bool = False
    #: The number of the current call of `fit`, `evaluate` or `predict`; the same on all ranks. That of all engines of
    #: the process, which share connections: a message of a failed step of one is never taken for another's.
    run: int = 0

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.recorder = FlightRecorder()
        self._groups: dict[tuple, Group] = {}
        #: A cache, since each call of a layer and each variable requests a group.
        self._by_axes: dict[tuple[str, ...], Group] = {}
        self._at_shutdown: list[Callable[[], None]] = []

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self.mesh.rank

    @property
    def size(self) -> int:
        """The number of ranks in the world."""
        return self.mesh.size

    def group(self, *axes: str) -> Group:
        """The group of this rank along the given mesh axes; without axes, the world."""
        found = self._by_axes.get(axes)
        if found is None:
            named = axes or self.mesh.order
            spread = tuple(axis for axis in named if self.mesh.shape[axis] > 1)
            ranks = self.mesh.group(*named)
            found = self._by_axes[axes] = self._group_of(ranks, "+".join(spread or named), spread)
        return found

    def pair(self, other: int) -> Group:
        """The group of this rank and the rank `other`.

        Raises:
            ValueError: `other` is this rank.
        """
        if other == self.rank:
            raise ValueError(f"A rank cannot send to itself. Received: {other=}.")
        low, high = sorted((self.rank, other))
        return self._group_of((low, high), label=f"pair{low}-{high}")

    def subgroup(self, group: Group, ranks: Collection[int]) -> Group:
        """The group of those members of a group that are in `ranks`, which include this one.

        Args:
            group: A group of this rank.
            ranks: Ranks of the world.

        Raises:
            ValueError: The engine does not support this group.
        """
        kept = tuple(rank for rank in group.ranks if rank in ranks)
        if kept == group.ranks:
            return group
        # A group of mesh axes keeps its axes.
        for count in range(len(group.axes)):
            for axes in itertools.combinations(group.axes, count):
                if self.mesh.group(*axes) == kept:
                    return self.group(*axes) if axes else self._group_of(kept, "alone")
        return self._group_of(kept, f"{group.label}-part")

    def _group_of(self, ranks: tuple[int, ...], label: str, axes: tuple[str, ...] = ()) -> Group:
        if (ranks, axes) not in self._groups:
            if len(ranks) > 1:
                self._check_group(ranks)
            if len(ranks) == self.size:
                label = "world"
            self._groups[ranks, axes] = Group(ranks, label, self, axes)
        return self._groups[ranks, axes]

    def _check_group(self, ranks: tuple[int, ...]) -> None:
        """Raises ValueError if the engine does not support a group of these ranks."""

    @abc.abstractmethod
    def all_reduce(self, tensor: tf.Tensor, group: Group, reduction: str, name: str) -> tf.Tensor:
        """The sum, mean, max or min over the group; the shape is the same on all members."""

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """Concatenates the members' tensors, which have the same shape, along dim 0."""

    @abc.abstractmethod
    def all_gather_uneven(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """As `all_gather`, but the members' sizes of dim 0 may differ."""

    @abc.abstractmethod
    def reduce_scatter(
        self, tensor: tf.Tensor, group: Group, reduction: str, name: str
    ) -> tf.Tensor:
        """This member's equal share, along dim 0, of the reduced tensor."""

    @abc.abstractmethod
    def all_to_all(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """Sends the i-th equal share along dim 0 to member i; returns the received ones in order."""

    @abc.abstractmethod
    def all_to_all_uneven(
        self, tensor: tf.Tensor, splits: tf.Tensor, group: Group, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """As `all_to_all`, with `splits[i]` rows (int32) for member i.

        Returns:
            The received rows, and the number of rows from each member.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root: int, group: Group, name: str) -> tf.Tensor:
        """The tensor of member `root`; the others pass one of the same shape."""

    @property
    def lane(self) -> str:
        """The name of the transport, for reports of times."""
        return self.name

    def host_address(self) -> str:
        """An address of this machine that the other ranks can reach."""
        return "127.0.0.1"

    def send(self, tensor: tf.Tensor, to: int, name: str) -> tf.Tensor:
        """Sends a vector to the rank `to` of the world, which calls `receive` with the same name.

        Returns:
            The vector, once it has been handed to the transport.
        """
        pair = self.pair(to)
        return self.broadcast(tensor, pair.rank, pair, name)

    def receive(self, after: tf.Tensor, size, dtype: tf.DType, source: int, name: str) -> tf.Tensor:
        """The vector that the rank `source` of the world sends under this name.

        Args:
            after: A tensor for which the operation waits.
            size: The number of elements: an int, or an int32 scalar if it is unknown in the graph.
            dtype: The dtype.
            source: The sender.
            name: The name.
        """
        pair = self.pair(source)
        with tf.control_dependencies([after]):
            like = tf.zeros([size], dtype)
        return self.broadcast(like, 1 - pair.rank, pair, name)

    def begin_run(self, run: int) -> None:
        """Called by all ranks between two steps; discards the messages of failed steps.

        Args:
            run: The number of the run, larger than all previous ones.
        """
        Engine.run = run

    def uses_host(self, operation: str, dtype: tf.DType) -> bool:
        """Whether an operation has its tensors in the memory of the host on a rank with a GPU.

        The answer must be the same on all ranks.

        Args:
            operation: The method, such as "all_reduce".
            dtype: The dtype of the tensor.
        """
        return devices.stays_on_host(dtype)

    def transport(self, group: Group, *, reduces: bool = False, on_host: bool = False) -> Engine:
        """The engine that executes an operation: this one, or one that it wraps.

        Args:
            group: The group.
            reduces: Whether the operation is an all-reduce.
            on_host: Whether the rank has a GPU, and the tensors are in the memory of the host.
        """
        return self

    def at_shutdown(self, call: Callable[[], None]) -> None:
        """Registers a function that `shutdown` calls first, while the engine still works."""
        self._at_shutdown.append(call)

    def shutdown(self) -> None:
        """Leaves the world. Other ranks may still be running."""
        while self._at_shutdown:
            self._at_shutdown.pop()()


def reduce_locally(stacked: tf.Tensor, reduction: str) -> tf.Tensor:
    """Reduces dim 0 of `stacked`, which has one slice per member."""
    return getattr(tf, f"reduce_{reduction}")(stacked, axis=0)


def shape_of(tensor: tf.Tensor) -> list:
    """The sizes of a tensor's dims: ints if they are known, else int32 scalars."""
    if tensor.shape.is_fully_defined():
        return tensor.shape.as_list()
    sizes = tf.shape(tensor)
    return [sizes[dim] if size is None else size for dim, size in enumerate(tensor.shape)]


def split_rows(tensor: tf.Tensor, parts: int) -> tf.Tensor:
    """Reshapes [parts * n, ...] to [parts, n, ...]."""
    rows, *inner = shape_of(tensor)
    return tf.reshape(tensor, [parts, rows // parts, *inner])
