"""The flags of `tfdist-train` that lay the ranks out: the mesh, and the pipeline's schedule."""

from __future__ import annotations

import dataclasses

from absl import flags

from tfdist.launch.flag_values import MOST_RANKS, UsageError, as_given, refuse
from tfdist.launch.tasks import VALUES
from tfdist.mesh import DEFAULT_ORDER, Mesh
from tfdist.pipeline.schedules import SCHEDULES, check_schedule

__all__ = ["MESH", "ZERO", "Layout", "chosen_layout"]

_DATA = flags.DEFINE_integer(
    "data",
    -1,
    "Ranks that share batches; -1: what the others leave",
    lower_bound=-1,
    upper_bound=MOST_RANKS,
    flag_values=VALUES,
)
_TENSOR = flags.DEFINE_integer(
    "tensor",
    1,
    "Ranks that share each layer",
    lower_bound=1,
    upper_bound=MOST_RANKS,
    flag_values=VALUES,
)
_PIPELINE = flags.DEFINE_integer(
    "pipeline",
    1,
    "Ranks that share the chain of layers",
    lower_bound=1,
    upper_bound=MOST_RANKS,
    flag_values=VALUES,
)
_ORDER = flags.DEFINE_list(
    "mesh_order",
    list(DEFAULT_ORDER),
    "Axes from the one whose ranks are farthest apart",
    flag_values=VALUES,
)
_MICROBATCHES = flags.DEFINE_integer(
    "num_microbatches",
    None,
    "Parts of a rank's rows in a pipeline [4 a stage]",
    lower_bound=1,
    flag_values=VALUES,
)
_SCHEDULE = flags.DEFINE_enum(
    "schedule", "1f1b", list(SCHEDULES), "Of the pipeline", flag_values=VALUES
)
_CHUNKS = flags.DEFINE_integer(
    "chunks", None, "Stages a rank, for interleaved [2]", lower_bound=1, flag_values=VALUES
)
ZERO = flags.DEFINE_integer(
    "zero_stage",
    0,
    "Ranks share: 1 optimizer state, 2 gradients, 3 parameters",
    lower_bound=0,
    upper_bound=3,
    flag_values=VALUES,
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

        Args:
            given: What the user asks for, or None.
            default: What it is otherwise, rounded up so that it divides.
            data: The size of the data axis.

        Raises:
            UsageError: What was given does not divide.
        """
        parts = data * self.num_microbatches if self.pipeline > 1 else 1
        if given is None:
            return -(-default // parts) * parts
        if given % parts:
            raise UsageError(
                f"--batch_size divides by the data axis times --num_microbatches. Received: "
                f"--batch_size={given}, data={data}, num_microbatches={self.num_microbatches}."
            )
        return given


def chosen_layout() -> Layout:
    """What the flags say.

    Raises:
        UsageError: They do not go together.
    """
    if _PIPELINE.value == 1:
        for flag in (_MICROBATCHES, _SCHEDULE, _CHUNKS):
            if flag.present:
                raise UsageError(f"--{flag.name} is for a pipeline. Received: --pipeline=1.")
    if _DATA.value != -1 and _DATA.value < 1:
        raise refuse("data", _DATA.value, "at least 1, or -1 for what the others leave")
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
