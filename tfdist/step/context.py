"""What runs now: the strategy in scope, the replica context, the Keras step under way.

All rooms ask here, so that none looks for attributes on an object that may be somebody else's.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from tfdist.gradients.stage import GradientStage
    from tfdist.sharding.kept import KeptState
    from tfdist.step.row_shares import RowShares

from tfdist.collectives import Group, all_gather, all_reduce
from tfdist.collectives.engine import Engine
from tfdist.mesh import Mesh
from tfdist.step.gradient_options import GradientOptions
from tfdist.step.hooks import FitHook
from tfdist.step.keras_step import KerasStep, weighted
from tfdist.step.local_steps import group_in_step
from tfdist.step.token_split import TokenSplit


class DistributedStrategy(tf.distribute.Strategy, abc.ABC):
    """What the rooms below `strategies/` rely on in a strategy of tfdist."""

    @functools.cached_property
    def fit_hooks(self) -> list[FitHook]:
        """What takes part in each `fit`, `evaluate` and `predict` of its models."""
        return []

    @functools.cached_property
    def gradient_stages(self) -> list[GradientStage]:
        """What changes, measures or reduces the gradients of its steps, in this order."""
        return []

    @functools.cached_property
    def kept_states(self) -> list[KeptState]:
        """What checkpoints keep in addition to the model: see `keep`."""
        return []

    def keep(self, state: KeptState) -> None:
        """Has checkpoints of its models save and restore a state.

        Args:
            state: The state; all ranks keep the same ones, in the same order.
        """
        self.kept_states.append(state)

    @property
    @abc.abstractmethod
    def engine(self) -> Engine:
        """What carries the collectives."""

    @property
    @abc.abstractmethod
    def zero_stage(self) -> int:
        """The ZeRO stage: 0 to 3."""

    @property
    @abc.abstractmethod
    def gradient_options(self) -> GradientOptions:
        """How gradients travel."""

    @property
    @abc.abstractmethod
    def row_shares(self) -> RowShares | None:
        """How many rows of a batch each rank has; None where ranks have equally many."""

    @abc.abstractmethod
    def unsharded(self, groups: Sequence[Sequence], name: str) -> contextlib.AbstractContextManager:
        """Inside, parameters that ZeRO-3 keeps in shards are whole arrays.

        For a step that runs its layers many times, as a pipeline does.

        Args:
            groups: The variables; those of a group travel together.
            name: What they serve, for messages.

        Returns:
            A context, whose value makes gradients of shards of gradients of whole parameters, by
            the ids of the variables.
        """

    @property
    def mesh(self) -> Mesh:
        """The mesh, resolved: it knows this rank."""
        return self.engine.mesh

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the one that writes files and talks to the user."""
        return self.mesh.rank == 0

    def group(self, *axes, name=None):
        """The group of this rank along the given mesh axes; without an axis, the world.

        Args:
            *axes: Names of mesh axes. Anything else is what `tf.distribute.Strategy.group` takes: a
                value, whose operations are grouped as by `tf.group`.
            name: The name of that operation.
        """
        if all(isinstance(axis, str) for axis in axes) and name is None:
            return self.engine.group(*axes)
        return super().group(*axes, name=name)

    @property
    def row_group(self) -> Group:
        """The ranks that hold different rows of a batch, and the same of all else."""
        return self.engine.group(*self.mesh.row_axes)

    @property
    def token_group(self) -> Group:
        """The ranks that hold different tokens of the same sequences."""
        return self.engine.group(*self.mesh.token_axes)

    @property
    def gradient_group(self) -> Group:
        """The ranks over which the gradient of a variable is summed that all of them hold."""
        return self.engine.group(*self.mesh.gradient_axes)


