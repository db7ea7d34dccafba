"""`ParallelStrategy`: a mesh and an engine, as a `tf.distribute.Strategy` that Keras 3 can use."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf
from absl import logging

from tfdist.collectives import Group
from tfdist.collectives.engine import Engine
from tfdist.gradients.stage import GradientStage, Position
from tfdist.mesh import Mesh
from tfdist.runtime.plugins import load_plugins
from tfdist.step.context import DistributedStrategy, current_replica
from tfdist.step.gradient_options import BUCKET_BYTES, GradientOptions
from tfdist.step.hooks import FitHook
from tfdist.step.keras_step import KerasStep
from tfdist.step.local_steps import local_optimizer
from tfdist.strategies import keras_patches
from tfdist.strategies.extended import ParallelExtended
from tfdist.strategies.keras_patches.scopes import note_strategy
from tfdist.strategies.keras_patches.steps import count_rows
from tfdist.strategies.randomness import share_random_state
from tfdist.utils import checks
from tfdist.utils.lazy import require_addon
from tfdist.watchdog.watchdog import Watchdog, startup_guard

if TYPE_CHECKING:
    from tfdist.step.row_shares import RowShares
    from tfdist.step.shares import MeasuredShares

#: Longer than any sane pause between two collectives: loading data, tracing, saving.
WATCHDOG_SECONDS = 600.0

_MIB = 1 << 20
#: More than any rank has, and few enough for TensorFlow to count bytes in an int64.
_MOST_BUCKET_MIB = 1 << 20


class ParallelStrategy(DistributedStrategy):
    """One process per device; each runs the same program and holds plain tensors and variables.

    The base of `HorovodStrategy`, `MultiWorkerStrategy` and `LocalStrategy`, which differ only in
    the engine and in how the ranks meet.

    ```python
    strategy = tfdist.strategies.auto()
    with strategy.scope():
        model = keras.Sequential([...])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=256, epochs=3)  # 256 is the global batch
    ```

    Args:
        engine: What carries the collectives; it knows the mesh.
        zero_stage: ZeRO stage: 0 replicates everything; 1 shards the optimizer's state over the data
            parallel ranks; 2 also gradients; 3 also parameters. See docs/memory.md.
        bucket_mib: MiB of gradients that travel as one tensor. `tfdist-bench buckets` measures what
            suits a network.
        communication_dtype: "bfloat16" or "float16", for gradients of wider dtypes to travel in: half
            the bytes, and a rounding of each. None for their own, which is as exact as one process.
        compression: What compresses gradients between the data parallel ranks, as
            `tfdist.addons.slow_links.PowerSGD(rank=4)`, where the link is slow. See tfdist/addons/slow_links/README.md.
        gradient_stages: What changes, measures or reduces gradients, in this order, before `compression`:
            see `tfdist.extend.GradientStage`.
        batch_shares: Where ranks are not equally fast: a number for each rank that holds other rows, as
            [3, 1], or "measured" for shares that follow the measured speeds, or a `MeasuredShares`.
            Batches and results stay those of one process. See tfdist/addons/unequal_ranks/README.md.
        watchdog_seconds: After how long a rank that is missing at a collective, or frozen, ends
            the job; 0 for never. A rank that dies ends it at once.
        deterministic: Whether the same program on the same mesh and as many hosts gives the same
            numbers bit for bit. TensorFlow's engine always adds up in one order; Horovod does if it
            fuses nothing, which this asks of it. What happens inside a rank is TensorFlow's: on a GPU,
            call `tf.config.experimental.enable_op_determinism()`, too.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        zero_stage: int = 0,
        bucket_mib: float = BUCKET_BYTES / _MIB,
        communication_dtype: str | None = None,
        compression: GradientStage | None = None,
        gradient_stages: Sequence[GradientStage] = (),
        batch_shares: str | MeasuredShares | Sequence[float] | None = None,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        deterministic: bool = False,
    ):
        checks.instance("engine", engine, Engine, "an Engine of tfdist.collectives")
        check_options(
            None,
            engine,
            zero_stage=zero_stage,
            bucket_mib=bucket_mib,
            communication_dtype=communication_dtype,
            compression=compression,
            gradient_stages=gradient_stages,
            batch_shares=batch_shares,
            watchdog_seconds=watchdog_seconds,
            deterministic=deterministic,
        )
        load_plugins()
        if deterministic and not engine.is_deterministic:
            raise ValueError(
                "An engine that was made with `deterministic=False` cannot fix the order of its "
                "sums now. Received: deterministic=True and such an engine."
            )
        self._engine = engine
        self._gradient_options = GradientOptions(
            int(bucket_mib * _MIB),
            None if communication_dtype is None else tf.as_dtype(communication_dtype),
        )
        share_random_state(engine.group())
        super().__init__(ParallelExtended(self))
        self._add_stages([*gradient_stages, *([] if compression is None else [compression])])
        self._row_shares: RowShares | None = None
        if batch_shares is not None:
            from tfdist.step.row_shares import RowShares

            self._row_shares = RowShares(batch_shares, self.row_group.size)
        if self._row_shares is not None and self._row_shares.measured and engine.size > 1:
            balancing = require_addon("unequal_ranks", 'batch_shares="measured"').balancing
            self.fit_hooks.append(balancing.Balancing(self))
        # One rank has nothing to share.
        self._zero_stage = zero_stage if self.gradient_group.size > 1 else 0
        if self._zero_stage == 3:
            importlib.import_module("tfdist.zero.sharded_parameters")
        self._watchdog = None
        if watchdog_seconds and engine.size > 1:
            self._watchdog = Watchdog(engine, watchdog_seconds)
        keras_patches.install()
        note_strategy(self)

    def _add_stages(self, stages: Sequence[GradientStage]) -> None:
        self.gradient_stages.extend(stages)
        self.fit_hooks.extend(stage for stage in stages if isinstance(stage, FitHook))

    @property
    def engine(self) -> Engine:
        """What carries the collectives."""
        return self._engine

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage; 0 where one rank holds all."""
        return self._zero_stage

    @property
    def gradient_options(self) -> GradientOptions:
        """How gradients travel."""
        return self._gradient_options

    @property
    def row_shares(self) -> RowShares | None:
        """How many rows of a batch each rank has; None where ranks have equally many."""
        return self._row_shares

    @property
    def batch_shares(self) -> tuple[float, ...]:
        """Of each rank that holds other rows its part of them, as it is now; they add up to 1."""
        size = self.row_group.size
        return (1 / size,) * size if self._row_shares is None else self._row_shares.shares

    def unsharded(self, groups, name):
        """See `DistributedStrategy.unsharded`."""
        from tfdist.zero.unshard import gathered_for_step

        return gathered_for_step(groups, name)

    def gather(self, value, axis):
        """Concatenates the ranks' tensors along `axis`, in data order.

        Also inside of a step, as in a loss that compares the rows of a batch with each other: see
        `tf.distribute.ReplicaContext.all_gather`.

        Args:
            value: A tensor of rank one or more; inside of a step also a nest of them.
            axis: The dim along which they are joined; sizes along it may differ.
        """
        replica = current_replica()
        if replica is not None:
            return replica.all_gather(value, axis)
        return super().gather(value, axis)

    def global_norm(self, gradients, variables) -> tf.Tensor:
        """The norm of the gradients of the global batch: of all parts of split variables, each once.

        Called by a `train_step` or another function of `strategy.run`, on all ranks.

        Args:
            gradients: A list of what `tape.gradient` returned for the variables: tensors, IndexedSlices
                or None.
            variables: The Keras variables, in the same order.

        Returns:
            A float32 scalar, the same on all ranks.

        Raises:
            RuntimeError: Called outside of `strategy.run`.
            ValueError: The lists are not equally long.
        """
        return self._clipped(gradients, variables, None)[1]

    def clip_by_global_norm(self, gradients, variables, clip_norm) -> tuple[list, tf.Tensor]:
        """As `tf.clip_by_global_norm`, of the gradients of the global batch, on any mesh.

        The gradients are reduced here, and not again by the optimizer that gets them.

        Args:
            gradients: A list of what `tape.gradient` returned for the variables: tensors, IndexedSlices
                or None.
            variables: The Keras variables, in the same order.
            clip_norm: The largest norm: a positive number or a scalar tensor.

        Returns:
            The clipped gradients of what this rank holds, for `optimizer.apply` (under ZeRO-3 they are
            flat shards), and the norm before clipping.

        Raises:
            RuntimeError: Called outside of `strategy.run`.
            ValueError: The lists are not equally long.
        """
        if not tf.is_tensor(clip_norm):
            checks.number("clip_norm", clip_norm, above=0, maximum=sys.float_info.max)
        return self._clipped(gradients, variables, clip_norm)

    def _clipped(self, gradients, variables, clip_norm) -> tuple[list, tf.Tensor]:
        gradients, variables = list(gradients), list(variables)
        if len(gradients) != len(variables):
            raise ValueError(
                "There must be a gradient, or None, for each variable. Received: "
                f"{len(gradients)} gradients and {len(variables)} variables."
            )
        replica = current_replica()
        if replica is None or replica.strategy is not self:
            raise RuntimeError(
                "Gradients are clipped in a training step or another function of `strategy.run`. "
                "Received: a call outside of it."
            )
        from tfdist.strategies.whole_gradients import clip_by_global_norm

        return clip_by_global_norm(gradients, variables, clip_norm, replica)

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on this rank, in replica context.

        A `train_step` or `test_step` of a Keras model computes what a single process would on the
        whole batch: gradients are averaged over samples. Any other function keeps the contract of
        `tf.distribute`: gradients of all ranks are summed, so the function scales its loss by the
        global batch size.

        Args:
            fn: The function.
            args: Its arguments: this rank's own.
            kwargs: Its keyword arguments.
            options: As in `tf.distribute.Strategy.run`.

        Returns:
            What `fn` returned on this rank.
        """
        step = _keras_step(fn, args, self.gradient_group)
        with self.extended._running(step):
            outputs = super().run(fn, args=args, kwargs=kwargs, options=options)
        return self.extended._finish_outputs(outputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mesh!r})"


