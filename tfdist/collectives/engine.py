"""What an engine must be able to do: the plain operations under `tfdist.collectives`."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import tensorflow as tf

from tfdist.collectives.flight_recorder import FlightRecorder
from tfdist.collectives.group import Group
from tfdist.mesh import Mesh

REDUCTIONS = ("sum", "mean", "max", "min")


class Engine(abc.ABC):
    """Moves and reduces tensors among the ranks of a mesh.

    An engine implements the seven methods below for tensors of rank one or more whose dtype it
    lists; `tfdist.collectives.operations` adds dtypes, scalars, other dims, gradients, names and
    the flight recorder. All members of a group call the same operation with the same name.

    Attributes:
        mesh: The resolved mesh.
        recorder: What is known of operations under way.
    """

    #: The engine's name in messages.
    name: str = "engine"
    #: Whether the same numbers on the same ranks always have the same sum, bit for bit.
    is_deterministic: bool = True
    #: For dtypes that the engine cannot add or compare: the dtype that it does it in instead.
    reduce_as: Mapping[tf.DType, tf.DType] = {}
    #: For dtypes that the engine cannot move: a dtype of the same width whose bits it moves, or
    #: a wider one that holds every value.
    move_as: Mapping[tf.DType, tf.DType] = {}
    #: Whether TensorFlow sends also where nobody uses what `send` returns.
    sends_unused: bool = False

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.recorder = FlightRecorder()
        #: Which call of `fit`, `evaluate` or `predict` is under way, as all ranks count.
        self.run = 0
        self._groups: dict[tuple, Group] = {}
        #: Asked for by each call of a layer and for each variable, so that it is not worked out anew.
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
        """The group of this rank along the given mesh axes; without an axis, the world."""
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
            raise ValueError(f"A rank does not send to itself. Received: other={other}.")
        low, high = sorted((self.rank, other))
        return self._group_of((low, high), label=f"pair{low}-{high}")

    def subgroup(self, group: Group, ranks: Collection[int]) -> Group:
        """Those of a group's members that are among some ranks, this one among them.

        Args:
            group: A group of this rank.
            ranks: Ranks of the world.

        Raises:
            ValueError: The engine carries no such group.
        """
        kept = tuple(rank for rank in group.ranks if rank in ranks)
        if kept == group.ranks:
            return group
        # A group that the mesh makes keeps its axes.
        for axes in self._axes_within(group.axes):
            if self.mesh.group(*axes) == kept:
                return self.group(*axes) if axes else self._group_of(kept, "alone")
        return self._group_of(kept, f"{group.label}-part")

    def _axes_within(self, axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for count in range(len(axes)):
            yield from itertools.combinations(axes, count)

    def _group_of(self, ranks: tuple[int, ...], label: str, axes: tuple[str, ...] = ()) -> Group:
        if (ranks, axes) not in self._groups:
            if len(ranks) > 1:
                self._check_group(ranks)
            if len(ranks) == self.size:
                label = "world"
            self._groups[ranks, axes] = Group(ranks, label, self, axes)
        return self._groups[ranks, axes]

    def _check_group(self, ranks: tuple[int, ...]) -> None:
        """Raises ValueError where the engine cannot carry a group of these ranks."""

    @abc.abstractmethod
    def all_reduce(self, tensor: tf.Tensor, group: Group, reduction: str, name: str) -> tf.Tensor:
        """The sum, mean, max or min over the group; one shape on all members."""

    @abc.abstractmethod
    def all_gather(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """All members' tensors, of one shape, one after the other along dim 0."""

    @abc.abstractmethod
    def all_gather_uneven(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """As `all_gather`, where members differ in dim 0."""

    @abc.abstractmethod
    def reduce_scatter(
        self, tensor: tf.Tensor, group: Group, reduction: str, name: str
    ) -> tf.Tensor:
        """This member's equal share, along dim 0, of the reduced tensor."""

    @abc.abstractmethod
    def all_to_all(self, tensor: tf.Tensor, group: Group, name: str) -> tf.Tensor:
        """Sends the i-th equal share along dim 0 to member i; what came, in member order."""

    @abc.abstractmethod
    def all_to_all_uneven(
        self, tensor: tf.Tensor, splits: tf.Tensor, group: Group, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """As `all_to_all` with `splits[i]` rows (int32) for member i; also the rows received."""

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root: int, group: Group, name: str) -> tf.Tensor:
        """The tensor of member `root`; the others pass one of the same shape."""

    @property
    def lane(self) -> str:
        """What carries its operations, where times are shown."""
        return self.name

    def host_address(self) -> str:
        """An address of this machine that the other ranks reach."""
        return "127.0.0.1"

    def send(self, tensor: tf.Tensor, to: int, name: str) -> tf.Tensor:
        """Sends a vector to the rank `to` of the world, which calls `receive` with the same name.

        Returns:
            The vector, once it is on its way.
        """
        pair = self.pair(to)
        return self.broadcast(tensor, pair.rank, pair, name)

    def receive(self, after: tf.Tensor, size, dtype: tf.DType, source: int, name: str) -> tf.Tensor:
        """The vector that the rank `source` of the world sends under this name.

        Args:
            after: A tensor that the operation waits for.
            size: The number of elements: an int, or an int32 scalar where only the run knows.
            dtype: The dtype.
            source: The sender.
            name: The name.
        """
        pair = self.pair(source)
        with tf.control_dependencies([after]):
            like = tf.zeros([size], dtype)
        return self.broadcast(like, 1 - pair.rank, pair, name)

    def begin_run(self, run: int) -> None:
        """Called by all ranks between two steps: what a step that failed has left behind is void.

        Args:
            run: The number of the run, larger than that of any before.
        """
        self.run = run

    def transport(self, group: Group, *, reduces: bool = False) -> Engine:
        """Which engine carries an operation: this one, or one that it wraps.

        Args:
            group: The group.
            reduces: Whether the operation is an all-reduce.
        """
        return self

    def at_shutdown(self, call: Callable[[], None]) -> None:
        """Has `shutdown` call this first, while the engine still works."""
        self._at_shutdown.append(call)

    def shutdown(self) -> None:
        """Leaves the world. Other ranks may still be at work."""
        while self._at_shutdown:
            self._at_shutdown.pop()()


def reduce_locally(stacked: tf.Tensor, reduction: str) -> tf.Tensor:
    """Reduces dim 0 of `stacked`, one slice a member."""
    reducers: Mapping[str, Callable] = {
        "sum": tf.reduce_sum,
        "mean": tf.reduce_mean,
        "max": tf.reduce_max,
        "min": tf.reduce_min,
    }
    return reducers[reduction](stacked, axis=0)


def split_rows(tensor: tf.Tensor, parts: int) -> tf.Tensor:
    """Reshapes [parts * n, ...] to [parts, n, ...]."""
    shape = tensor.shape
    rows = None if shape[0] is None else shape[0] // parts
    inner: Sequence = shape[1:]
    if rows is not None and shape[1:].is_fully_defined():
        return tf.reshape(tensor, [parts, rows, *inner])
    dynamic = tf.shape(tensor)
    reshaped = tf.reshape(tensor, tf.concat([[parts, dynamic[0] // parts], dynamic[1:]], 0))
    reshaped.set_shape([parts, rows, *inner])
    return reshaped
