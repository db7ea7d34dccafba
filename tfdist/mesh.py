"""The device mesh: the number of ranks on each parallel axis, and the groups of ranks. Pure Python."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from tfdist.utils import checks

__all__ = ["AXES", "Axis", "Mesh"]

_DIVIDES = ("rows", "tokens", "layers", "weights")


@dataclasses.dataclass(frozen=True)
class Axis:
    """A mesh axis, and the dimension of the training that its ranks partition.

    The role of a rank follows from what its axes partition, not from their names:

    - "rows": each rank has different rows of the batch. The gradients of a replicated variable are
      summed over the ranks.
    - "tokens": each rank has the same rows, but different positions of the sequence. Gradients are
      summed too.
    - "layers": each rank has different layers, such as the stages of a pipeline.
    - "weights": each rank has the same rows and tokens; layers that support the axis hold slices of
      their weights.

    Attributes:
        name: The name of the axis.
        divides: "rows", "tokens", "layers" or "weights".

    Raises:
        ValueError: `name` is not an identifier, or `divides` is unknown.
    """

    name: str
    divides: Literal["rows", "tokens", "layers", "weights"]

    def __post_init__(self):
        checks.text("name", self.name)
        if not self.name.isidentifier():
            raise checks.refuse("name", self.name, "a name of letters, digits and underscores")
        checks.one_of("divides", self.divides, _DIVIDES)


#: The axis whose ranks have different rows and different experts.
_EXPERT = "expert"

_STANDARD = (
    Axis("data", "rows"),
    Axis(_EXPERT, "rows"),
    Axis("context", "tokens"),
    Axis("pipeline", "layers"),
    Axis("tensor", "weights"),
)

#: The names of the axes of every mesh, in the order of the constructor's arguments.
AXES = tuple(axis.name for axis in _STANDARD)

#: Slowest axis first. Tensor parallel ranks communicate most, so they are neighbors (inside a
#: host); pipeline stages communicate least, so they are farthest apart. Custom axes come before
#: the tensor axis.
DEFAULT_ORDER = ("pipeline", "data", "expert", "context", "tensor")


class Mesh:
    """The degree of each kind of parallelism, and the resulting groups of ranks.

    A mesh is defined before the number of processes is known; the strategy resolves it after the
    rendezvous of the ranks:

    ```pycon
    >>> mesh = Mesh(data=-1, tensor=2).resolve(size=8, rank=5)
    >>> mesh.shape
    {'data': 4, 'expert': 1, 'context': 1, 'pipeline': 1, 'tensor': 2}
    >>> mesh.coordinates()
    {'data': 2, 'expert': 0, 'context': 0, 'pipeline': 0, 'tensor': 1}
    >>> mesh.group("data")
    (1, 3, 5, 7)
    ```

    Args:
        data: Ranks on the data axis; each holds the whole model and a share of every batch.
            -1 means that the degree is inferred from the world size and the other axes.
        expert: Ranks on the expert axis. For all layers but experts it extends the data axis: the
            rows of a batch are split over both. -1 as above.
        context: Ranks on the context axis, a share of every sequence each; -1 as above.
        pipeline: Ranks on the pipeline axis, one stage of layers each; -1 as above.
        tensor: Ranks on the tensor axis, a slice of every split layer each; -1 as above.
        axes: Custom axes, and their degrees.
        order: The axes from the one whose neighbors are farthest apart in rank to the one whose
            neighbors are adjacent. Axes of degree 1 may be omitted.

    Raises:
        ValueError: A degree is neither -1 nor positive, two axes are -1 or have the same name, or
            `order` does not name each axis once.
    """

    def __init__(
        self,
        data: int = -1,
        expert: int = 1,
        context: int = 1,
        pipeline: int = 1,
        tensor: int = 1,
        *,
        axes: Mapping[Axis, int] | None = None,
        order: Sequence[str] | None = None,
    ):
        own = _own_axes(axes)
        self._axes = {axis.name: axis for axis in (*_STANDARD, *own)}
        given = (data, expert, context, pipeline, tensor, *own.values())
        self._degrees = {
            axis: _degree(axis, degree) for axis, degree in zip(self._axes, given, strict=True)
        }
        free = [axis for axis, degree in self._degrees.items() if degree == -1]
        if len(free) > 1:
            raise ValueError(
                "At most one mesh axis can be -1 (inferred from the world size). Received: "
                f"{', '.join(f'{axis}=-1' for axis in free)}."
            )
        self._order = self._ordered(order)
        self._rank: int | None = None

    def resolve(self, size: int, rank: int) -> Mesh:
        """Returns this mesh for rank `rank` of a world of `size` ranks, with the -1 inferred.

        Raises:
            ValueError: The degrees do not multiply to `size`, or `rank` is not in the world.
        """
        size = checks.integer("size", size, minimum=1)
        rank = checks.integer("rank", rank, minimum=0, maximum=size - 1)
        fixed = math.prod(degree for degree in self._degrees.values() if degree != -1)
        degrees = {
            axis: max(size // fixed, 1) if degree == -1 else degree
            for axis, degree in self._degrees.items()
        }
        if math.prod(degrees.values()) != size:
            raise ValueError(self._does_not_fill(size, fixed))
        own = {axis: degrees.pop(name) for name, axis in self._axes.items() if name not in AXES}
        resolved = Mesh(**degrees, axes=own, order=self._order)
        resolved._rank = rank
        return resolved

    @property
    def is_resolved(self) -> bool:
        """Whether the size of the world and the rank of this process are known."""
        return self._rank is not None

    @property
    def shape(self) -> dict[str, int]:
        """The degree of each axis; -1 is an inferred one, until the mesh is resolved."""
        return dict(self._degrees)

    @property
    def order(self) -> tuple[str, ...]:
        """The axes, slowest first."""
        return self._order

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have different rows of a batch."""
        return self._that_divide("rows")

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which each rank has a model replica: `row_axes` without the expert axis."""
        return tuple(axis for axis in self.row_axes if axis != _EXPERT)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have different positions of the same sequences."""
        return self._that_divide("tokens")

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have different layers."""
        return self._that_divide("layers")

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """The axes whose ranks process the same data with different slices of weights."""
        return self._that_divide("weights")

    @property
    def message_axes(self) -> tuple[str, ...]:
        """The axes with point-to-point messages: between stages, and between the ranks of a ring."""
        return self._that_divide("layers", "tokens")

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The axes over which the gradients of a replicated variable are summed."""
        return self._that_divide("rows", "tokens")

    @property
    def size(self) -> int:
        """The number of ranks in the world."""
        self._require_resolved("size")
        return math.prod(self._degrees.values())

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self._require_resolved("rank")

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The index of `rank` (default: this process) on each axis."""
        own = self._require_resolved("coordinates")
        rank = checks.integer("rank", rank, minimum=0, maximum=self.size - 1, optional=True)
        rest, found = own if rank is None else rank, {}
        for axis in reversed(self._order):
            rest, found[axis] = divmod(rest, self._degrees[axis])
        return {axis: found[axis] for axis in self._axes}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given coordinates; on axes that are not named, those of this rank."""
        checks.instance("coordinates", coordinates, Mapping, "a dict from axes to indices on them")
        place = {**self.coordinates(), **coordinates}
        self._check_axes(coordinates)
        rank = 0
        for axis in self._order:
            degree = self._degrees[axis]
            rank = rank * degree + checks.integer(axis, place[axis], minimum=0, maximum=degree - 1)
        return rank

    def group(self, *axes: str, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from `rank` (default: this process) on the given axes only.

        Without an axis the group is the rank alone, with all axes it is the world. The ranks are in
        ascending order, which along one axis is the order of its coordinates.
        """
        self._check_axes(axes)
        own = self.coordinates(rank)
        spans = [range(n) if axis in axes else (own[axis],) for axis, n in self._degrees.items()]
        places = (
            dict(zip(self._degrees, place, strict=True)) for place in itertools.product(*spans)
        )
        return tuple(sorted(map(self.rank_at, places)))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups along the given axes: a partition of the world, by ascending first rank."""
        return sorted({self.group(*axes, rank=rank) for rank in range(self.size)})

    def _that_divide(self, *what: str) -> tuple[str, ...]:
        return tuple(name for name, axis in self._axes.items() if axis.divides in what)

    def _ordered(self, order: Sequence[str] | None) -> tuple[str, ...]:
        """All axes, slowest first."""
        if order is None:
            own = [name for name in self._axes if name not in AXES]
            return (*DEFAULT_ORDER[:-1], *own, DEFAULT_ORDER[-1])
        is_list = isinstance(order, list | tuple) and all(isinstance(name, str) for name in order)
        named = list(order) if is_list else []
        single = [axis for axis, n in self._degrees.items() if n == 1 and axis not in named]
        if not is_list or sorted([*named, *single]) != sorted(self._axes):
            raise checks.refuse(
                "order",
                order,
                f"a list that names each of {tuple(self._axes)} once, slowest first; those of "
                "degree 1 may be omitted",
            )
        return (*single, *named)

    def _does_not_fill(self, size: int, fixed: int) -> str:
        """The message for a world of `size` ranks, with the sizes that would be correct."""
        free = [axis for axis, degree in self._degrees.items() if degree == -1]
        named = [f"{axis} {n}" for axis, n in self._degrees.items() if n not in (-1, 1)]
        product = " x ".join(named or ["data 1"])
        what, right = f"{product} is {fixed} {_ranks(fixed)}", [fixed]
        if free:
            what = f"{product} requires a multiple of {fixed} ranks, the rest is {free[0]}"
            below = size // fixed * fixed
            right = [below, below + fixed] if below else [fixed]
        start = f"{' or '.join(map(str, right))} {_ranks(right[-1])}"
        return (
            f"The mesh does not fill the world: {what}, but {size} "
            f"{'was' if size == 1 else 'were'} started. Start {start}, or change the mesh."
        )

    def __repr__(self) -> str:
        shown = {axis: n for axis, n in self._degrees.items() if n != 1 or axis == AXES[0]}
        degrees = ", ".join(f"{axis}={degree}" for axis, degree in shown.items())
        place = f", rank={self._rank}" if self.is_resolved else ""
        return f"Mesh({degrees}{place})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        # The position of an axis of degree 1 makes no difference.
        order = [axis for axis in self._order if self._degrees[axis] != 1]
        degrees = {axis: self._degrees[name] for name, axis in self._axes.items()}
        return tuple(degrees.items()), tuple(order), self._rank

    def _require_resolved(self, what: str) -> int:
        """Returns this process's rank; raises if it is not known yet."""
        if self._rank is None:
            raise RuntimeError(
                f"`mesh.{what}` is not known before the rendezvous of the ranks. Read it from "
                "`strategy.mesh`, or call `mesh.resolve(size, rank)`."
            )
        return self._rank

    def _check_axes(self, axes: Iterable[str]) -> None:
        for axis in axes:
            if axis not in self._axes:
                raise ValueError(f"An axis must be one of {tuple(self._axes)}. Received: {axis!r}.")


def _own_axes(axes: Mapping[Axis, int] | None) -> dict[Axis, int]:
    """The custom axes, checked."""
    checks.instance("axes", axes, Mapping, "a dict from Axis to degree", optional=True)
    own = dict(axes or {})
    if not all(isinstance(axis, Axis) for axis in own):
        raise checks.refuse("axes", axes, "a dict from Axis to degree", TypeError)
    names = [axis.name for axis in (*_STANDARD, *own)]
    if len(set(names)) < len(names):
        raise checks.refuse("axes", axes, f"axes with names other than {AXES}, each once")
    return own


def _degree(axis: str, value: object) -> int:
    if isinstance(value, numbers.Integral) and value == -1:
        return -1
    return checks.integer(axis, value, minimum=1, also="-1 to infer it from the world size")


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"
