"""`ParallelStrategy`: a `tf.distribute.Strategy` for Keras 3, with a mesh and an engine."""

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
from tfdist.data.random_state import share_random_state
from tfdist.runtime.plugins import load_plugins
from tfdist.step.context import DistributedStrategy, current_replica
from tfdist.step.gradient_options import GradientOptions, default_bucket_bytes
from tfdist.step.hooks import FitHook
from tfdist.step.keras_step import KerasStep
from tfdist.step.local_steps import local_optimizer
from tfdist.strategies import keras_patches
from tfdist.strategies.devices import pin_gpu
from tfdist.strategies.extended import ParallelExtended
from tfdist.strategies.keras_patches.compiling import compiled, compiles
from tfdist.strategies.keras_patches.scopes import record_strategy
from tfdist.strategies.keras_patches.steps import count_rows
from tfdist.strategies.options import checked_options
from tfdist.utils import checks
from tfdist.utils.lazy import require_addon
from tfdist.watchdog.watchdog import Watchdog, startup_guard

if TYPE_CHECKING:
    from tfdist.step.shares import MeasuredShares

_MIB = 1 << 20


class ParallelStrategy(DistributedStrategy):
    """One process per device; each runs the same program with plain tensors and variables.

    The base of `HorovodStrategy`, `MultiWorkerStrategy` and `LocalStrategy`, which differ only in the engine
    and in the rendezvous of the ranks.

    ```python
    strategy = tfdist.strategies.auto()
    with strategy.scope():
        model = keras.Sequential([...])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=256, epochs=3)  # 256 is the global batch
    ```

    Args:
        engine: The engine of the collectives, with the mesh.
        **options: The attributes of `StrategyOptions`.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(self, engine: Engine, **options):
        checks.instance("engine", engine, Engine, "an Engine of tfdist.collectives")
        given = checked_options(None, engine, options)
        load_plugins()
        if given.deterministic and not engine.is_deterministic:
            raise ValueError(
                "deterministic=True requires an engine that was created with deterministic=True. Received: "
                "an engine that was created without it."
            )
        self.engine = engine
        mib, dtype = given.bucket_mib, given.communication_dtype
        self.gradient_options = GradientOptions(
            default_bucket_bytes() if mib is None else int(mib * _MIB),
            None if dtype is None else tf.as_dtype(dtype),
        )
        share_random_state(engine.group())
        super().__init__(ParallelExtended(self))
        self.gradient_stages += given.stages
        self.fit_hooks += [stage for stage in self.gradient_stages if isinstance(stage, FitHook)]
        if given.batch_shares is not None:
            self._share_rows(given.batch_shares)
        # One rank holds everything.
        self.zero_stage = given.zero_stage if self.gradient_group.size > 1 else 0
        if self.zero_stage == 3:
            importlib.import_module("tfdist.zero.unshard")
        self._watchdog = None
        if given.watchdog_seconds and engine.size > 1:
            self._watchdog = Watchdog(engine, given.watchdog_seconds)
        keras_patches.install()
        record_strategy(self)

    def _share_rows(self, batch_shares: str | MeasuredShares | Sequence[float]) -> None:
        """Gives ranks shares of the rows that are not equal."""
        from tfdist.step.row_shares import RowShares
        from tfdist.step.shares import MeasuredShares

        if isinstance(batch_shares, str | MeasuredShares):
            balancing = require_addon("unequal_ranks", 'batch_shares="measured"').balancing
            balancing.share_by_speed(self, batch_shares)
        else:
            self.row_shares = RowShares(batch_shares, self.row_group.size)

    @property
    def batch_shares(self) -> tuple[float, ...]:
        """The current share of the rows for each rank with different rows; the shares add up to 1."""
        size = self.row_group.size
        return (1 / size,) * size if self.row_shares is None else self.row_shares.shares

    def unsharded(self, groups, name):
        """See `DistributedStrategy.unsharded`."""
        from tfdist.zero.unshard import gathered_for_step

        return gathered_for_step(groups, name)

    def gather(self, value, axis):
        """Concatenates the ranks' tensors along `axis`, in the order of the rows.

        Also inside a step, for example in a loss that compares the rows of a batch: see
        `tf.distribute.ReplicaContext.all_gather`.

        Args:
            value: A tensor of rank one or more; inside a step also a nest of tensors.
            axis: The dim to concatenate along; sizes along it may differ.
        """
        replica = current_replica()
        return super().gather(value, axis) if replica is None else replica.all_gather(value, axis)

    def global_norm(self, gradients, variables) -> tf.Tensor:
        """The norm of the gradients of the global batch, with each part of split variables counted once.

        To be called in a `train_step` or another function of `strategy.run`, on all ranks.

        Args:
            gradients: The list that `tape.gradient` returned for the variables: tensors, IndexedSlices or
                None.
            variables: The Keras variables, in the same order.

        Returns:
            A float32 scalar, the same on all ranks.

        Raises:
            RuntimeError: Called outside `strategy.run`.
            ValueError: The lists have different lengths.
        """
        return self._clipped(gradients, variables, None)[1]

    def clip_by_global_norm(self, gradients, variables, clip_norm) -> tuple[list, tf.Tensor]:
        """As `tf.clip_by_global_norm`, for the gradients of the global batch, on any mesh.

        The gradients are reduced here, and not again by the optimizer that receives them.

        Args:
            gradients: The list that `tape.gradient` returned for the variables: tensors, IndexedSlices or
                None.
            variables: The Keras variables, in the same order.
            clip_norm: The largest norm: a positive number or a scalar tensor.

        Returns:
            The clipped gradients of this rank's parts, for `optimizer.apply` (flat shards under ZeRO-3), and
            the norm before clipping.

        Raises:
            RuntimeError: Called outside `strategy.run`.
            ValueError: The lists have different lengths.
        """
        if not tf.is_tensor(clip_norm):
            checks.number("clip_norm", clip_norm, above=0, maximum=sys.float_info.max)
        return self._clipped(gradients, variables, clip_norm)

    def _clipped(self, gradients, variables, clip_norm) -> tuple[list, tf.Tensor]:
        gradients, variables = list(gradients), list(variables)
        if len(gradients) != len(variables):
            raise ValueError(
                "`gradients` must have a gradient, or None, for each variable. Received: "
                f"{len(gradients)} gradients and {len(variables)} variables."
            )
        replica = current_replica()
        if replica is None or replica.strategy is not self:
            raise RuntimeError(
                "`global_norm` and `clip_by_global_norm` must be called in a training step or another function "
                "of `strategy.run`. Received: a call outside."
            )
        from tfdist.strategies.whole_gradients import clip_by_global_norm

        return clip_by_global_norm(gradients, variables, clip_norm, replica)

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on this rank, in replica context.

        A `train_step` or `test_step` of a Keras model has the results of a single process with the whole
        batch: gradients are averaged over samples. For any other function the contract of `tf.distribute`
        applies: gradients of all ranks are summed, so the function must divide its loss by the global batch
        size.

        Args:
            fn: The function.
            args: The arguments for this rank.
            kwargs: The keyword arguments for this rank.
            options: As in `tf.distribute.Strategy.run`.

        Returns:
            The return value of `fn` on this rank.
        """
        if compiles(fn, self):
            return compiled(self, fn, args, kwargs, options)
        step = _keras_step(fn, args, self.gradient_group)
        with self.extended._running(step):
            outputs = super().run(fn, args=args, kwargs=kwargs, options=options)
        return self.extended._finish_outputs(outputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mesh!r})"