class ReplicaContext(tf.distribute.ReplicaContext):
    """What `tf.distribute.get_replica_context()` returns inside `strategy.run`.

    Attributes:
        step: The Keras step under way, or None for a function of the user's own.
        in_step: The ranks of the world that step together now; None where all do.
        at_end: What is called when the function is over that the context is for.
        gradient_paths: Of the calls of `optimizer.apply` under way, the innermost last.
        gradient_reads: What a training step of the user's own makes of gradients, since a tape returned
            them; None in other functions.
        gradient_marks: The gradients that are known to be global already, if there are some.
        num_gathers: How many times rows were gathered.
        gradients_are_global: Whether the user says so of those that `optimizer.apply` is given.
        sums_gradients: Whether `all_reduce` does what it says. Keras sums gradients by it right before
            an update, where they are global already.
        has_padding: Whether what is computed now is of a row that is not there, since this rank has
            none: a bool tensor. None where nothing is padded.
        tokens: How ranks divide the sequences that the function was given; None where each has them
            whole, or where it was given none.
    """

    def __init__(
        self,
        strategy: DistributedStrategy,
        step: KerasStep | None,
        tokens: TokenSplit | None = None,
    ):
        group = strategy.row_group
        super().__init__(strategy, replica_id_in_sync_group=group.rank)
        self.step = step
        self.in_step = None if step is None else step.in_step
        self.tokens = tokens
        self.at_end: list[Callable[[], None]] = []
        self.gradient_paths: list = []
        self.gradient_reads: Any = None
        self.gradient_marks: Any = None
        self.gradients_are_global = False
        self.num_gathers = 0
        self.sums_gradients = True
        self.has_padding: tf.Tensor | None = None
        self._row_group = group

    @property
    def gradient_group(self) -> Group:
        """The ranks that a gradient is reduced over at this step, if all of them hold the variable."""
        return group_in_step(self.strategy.gradient_group, self.in_step)

    @property
    def _group(self) -> Group:
        return group_in_step(self._row_group, self.in_step)

    @property
    def devices(self):
        """The device of this rank."""
        return self._strategy.extended.worker_devices

    @contextlib.contextmanager
    def padded(self, has_padding: tf.Tensor) -> Iterator[None]:
        """Inside, collectives leave out what this rank has computed of a row that is not there."""
        before, self.has_padding = self.has_padding, has_padding
        try:
            yield
        finally:
            self.has_padding = before

    def all_reduce(self, reduce_op, value, options=None):
        """Reduces a tensor, or a nest of them, over the ranks that hold other rows; differentiable.

        Args:
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`.
            value: A nest of tensors or IndexedSlices, of one structure on all ranks.
            options: Not used.
        """
        del options
        if not self.sums_gradients:
            return value
        reduction = getattr(reduce_op, "value", reduce_op).lower()

        def reduce(tensor):
            if self.has_padding is not None:
                tensor = tf.convert_to_tensor(tensor)
                tensor = tf.where(self.has_padding, tf.zeros_like(tensor), tensor)
            return weighted(lambda x: all_reduce(x, self._group, reduction), tensor, self.step)

        if self.gradient_reads is None or reduction != "sum":
            return tf.nest.map_structure(reduce, value)
        return self.gradient_reads.summed(lambda own: tf.nest.map_structure(reduce, own), value)

    def all_gather(self, value, axis, options=None):
        """Concatenates the ranks' tensors along `axis`, in the order of rows; differentiable.

        In a step of a Keras model the result is the tensor of the whole batch. A loss of it is the
        same number on all ranks, and has the gradient that it has in a single process.

        Args:
            value: A nest of tensors of rank one or more. Sizes along `axis` may differ.
            axis: The dim along which they are joined.
            options: Not used.
        """
        del options
        self.num_gathers += 1

        def gather(tensor):
            if self.has_padding is not None:
                tensor = tf.convert_to_tensor(tensor)
                kept = [slice(None)] * tensor.shape.rank
                kept[axis] = slice(tf.where(self.has_padding, 0, tf.shape(tensor)[axis]))
                tensor = tensor[tuple(kept)]
            return weighted(
                lambda x: all_gather(x, self._group, axis, uneven=True), tensor, self.step
            )

        return tf.nest.map_structure(gather, value)


@dataclasses.dataclass(frozen=True)
class ModelRole:
    """What of a model's outputs a rank sees, where ranks hold different layers.

    Attributes:
        sees_outputs: Whether losses and metrics are counted on this rank.
        axes: The mesh axes beside those of the rows over which what is counted is put together.
        num_microbatches: Into how many losses a rank's step is cut.
        whole_model: The model of all layers, where the rank's has some of them.
    """

    sees_outputs: bool = True
    axes: tuple[str, ...] = ()
    num_microbatches: int = 1
    whole_model: Any = None


def role_of(model) -> ModelRole:
    """The role of this rank in a model; a model that says nothing lies whole on each rank."""
    found = getattr(model, "_tfdist_role", None)
    return found if isinstance(found, ModelRole) else ModelRole()


def current_strategy() -> DistributedStrategy | None:
    """The strategy in scope, if it is one of tfdist's."""
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, DistributedStrategy) else None


def strategy_of(model) -> DistributedStrategy | None:
    """The strategy that a Keras model was made under, if it is one of tfdist's."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy if isinstance(strategy, DistributedStrategy) else None


def current_replica() -> ReplicaContext | None:
    """The replica context under way, if it is one of tfdist's."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, ReplicaContext) else None


def current_step() -> KerasStep | None:
    """The Keras step under way, if there is one."""
    replica = current_replica()
    return replica.step if replica is not None else None


def current_tokens() -> TokenSplit | None:
    """How ranks divide the sequences that are computed with; None where each has them whole.

    They are whole outside of `strategy.run`, as in a call of a model by itself.

    Raises:
        RuntimeError: A function runs on ranks of a context axis that was given no sequences.
    """
    replica = current_replica()
    if replica is None or replica.strategy.token_group.size == 1:
        return None
    if replica.tokens is None:
        raise RuntimeError(
            "On a context axis a function gets its part of the sequences as an argument: "
            "`strategy.run(function, args=(batch,))`, with a batch of a distributed data set."
        )
    return replica.tokens
