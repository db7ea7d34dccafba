"""The device mesh: how many ranks each parallel axis has, and which ranks form a group."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence

from tfdist import checks

__all__ = ["AXES", "Mesh"]

#: The axes of a mesh, in the order of the constructor's arguments.
AXES = ("data", "pipeline", "tensor")

#: Slowest axis first. Tensor parallel ranks talk most, so they are neighbours (inside a host);
#: pipeline stages talk least, so they are farthest apart.
DEFAULT_ORDER = ("pipeline", "data", "tensor")


class Mesh:
    """Degrees of data, pipeline and tensor parallelism, and the groups of ranks they make.

    A mesh is written down before anyone knows how many processes run; the strategy resolves it
    when the ranks have met:

    >>> mesh = Mesh(data=-1, tensor=2).resolve(size=8, rank=5)
    >>> mesh.shape
    {'data': 4, 'pipeline': 1, 'tensor': 2}
    >>> mesh.coordinates()
    {'data': 2, 'pipeline': 0, 'tensor': 1}
    >>> mesh.group("data")
    (1, 3, 5, 7)

    Args:
        data: Ranks on the data axis; each holds the whole model and a share of every batch.
            -1 takes what the other axes leave of the world.
        pipeline: Ranks on the pipeline axis, one stage of layers each; -1 as above.
        tensor: Ranks on the tensor axis, a slice of every split layer each; -1 as above.
        order: The axes from the one whose neighbours are farthest apart in rank to the one whose
            neighbours are adjacent.

    Raises:
        ValueError: A degree is neither -1 nor positive, two axes are -1, or `order` does not name
            each axis once.
    """

    def __init__(
        self,
        data: int = -1,
        pipeline: int = 1,
        tensor: int = 1,
        *,
        order: Sequence[str] = DEFAULT_ORDER,
    ):
        given = {"data": data, "pipeline": pipeline, "tensor": tensor}
        degrees = {axis: _degree(axis, degree) for axis, degree in given.items()}
        free = [axis for axis, degree in degrees.items() if degree == -1]
        if len(free) > 1:
            raise ValueError(
                f"Only one mesh axis can be -1 (what is left). Received: {', '.join(f'{a}=-1' for a in free)}."
            )
        if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(AXES):
            raise checks.refuse(
                "order", order, f"a list that names each of {AXES} once, slowest first"
            )
        self._degrees = degrees
        self._order = tuple(order)
        self._rank: int | None = None

    def resolve(self, size: int, rank: int) -> Mesh:
        """Returns this mesh filled in for a world of `size` ranks, as `rank` sees it.

        Raises:
            ValueError: The degrees do not multiply to `size`, or `rank` is not in the world.
        """
        size = checks.integer("size", size)
        rank = checks.integer("rank", rank)
        if not 0 <= rank < size:
            raise ValueError(f"A `rank` lies in [0, size). Received: rank={rank}, size={size}.")
        fixed = math.prod(degree for degree in self._degrees.values() if degree != -1)
        degrees = {
            axis: max(size // fixed, 1) if degree == -1 else degree
            for axis, degree in self._degrees.items()
        }
        if math.prod(degrees.values()) != size:
            raise ValueError(self._does_not_fill(size, fixed))
        resolved = Mesh(**degrees, order=self._order)
        resolved._rank = rank
        return resolved

    @property
    def is_resolved(self) -> bool:
        """Whether the mesh knows its world."""
        return self._rank is not None

    @property
    def shape(self) -> dict[str, int]:
        """The degree of each axis; -1 stands for what is left until the mesh is resolved."""
        return dict(self._degrees)

    @property
    def order(self) -> tuple[str, ...]:
        """The axes, slowest first."""
        return self._order

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
        self._require_resolved("coordinates")
        rank = checks.integer("rank", rank, optional=True)
        rest = self.rank if rank is None else rank
        if not 0 <= rest < self.size:
            raise ValueError(
                f"A `rank` of this mesh lies in [0, {self.size}). Received: rank={rank}."
            )
        found = {}
        for axis in reversed(self._order):
            rest, found[axis] = divmod(rest, self._degrees[axis])
        return {axis: found[axis] for axis in AXES}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given coordinates; axes that are not named take this rank's own."""
        checks.instance("coordinates", coordinates, Mapping, "a dict from axes to places on them")
        place = {**self.coordinates(), **coordinates}
        self._check_axes(coordinates)
        rank = 0
        for axis in self._order:
            checks.integer(axis, place[axis])
            if not 0 <= place[axis] < self._degrees[axis]:
                raise ValueError(
                    f"The {axis} axis has {self._degrees[axis]} ranks. Received: {axis}={place[axis]}."
                )
            rank = rank * self._degrees[axis] + place[axis]
        return rank

    def group(self, *axes: str, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from `rank` (default: this process) on the given axes only.

        With no axis the group is the rank alone, with all axes it is the world. The ranks come in
        ascending order, which along one axis is the order of its coordinates.
        """
        self._check_axes(axes)
        own = self.coordinates(rank)
        spans = [range(self._degrees[axis]) if axis in axes else (own[axis],) for axis in AXES]
        return tuple(
            sorted(
                self.rank_at(dict(zip(AXES, place, strict=True)))
                for place in itertools.product(*spans)
            )
        )

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups along the given axes: a partition of the world, by ascending first rank."""
        return sorted({self.group(*axes, rank=rank) for rank in range(self.size)})

    def _does_not_fill(self, size: int, fixed: int) -> str:
        """What is wrong with a world of `size` ranks, and which worlds would be right."""
        named = {axis: degree for axis, degree in self._degrees.items() if degree != -1}
        what = f"{_product(named)} is {fixed} {_ranks(fixed)}"
        right = [fixed]
        if len(named) < len(self._degrees):
            (free,) = self._degrees.keys() - named.keys()
            what = f"{_product(named)} takes a multiple of {fixed} ranks, the rest is {free}"
            below = size // fixed * fixed
            right = [below, below + fixed] if below else [fixed]
        start = f"{' or '.join(map(str, right))} {_ranks(right[-1])}"
        return (
            f"The mesh does not fill the world: {what}, but {size} "
            f"{'was' if size == 1 else 'were'} started. Start {start}, or change the mesh."
        )

    def __repr__(self) -> str:
        degrees = ", ".join(f"{axis}={degree}" for axis, degree in self._degrees.items())
        place = f", rank={self._rank}" if self.is_resolved else ""
        return f"Mesh({degrees}{place})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self._degrees, self._order, self._rank) == (
            other._degrees,
            other._order,
            other._rank,
        )

    def __hash__(self) -> int:
        return hash((tuple(self._degrees.items()), self._order, self._rank))

    def _require_resolved(self, what: str) -> int:
        """Returns this process's rank; raises where nobody knows it yet."""
        if self._rank is None:
            raise RuntimeError(
                f"`mesh.{what}` is known once the ranks have met: read it from `strategy.mesh`, "
                "or call `mesh.resolve(size, rank)`."
            )
        return self._rank

    def _check_axes(self, axes: Iterable[str]) -> None:
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"The axes of a mesh are {AXES}. Received: {axis!r}.")


def _degree(axis: str, value: object) -> int:
    if isinstance(value, numbers.Integral) and value == -1:
        return -1
    return checks.integer(axis, value, minimum=1, also="-1 for what the other axes leave")


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