def script_name() -> str:
    """The name of the program's script, for commands in messages."""
    script = os.path.basename(sys.argv[0] or "")
    return script if script.endswith(".py") else "train.py"


def meeting(
    started: tuple[int, int] | None, watchdog_seconds: float
) -> contextlib.AbstractContextManager:
    """A context for the creation of an engine, on this rank's GPU if there are any.

    Ranks exit with a message if the rendezvous takes too long. A strategy for many ranks that has one,
    because no launcher was used, is noticed by a warning.

    Args:
        started: The rank and the number of ranks from the launcher of the strategy; None without one.
        watchdog_seconds: The timeout; 0 for none.
    """
    from tfdist.runtime.schedulers import started_by_scheduler

    if started is None and started_by_scheduler() is None:
        logging.warning(
            "tfdist: 1 rank: this process was not started by a launcher; `tfdist-run -np 4 -- "
            "python %s` starts 4.",
            script_name(),
        )
    pin_gpu()
    if not watchdog_seconds:
        return contextlib.nullcontext()
    return startup_guard(watchdog_seconds, "the rendezvous of the ranks")


def _keras_step(fn, args, group: Group) -> KerasStep | None:
    """The Keras step of `fn`; None if it is another function."""
    model, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    if not isinstance(model, keras.Model) or not args:
        return None
    for kind in ("train", "test"):
        # A decorator may have given it another name.
        function = getattr(type(model), f"{kind}_step")
        if name == f"{kind}_step" or getattr(fn, "__func__", None) is function:
            break
    else:
        return None
    local = local_optimizer(model) if kind == "train" else None
    in_step = None if local is None else local.in_step(group.engine)
    return KerasStep(model, kind, count_rows(args[0]), group, in_step)
