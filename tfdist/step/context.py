"""The current strategy, replica context and Keras step.

All rooms look them up here, so that none reads attributes of an object that may not be of tfdist.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
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
from tfdist.utils.temporary import attributes_set


class DistributedStrategy(tf.distribute.Strategy, abc.ABC):
    """The interface of tfdist's strategies for the rooms below `strategies/`.

    Attributes:
        engine: The engine of the collectives.
        zero_stage: The ZeRO stage, 0 to 3; 0 if one rank holds everything.
        gradient_options: How gradients are sent.
        row_shares: The rows of a batch for each rank; None if all ranks have the same number.
        fit_hooks: The hooks of each `fit`, `evaluate` and `predict` of its models.
        gradient_stages: The stages of the gradients of its steps, in this order.
        kept_states: What checkpoints save in addition to the model: see `keep`.
    """

    engine: Engine
    zero_stage: int
    gradient_options: GradientOptions
    row_shares: RowShares | None = None

    def __init__(self, extended: tf.distribute.StrategyExtended):
        super().__init__(extended)
        self.fit_hooks: list[FitHook] = []
        self.gradient_stages: list[GradientStage] = []
        self.kept_states: list[KeptState] = []

    def keep(self, state: KeptState) -> None:
        """Adds a state that checkpoints of its models save and restore.

        Args:
            state: The state; all ranks must add the same ones, in the same order.
        """
        self.kept_states.append(state)

    @abc.abstractmethod
    def unsharded(self, groups: Sequence[Sequence], name: str) -> contextlib.AbstractContextManager:
        """A context in which parameters that ZeRO-3 shards are whole arrays.

        For a step that runs its layers many times, such as that of a pipeline.

        Args:
            groups: The variables; those of a group are sent together.
            name: The name of the collectives, for messages.

        Returns:
            A context, whose value is a function from gradients of whole parameters to gradients of shards,
            by the ids of the variables.
        """

    @property
    def mesh(self) -> Mesh:
        """The mesh, with this rank."""
        return self.engine.mesh

    @property
    def is_chief(self) -> bool:
        """Whether this rank writes files and prints for all ranks."""
        return self.mesh.rank == 0

    def group(self, *axes, name=None):
        """The group of this rank along the given mesh axes; without an axis, all ranks.

        Args:
            *axes: Names of mesh axes. Anything else is passed to `tf.distribute.Strategy.group`: a
                value, whose operations are grouped as by `tf.group`.
            name: The name of that operation.
        """
        if all(isinstance(axis, str) for axis in axes) and name is None:
            return self.engine.group(*axes)
        return super().group(*axes, name=name)

    @property
    def row_group(self) -> Group:
        """The ranks that hold different rows of a batch, and otherwise the same."""
        return self.engine.group(*self.mesh.row_axes)

    @property
    def token_group(self) -> Group:
        """The ranks that hold different tokens of the same sequences."""
        return self.engine.group(*self.mesh.token_axes)

    @property
    def gradient_group(self) -> Group:
        """The ranks over which the gradient of a replicated variable is summed."""
        return self.engine.group(*self.mesh.gradient_axes)


class ReplicaContext(tf.distribute.ReplicaContext):
    """The context that `tf.distribute.get_replica_context()` returns inside `strategy.run`.

    Attributes:
        step: The current Keras step; None for any other function.
        in_step: The ranks that step together now; None if all do.
        at_end: Functions to call at the end of the function that runs in the context.
        gradient_path: The path of the innermost running `optimizer.apply`; None outside of one.
        gradient_reads: The gradients that a tape returned to a custom training step; None in other
            functions.
        gradient_marks: The gradients that are known to be global already; None if there are none.
        num_gathers: The number of times that rows were gathered.
        gradients_are_global: Whether the user declares the gradients for `optimizer.apply` global.
        sums_gradients: Whether `all_reduce` reduces. Keras calls it for gradients right before an update,
            when they are global already.
        cuts: Whether rows are cut into micro-batches, of which some may have none.
        has_padding: Whether this rank has no rows, and computes with a row of padding: a bool tensor. None
            if nothing is padded.
        tokens: How sequences in the arguments of the function are split; None if each rank has whole ones,
            or there are none.
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
        self.gradient_path: Any = None
        self.gradient_reads: Any = None
        self.gradient_marks: Any = None
        self.gradients_are_global = False
        self.num_gathers = 0
        self.sums_gradients = True
        self.cuts = False
        self.has_padding: tf.Tensor | None = None
        self._row_group = group

    @property
    def gradient_group(self) -> Group:
        """The ranks over which the gradient of a replicated variable is reduced at this step."""
        return group_in_step(self.strategy.gradient_group, self.in_step)

    @property
    def _group(self) -> Group:
        return group_in_step(self._row_group, self.in_step)

    @property
    def devices(self):
        """The device of this rank."""
        return self._strategy.extended.worker_devices

    def padded(self, has_padding: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """A context in which collectives leave out what this rank has computed from padding."""
        return attributes_set(self, has_padding=has_padding)

    def all_reduce(self, reduce_op, value, options=None):
        """Reduces a tensor, or a nest of them, over the ranks with different rows; differentiable.

        Args:
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`.
            value: A nest of tensors or IndexedSlices, with the same structure on all ranks.
            options: Not used.
        """
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

        In a step of a Keras model the result is the tensor of the whole batch. A loss of it is the same
        number on all ranks, and has the same gradient as in a single process.

        Args:
            value: A nest of tensors of rank one or more. Sizes along `axis` may differ.
            axis: The dim to concatenate along.
            options: Not used.
        """
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
    """The role of a rank in a model whose layers are on different ranks.

    Attributes:
        sees_outputs: Whether losses and metrics are counted on this rank.
        axes: The mesh axes, other than those of the rows, over which counts are reduced.
        num_microbatches: The number of losses in a rank's step.
        whole_model: The model of all layers, if the rank's model has only some of them.
    """

    sees_outputs: bool = True
    axes: tuple[str, ...] = ()
    num_microbatches: int = 1
    whole_model: Any = None


def role_of(model) -> ModelRole:
    """The role of this rank in a model; by default each rank has the whole model."""
    found = getattr(model, "_tfdist_role", None)
    return found if isinstance(found, ModelRole) else ModelRole()


def current_strategy() -> DistributedStrategy | None:
    """The strategy in scope, if it is one of tfdist; otherwise None."""
    strategy = tf.distribute.get_strategy()
    return strategy if isinstance(strategy, DistributedStrategy) else None


def strategy_of(model) -> DistributedStrategy | None:
    """The strategy in whose scope a Keras model was created, if it is one of tfdist; otherwise None."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy if isinstance(strategy, DistributedStrategy) else None


def current_replica() -> ReplicaContext | None:
    """The current replica context, if it is one of tfdist; otherwise None."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, ReplicaContext) else None


def current_step() -> KerasStep | None:
    """The current Keras step; None outside of one."""
    replica = current_replica()
    return replica.step if replica is not None else None


def current_tokens() -> TokenSplit | None:
    """The current split of sequences over ranks; None if each rank has whole ones.

    Sequences are whole outside `strategy.run`, for example in a direct call of a model.

    Raises:
        RuntimeError: A function runs on the ranks of a context axis without sequences in its arguments.
    """
    replica = current_replica()
    if replica is None or replica.strategy.token_group.size == 1:
        return None
    if replica.tokens is None:
        raise RuntimeError(
            "On a context axis, a function must receive its part of the sequences as an argument. Received: "
            "no sequences. Use `strategy.run(function, args=(batch,))` with a batch of a distributed dataset."
        )
    return replica.tokens
