"""A group: ranks that communicate with each other, and their engine."""

from __future__ import annotations

import dataclasses
import typing

if typing.TYPE_CHECKING:
    from tfdist.collectives.engine import Engine


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective together; each passes its own copy.

    Attributes:
        ranks: Ranks in the world, ascending. A member's index in this tuple is its place in the
            group, to which `broadcast`, `send`, `recv` and all slices refer.
        label: The name of the group in the mesh, for names and messages: "data", "data+tensor".
        engine: The engine that executes its operations.
        axes: The mesh axes along which its ranks differ; () if the group is not one of the mesh.
    """

    ranks: tuple[int, ...]
    label: str
    engine: Engine = dataclasses.field(compare=False, repr=False)
    axes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self.ranks.index(self.engine.rank)
