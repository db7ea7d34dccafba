"""The flags of the mesh and of the pipeline's schedule."""

from __future__ import annotations

import dataclasses

from tfdist.launch.flags.options import as_given, names, option, refuse_ignored
from tfdist.launch.flags.values import MOST_RANKS, UsageError, refuse
from tfdist.mesh import DEFAULT_ORDER, Mesh
from tfdist.pipeline.schedules import SCHEDULES, check_arguments

_OF_PIPELINES = ("num_microbatches", "schedule", "chunks", "cut")


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

    def batch_size(self, given: int | None, default: int, data: int, *, equal: bool = False) -> int:
        """The samples of a step over all ranks, which are a multiple of the micro-batches in a pipeline.

        Args:
            given: The user's value, or None.
            default: The default value, which is rounded up to a multiple.
            data: Size of the data axis.
            equal: Whether all ranks must have the same number of samples.

        Raises:
            UsageError: `given` is not a multiple.
        """
        parts = data * self.num_microbatches if self.pipeline > 1 or equal else 1
        if given is None:
            return -(-default // parts) * parts
        if given % parts:
            raise UsageError(
                f"--batch_size must be a multiple of the data axis times --num_microbatches. Received: "
                f"--batch_size={given}, data={data}, num_microbatches={self.num_microbatches}."
            )
        return given


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """The options of the mesh, of the pipeline, and the ZeRO stage; see the flags of the same names."""

    data: int = option(
        -1, "Ranks of the data axis; -1: inferred from the world size", least=-1, most=MOST_RANKS
    )
    expert: int = option(
        1, "Ranks of the expert axis, which split experts and rows", least=1, most=MOST_RANKS
    )
    tensor: int = option(
        1, "Ranks of the tensor axis, which split layers", least=1, most=MOST_RANKS
    )
    context: int = option(
        1, "Ranks of the context axis, which split sequences", least=1, most=MOST_RANKS
    )
    pipeline: int = option(
        1, "Ranks of the pipeline axis, which hold the stages", least=1, most=MOST_RANKS
    )
    mesh_order: tuple[str, ...] = option(DEFAULT_ORDER, "Mesh axes, slowest-varying first")
    num_microbatches: int | None = option(
        None, "Micro-batches of a pipeline [4 per stage]", least=1
    )
    schedule: str = option("1f1b", "Pipeline schedule", choices=SCHEDULES)
    chunks: int | None = option(None, "Stages per rank, for interleaved [2]", least=1)
    cut: str = option("even", "Pipeline stages: even, cyclic, or layers per stage, 3,4")
    zero_stage: int = option(
        0, "Shard: 1 optimizer state, 2 gradients, 3 parameters", least=0, most=3
    )

    def layout(self) -> Layout:
        """The layout of the options.

        Raises:
            UsageError: Options are incompatible.
        """
        pipeline = self.pipeline
        if pipeline == 1:
            refuse_ignored(self, _OF_PIPELINES, "requires a pipeline", "--pipeline=1")
        if not self.data:
            raise refuse("data", self.data, "at least 1, or -1 to infer it from the world size")
        microbatches = self.num_microbatches or (4 * pipeline if pipeline > 1 else 1)
        try:
            mesh = Mesh(
                data=self.data,
                expert=self.expert,
                context=self.context,
                pipeline=pipeline,
                tensor=self.tensor,
                order=self.mesh_order,
            )
            check_arguments(self.schedule, pipeline, microbatches, self.chunks)
        except ValueError as error:
            given = as_given(self, names(self, without=["zero_stage"]))
            raise UsageError(f"{given} is not supported: {error}") from error
        return Layout(
            mesh,
            num_microbatches=microbatches,
            schedule=self.schedule,
            chunks=self.chunks,
            cut=_cut(self.cut),
            zero_stage=self.zero_stage,
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