def check_options(
    mesh: Mesh | None,
    engine: Engine | None,
    *,
    zero_stage: int = 0,
    bucket_mib: float = BUCKET_BYTES / _MIB,
    communication_dtype: str | None = None,
    compression: GradientStage | None = None,
    gradient_stages: Sequence[GradientStage] = (),
    batch_shares: str | MeasuredShares | Sequence[float] | None = None,
    watchdog_seconds: float = WATCHDOG_SECONDS,
    deterministic: bool = False,
) -> None:
    """Checks the arguments of a strategy, before its ranks meet.

    Args:
        mesh: The mesh, for a new engine.
        engine: An engine that already runs.
        zero_stage: As in `ParallelStrategy`.
        bucket_mib: As in `ParallelStrategy`.
        communication_dtype: As in `ParallelStrategy`.
        compression: As in `ParallelStrategy`.
        gradient_stages: As in `ParallelStrategy`.
        batch_shares: As in `ParallelStrategy`.
        watchdog_seconds: As in `ParallelStrategy`.
        deterministic: As in `ParallelStrategy`.

    Raises:
        ValueError: A value is out of its range.
        TypeError: The mesh or the engine is none.
    """
    checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
    checks.instance("engine", engine, Engine, "an Engine of tfdist.collectives", optional=True)
    if mesh is not None and engine is not None:
        raise ValueError(
            f"An `engine` has its mesh already: leave out `mesh`. Received: mesh={mesh!r}."
        )
    checks.integer("zero_stage", zero_stage, minimum=0, maximum=3)
    checks.number("bucket_mib", bucket_mib, above=0, maximum=_MOST_BUCKET_MIB)
    checks.one_of(
        "communication_dtype", communication_dtype, ("bfloat16", "float16"), optional=True
    )
    is_compressor = (
        isinstance(compression, GradientStage) and compression.position is Position.REDUCE
    )
    if compression is not None and not is_compressor:
        meaning = "a Compressor, such as those of tfdist.addons.slow_links"
        raise checks.refuse("compression", compression, meaning, TypeError)
    is_list = isinstance(gradient_stages, Sequence) and not isinstance(gradient_stages, str | bytes)
    if not is_list or not all(isinstance(each, GradientStage) for each in gradient_stages):
        meaning = "a sequence of tfdist.extend.GradientStage"
        raise checks.refuse("gradient_stages", gradient_stages, meaning, TypeError)
    reducing = [stage for stage in gradient_stages if stage.position is Position.REDUCE]
    reducing += [] if compression is None else [compression]
    if reducing and zero_stage == 3:
        raise ValueError(
            "Compression, and other stages that reduce gradients, are not supported with zero_stage=3, which "
            f"reduces them layer by layer: use zero_stage=2. Received: zero_stage=3, {reducing[0]!r}."
        )
    checks.number("watchdog_seconds", watchdog_seconds, minimum=0, maximum=checks.YEAR_SECONDS)
    if batch_shares is not None:
        from tfdist.step.shares import check_batch_shares

        check_batch_shares(batch_shares)
    checks.boolean("deterministic", deterministic)


