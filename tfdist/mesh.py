"""The device mesh: how many ranks each parallel axis has, and which ranks form a group. Pure Python."""

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
    """A mesh axis, and what its ranks divide among them.

    What a rank does follows from what its axes divide, not from their names:

    - "rows": each rank has other rows of the batch. A variable that the ranks all hold gets the
      sum of their gradients.
    - "tokens": the same rows, each rank other positions of the sequence. Gradients are summed too.
    - "layers": each rank has other layers, as the stages of a pipeline.
    - "weights": the same rows and tokens; layers that know the axis hold slices of their weights.

    Attributes:
        name: Its name.
        divides: One of these.

    Raises:
        ValueError: `name` is no identifier, or `divides` is none of these.
    """

    name: str
    divides: Literal["rows", "tokens", "layers", "weights"]

    def __post_init__(self):
        checks.text("name", self.name)
        if not self.name.isidentifier():
            raise checks.refuse("name", self.name, "a name of letters, digits and underscores")
        checks.one_of("divides", self.divides, _DIVIDES)


#: Its ranks have different rows, and different experts.
_EXPERT = "expert"

_STANDARD = (
    Axis("data", "rows"),
    Axis(_EXPERT, "rows"),
    Axis("context", "tokens"),
    Axis("pipeline", "layers"),
    Axis("tensor", "weights"),
)

#: The names of the axes that each mesh has, in the order of the constructor's arguments.
AXES = tuple(axis.name for axis in _STANDARD)

#: Slowest axis first. Tensor parallel ranks communicate most, so they are neighbours (inside a
#: host); pipeline stages communicate least, so they are farthest apart. Axes of a user's own stand
#: before the tensor axis.
DEFAULT_ORDER = ("pipeline", "data", "expert", "context", "tensor")


class Mesh:
    """The degree of each kind of parallelism, and the groups of ranks that follow.

    A mesh is written down before anyone knows how many processes run; the strategy resolves it
    when the ranks have met:

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
            -1 takes what the other axes leave of the world.
        expert: Ranks on the expert axis. To all but experts it is more of the data axis: the rows
            of a batch are divided over both. -1 as above.
        context: Ranks on the context axis, a share of every sequence each; -1 as above.
        pipeline: Ranks on the pipeline axis, one stage of layers each; -1 as above.
        tensor: Ranks on the tensor axis, a slice of every split layer each; -1 as above.
        axes: Axes of the user's own, and their degrees.
        order: The axes from the one whose neighbours are farthest apart in rank to the one whose
            neighbours are adjacent. Axes of degree 1 may be left out.

    Raises:
        ValueError: A degree is neither -1 nor positive, two axes are -1, two have one name, or
            `order` names an axis twice or one that is not there, or lacks one.
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
                f"Only one mesh axis can be -1 (what is left). Received: {', '.join(f'{a}=-1' for a in free)}."
            )
        self._order = self._ordered(order)
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
        own = {axis: degrees.pop(name) for name, axis in self._axes.items() if name not in AXES}
        resolved = Mesh(**degrees, axes=own, order=self._order)
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
    def row_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have different rows of a batch."""
        return self._that_divide("rows")

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which each rank has a model of its own: those of rows, but for the experts'."""
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
        """The axes whose ranks compute the same, with slices of weights."""
        return self._that_divide("weights")

    @property
    def message_axes(self) -> tuple[str, ...]:
        """The axes along which a rank sends messages to single others: stages, and a ring's ranks."""
        return self._that_divide("layers", "tokens")

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The axes over which the gradients of a variable are summed that all ranks hold."""
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
        return {axis: found[axis] for axis in self._axes}

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
        spans = [range(n) if axis in axes else (own[axis],) for axis, n in self._degrees.items()]
        return tuple(
            sorted(
                self.rank_at(dict(zip(self._degrees, place, strict=True)))
                for place in itertools.product(*spans)
            )
        )

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
                "degree 1 may be left out",
            )
        return (*single, *named)

    def _does_not_fill(self, size: int, fixed: int) -> str:
        """What is wrong with a world of `size` ranks, and which worlds would be right."""
        named = {axis: degree for axis, degree in self._degrees.items() if degree != -1}
        factors = {axis: degree for axis, degree in named.items() if degree != 1} or {"data": 1}
        what = f"{_product(factors)} is {fixed} {_ranks(fixed)}"
        right = [fixed]
        if len(named) < len(self._degrees):
            (free,) = self._degrees.keys() - named.keys()
            what = f"{_product(factors)} takes a multiple of {fixed} ranks, the rest is {free}"
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
        # Where an axis of one rank stands makes no difference.
        order = [axis for axis in self._order if self._degrees[axis] != 1]
        degrees = {axis: self._degrees[name] for name, axis in self._axes.items()}
        return tuple(degrees.items()), tuple(order), self._rank

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
            if axis not in self._axes:
                raise ValueError(
                    f"The axes of this mesh are {tuple(self._axes)}. Received: {axis!r}."
                )


def _own_axes(axes: Mapping[Axis, int] | None) -> dict[Axis, int]:
    """The user's own axes, once they are known to be some."""
    checks.instance("axes", axes, Mapping, "a dict from Axis to degree", optional=True)
    own = dict(axes or {})
    if not all(isinstance(axis, Axis) for axis in own):
        raise checks.refuse("axes", axes, "a dict from Axis to degree", TypeError)
    names = [axis.name for axis in (*_STANDARD, *own)]
    if len(set(names)) < len(names):
        raise checks.refuse("axes", axes, f"axes of other names than {AXES}, each once")
    return own


def _degree(axis: str, value: object) -> int:
    if isinstance(value, numbers.Integral) and value == -1:
        return -1
    return checks.integer(axis, value, minimum=1, also="-1 for what the other axes leave")


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
