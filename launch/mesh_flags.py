"""The flags of `tfdist-train` that lay the ranks out: the mesh, and the pipeline's schedule."""

from __future__ import annotations

import dataclasses

from tfdist.launch.flag_values import MOST_RANKS, UsageError, as_given, refuse, refuse_ignored
from tfdist.launch.tasks import DEFINE, VALUES
from tfdist.mesh import DEFAULT_ORDER, Mesh
from tfdist.pipeline.schedules import SCHEDULES, check_schedule

__all__ = ["MESH", "ZERO", "Layout", "chosen_layout"]

_DATA = DEFINE.integer(
    "data",
    -1,
    "Ranks of the data axis; -1: all that remain",
    lower_bound=-1,
    upper_bound=MOST_RANKS,
)
_TENSOR = DEFINE.integer(
    "tensor",
    1,
    "Ranks of the tensor axis, which split layers",
    lower_bound=1,
    upper_bound=MOST_RANKS,
)
_PIPELINE = DEFINE.integer(
    "pipeline",
    1,
    "Ranks of the pipeline axis, which hold the stages",
    lower_bound=1,
    upper_bound=MOST_RANKS,
)
_ORDER = DEFINE.list(
    "mesh_order", list(DEFAULT_ORDER), "Mesh axes, the one with the farthest ranks first"
)
_MICROBATCHES = DEFINE.integer(
    "num_microbatches", None, "Micro-batches of a pipeline [4 per stage]", lower_bound=1
)
_SCHEDULE = DEFINE.enum("schedule", "1f1b", list(SCHEDULES), "Pipeline schedule")
_CHUNKS = DEFINE.integer("chunks", None, "Stages per rank, for interleaved [2]", lower_bound=1)
ZERO = DEFINE.integer(
    "zero_stage",
    0,
    "Shards: 1 optimizer state, 2 gradients, 3 parameters",
    lower_bound=0,
    upper_bound=3,
)

MESH = (_DATA, _TENSOR, _PIPELINE, _ORDER, _MICROBATCHES, _SCHEDULE, _CHUNKS)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the ranks are laid out.

    Attributes:
        mesh: The mesh, not yet resolved.
        num_microbatches: Into how many parts a rank's rows are cut; 1 without a pipeline.
        schedule: The name of the pipeline's schedule.
        chunks: How many stages a rank has, or None.
        zero_stage: What the ranks of the data axis share.
    """

    mesh: Mesh
    num_microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    zero_stage: int = 0

    @property
    def pipeline(self) -> int:
        """The size of the pipeline axis."""
        return self.mesh.shape["pipeline"]

    @property
    def tensor(self) -> int:
        """The size of the tensor axis."""
        return self.mesh.shape["tensor"]

    def batch_size(self, given: int | None, default: int, data: int) -> int:
        """The samples of a step, over all ranks; in a pipeline they divide into micro-batches.

        `default` is rounded up so that it divides; what the user has given is refused if it does not.
        """
        parts = data * self.num_microbatches if self.pipeline > 1 else 1
        if given is None:
            return -(-default // parts) * parts
        if given % parts:
            raise UsageError(
                f"--batch_size must be a multiple of the data axis times --num_microbatches. Received: "
                f"--batch_size={given}, data={data}, num_microbatches={self.num_microbatches}."
            )
        return given


def chosen_layout() -> Layout:
    """What the flags say; a `UsageError` where they do not go together."""
    if _PIPELINE.value == 1:
        refuse_ignored(
            VALUES, (_MICROBATCHES, _SCHEDULE, _CHUNKS), "is for a pipeline", "--pipeline=1"
        )
    if _DATA.value != -1 and _DATA.value < 1:
        raise refuse("data", _DATA.value, "at least 1, or -1 for all that remain")
    microbatches = _MICROBATCHES.value or (4 * _PIPELINE.value if _PIPELINE.value > 1 else 1)
    try:
        mesh = Mesh(
            data=_DATA.value,
            pipeline=_PIPELINE.value,
            tensor=_TENSOR.value,
            order=tuple(_ORDER.value),
        )
        check_schedule(_SCHEDULE.value, _PIPELINE.value, microbatches, _CHUNKS.value)
    except ValueError as error:
        raise UsageError(f"{as_given(VALUES, MESH)}: {error}") from error
    return Layout(
        mesh,
        num_microbatches=microbatches,
        schedule=_SCHEDULE.value,
        chunks=_CHUNKS.value,
        zero_stage=ZERO.value,
    )