def notice_one_rank(started: tuple[int, int] | None) -> None:
    """Says so where a strategy of many ranks has one, for nobody used a launcher.

    Args:
        started: What the launcher of the strategy's own said, if there was one.
    """
    from tfdist.runtime.schedulers import started_by_scheduler

    if started is None and started_by_scheduler() is None:
        script = os.path.basename(sys.argv[0] or "")
        logging.warning(
            "tfdist: 1 rank: this process was not started by a launcher; `tfdist-run -np 4 -- "
            "python %s` starts 4.",
            script if script.endswith(".py") else "train.py",
        )


def meeting(watchdog_seconds: float):
    """Guards the making of an engine: ranks that do not meet in time end with a message."""
    if not watchdog_seconds:
        return contextlib.nullcontext()
    return startup_guard(watchdog_seconds, "the meeting of the ranks")


def _keras_step(fn, args, group: Group) -> KerasStep | None:
    """The Keras step that `fn` is, or None."""
    model = getattr(fn, "__self__", None)
    kinds = {"train_step": "train", "test_step": "test"}
    kind = kinds.get(getattr(fn, "__name__", ""))
    if not isinstance(model, keras.Model) or kind is None or not args:
        return None
    local = local_optimizer(model) if kind == "train" else None
    in_step = None if local is None else local.in_step(group.engine)
    return KerasStep(model, kind, count_rows(args[0]), group, in_step)
