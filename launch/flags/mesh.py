"""The flags of the mesh and of the pipeline's schedule."""

from __future__ import annotations

import dataclasses

from tfdist.launch.flags.values import (
    MOST_RANKS,
    FlagDefiner,
    UsageError,
    as_given,
    refuse,
    refuse_ignored,
)
from tfdist.mesh import DEFAULT_ORDER, Mesh
from tfdist.pipeline.schedules import SCHEDULES, check_arguments


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a model over the ranks.

    Attributes:
        mesh: The mesh, not yet resolved.
        num_microbatches: Micro-batches that a rank's batch is split into; 1 without a pipeline.
        schedule: Name of the pipeline schedule.
        chunks: Stages per rank, or None for the default.
        cut: Partition into stages, as in `PipelineModel`.
        zero_stage: ZeRO stage.
    """

    mesh: Mesh
    num_microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    cut: str | tuple[int, ...] = "even"
    zero_stage: int = 0

    @property
    def pipeline(self) -> int:
        """Size of the pipeline axis."""
        return self.mesh.shape["pipeline"]

    @property
    def expert(self) -> int:
        """Size of the expert axis."""
        return self.mesh.shape["expert"]

    @property
    def tensor(self) -> int:
        """Size of the tensor axis."""
        return self.mesh.shape["tensor"]

    @property
    def context(self) -> int:
        """Size of the context axis."""
        return self.mesh.shape["context"]

    def batch_size(self, given: int | None, default: int, data: int) -> int:
        """The samples of a step over all ranks, which are a multiple of the micro-batches in a pipeline.

        Args:
            given: The user's value, or None.
            default: The default value, which is rounded up to a multiple.
            data: Size of the data axis.

        Raises:
            UsageError: `given` is not a multiple.
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


class MeshFlags:
    """The flags of a program for its mesh and pipeline.

    Args:
        define: The definer of the program's flags.

    Attributes:
        zero: The flag of the ZeRO stage.
        mesh: The other flags.
    """

    def __init__(self, define: FlagDefiner):
        self._values = define.values
        self._data = define.integer(
            "data",
            -1,
            "Ranks of the data axis; -1: inferred from the world size",
            lower_bound=-1,
            upper_bound=MOST_RANKS,
        )
        self._expert = define.integer(
            "expert",
            1,
            "Ranks of the expert axis, which split experts and rows",
            lower_bound=1,
            upper_bound=MOST_RANKS,
        )
        self._tensor = define.integer(
            "tensor",
            1,
            "Ranks of the tensor axis, which split layers",
            lower_bound=1,
            upper_bound=MOST_RANKS,
        )
        self._context = define.integer(
            "context",
            1,
            "Ranks of the context axis, which split sequences",
            lower_bound=1,
            upper_bound=MOST_RANKS,
        )
        self._pipeline = define.integer(
            "pipeline",
            1,
            "Ranks of the pipeline axis, which hold the stages",
            lower_bound=1,
            upper_bound=MOST_RANKS,
        )
        self._order = define.list(
            "mesh_order", list(DEFAULT_ORDER), "Mesh axes, slowest-varying first"
        )
        self._microbatches = define.integer(
            "num_microbatches", None, "Micro-batches of a pipeline [4 per stage]", lower_bound=1
        )
        self._schedule = define.enum("schedule", "1f1b", list(SCHEDULES), "Pipeline schedule")
        self._chunks = define.integer(
            "chunks", None, "Stages per rank, for interleaved [2]", lower_bound=1
        )
        self._cut = define.string(
            "cut", "even", "Pipeline stages: even, cyclic, or layers per stage, 3,4"
        )
        self.zero = define.integer(
            "zero_stage",
            0,
            "Shard: 1 optimizer state, 2 gradients, 3 parameters",
            lower_bound=0,
            upper_bound=3,
        )
        self._of_pipelines = (self._microbatches, self._schedule, self._chunks, self._cut)
        axes = (self._data, self._expert, self._tensor, self._context, self._pipeline)
        self.mesh = (*axes, self._order, *self._of_pipelines)

    def layout(self) -> Layout:
        """The layout of the flags.

        Raises:
            UsageError: Flags are incompatible.
        """
        data, pipeline = self._data.value, self._pipeline.value
        schedule, chunks = self._schedule.value, self._chunks.value
        if pipeline == 1:
            refuse_ignored(self._values, self._of_pipelines, "requires a pipeline", "--pipeline=1")
        if data != -1 and data < 1:
            raise refuse("data", data, "at least 1, or -1 to infer it from the world size")
        microbatches = self._microbatches.value or (4 * pipeline if pipeline > 1 else 1)
        order = tuple(self._order.value)
        try:
            mesh = Mesh(
                data=data,
                expert=self._expert.value,
                context=self._context.value,
                pipeline=pipeline,
                tensor=self._tensor.value,
                order=order,
            )
            check_arguments(schedule, pipeline, microbatches, chunks)
        except ValueError as error:
            given = as_given(self._values, self.mesh)
            raise UsageError(f"{given} is not supported: {error}") from error
        return Layout(
            mesh,
            num_microbatches=microbatches,
            schedule=schedule,
            chunks=chunks,
            cut=_cut(self._cut.value),
            zero_stage=self.zero.value,
        )


def _cut(text: str) -> str | tuple[int, ...]:
    """Parse the value of --cut."""
    if text in ("even", "cyclic"):
        return text
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise refuse(
            "cut", text, "even, cyclic, or the layers of each stage, such as 3,4"
        ) from None
