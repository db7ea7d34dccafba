"""The options of all strategies, checked before the ranks meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.collectives.engine import Engine
from tfdist.gradients.stage import GradientStage, Position
from tfdist.mesh import Mesh
from tfdist.utils import checks

if TYPE_CHECKING:
    from tfdist.step.shares import MeasuredShares

#: More than the memory of any rank, and small enough for byte counts in an int64.
_MOST_BUCKET_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of `HorovodStrategy`, `MultiWorkerStrategy`, `LocalStrategy` and `auto`.

    Attributes:
        zero_stage: ZeRO stage: 0 replicates everything; 1 shards the optimizer's state over the data
            parallel ranks; 2 also gradients; 3 also parameters. See docs/memory.md.
        bucket_mib: MiB of gradients that are sent as one tensor; None for 4, or 64 on GPUs. `tfdist-bench
            buckets` measures the best size for a network.
        communication_dtype: "bfloat16" or "float16": gradients of wider dtypes are sent in this dtype, with
            half the bytes and a rounding error. None for their own dtype, as exact as one process.
        compression: A compressor of gradients between the data parallel ranks for slow links, such as
            `tfdist.addons.slow_links.PowerSGD(rank=4)`. See tfdist/addons/slow_links/README.md.
        gradient_stages: Stages that change, measure or reduce gradients, in this order, before
            `compression`: see `tfdist.extend.GradientStage`.
        batch_shares: If ranks are not equally fast: a number for each rank with different rows, such as
            [3, 1], "measured" for shares that follow the measured speeds, or a `MeasuredShares`. Batches and
            results stay those of one process. See tfdist/addons/unequal_ranks/README.md.
        watchdog_seconds: The seconds after which a rank that is missing at a collective, or frozen, ends the
            job; 0 for never. A rank that dies ends it immediately. The default is longer than normal pauses
            between two collectives, for loading data, tracing and saving.
        deterministic: Whether the same program on the same mesh and number of hosts gives bitwise identical
            numbers. TensorFlow's engine always adds up in the same order; Horovod does without fusion, which
            this disables. For determinism inside a rank on a GPU, also call
            `tf.config.experimental.enable_op_determinism()`.

    Raises:
        ValueError: A value is out of its range.
        TypeError: A value has another type.
    """

    zero_stage: int = 0
    bucket_mib: float | None = None
    communication_dtype: str | None = None
    compression: GradientStage | None = None
    gradient_stages: Sequence[GradientStage] = ()
    batch_shares: str | MeasuredShares | Sequence[float] | None = None
    watchdog_seconds: float = 600.0
    deterministic: bool = False

    def __post_init__(self):
        checks.integer("zero_stage", self.zero_stage, minimum=0, maximum=3)
        most = _MOST_BUCKET_MIB
        checks.number("bucket_mib", self.bucket_mib, above=0, maximum=most, optional=True)
        dtypes = ("bfloat16", "float16")
        checks.one_of("communication_dtype", self.communication_dtype, dtypes, optional=True)
        compressor = self.compression
        is_stage = isinstance(compressor, GradientStage)
        if compressor is not None and not (is_stage and compressor.position is Position.REDUCE):
            meaning = "a Compressor, such as those of tfdist.addons.slow_links"
            raise checks.refuse("compression", compressor, meaning, TypeError)
        stages = self.gradient_stages
        is_list = isinstance(stages, Sequence) and not isinstance(stages, str | bytes)
        if not is_list or not all(isinstance(each, GradientStage) for each in stages):
            meaning = "a sequence of tfdist.extend.GradientStage"
            raise checks.refuse("gradient_stages", stages, meaning, TypeError)
        reducing = [stage for stage in self.stages if stage.position is Position.REDUCE]
        if reducing and self.zero_stage == 3:
            raise ValueError(
                "Compression, and other stages that reduce gradients, are not supported with zero_stage=3, which "
                f"reduces them layer by layer. Received: zero_stage=3, {reducing[0]!r}. Use zero_stage=2."
            )
        most = checks.YEAR_SECONDS
        checks.number("watchdog_seconds", self.watchdog_seconds, minimum=0, maximum=most)
        if self.batch_shares is not None:
            from tfdist.step.shares import check_batch_shares

            check_batch_shares(self.batch_shares)
        checks.boolean("deterministic", self.deterministic)

    @property
    def stages(self) -> list[GradientStage]:
        """All stages of gradients; the compressor is the last."""
        return [*self.gradient_stages, *([] if self.compression is None else [self.compression])]


def checked_options(
    mesh: Mesh | None, engine: Engine | None, options: Mapping[str, Any]
) -> StrategyOptions:
    """The options of a strategy, after a check of all its arguments.

    Args:
        mesh: The mesh, for a new engine.
        engine: A running engine.
        options: The other arguments.

    Raises:
        ValueError: A value is out of its range.
        TypeError: An argument has another type, or is unknown.
    """
    checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
    checks.instance("engine", engine, Engine, "an Engine of tfdist.collectives", optional=True)
    if mesh is not None and engine is not None:
        raise ValueError(
            f"`mesh` is not supported together with `engine`, which has a mesh. Received: mesh={mesh!r}."
        )
    return StrategyOptions(**options)
