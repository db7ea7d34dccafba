"""Optimizers: gradients are reduced before they are clipped or checked.

Keras reduces gradients over replicas right before the update, after it has clipped and accumulated those of
each replica. Clipping then uses other norms than in a single process, and only one rank detects an overflow of
its loss scale. See `tfdist.gradients.path` for the steps of the path of a gradient.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import keras

from tfdist.backend.clock.stamps import updating
from tfdist.backend.keras.attributes import stored_value
from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import BaseOptimizer, LossScaleOptimizer, TFOptimizer
from tfdist.gradients.elementwise import check_elementwise
from tfdist.gradients.norms import square_of
from tfdist.gradients.origins import origins_of
from tfdist.gradients.path import GradientPath, current_path
from tfdist.sharding.layout import layout_of, update_layout
from tfdist.sharding.parts import FlatShard
from tfdist.step.context import DistributedStrategy, current_replica, current_strategy
from tfdist.step.gradient_options import GradientOptions
from tfdist.strategies.keras_patches.parameters import as_shards
from tfdist.utils.temporary import attributes_set

PATCHES = Patches()


@PATCHES.of(BaseOptimizer, "apply")
def _apply(self, grads, trainable_variables=None, *, original):
    """Weights the gradients of a micro-step by its shares, before they are accumulated."""
    replica = current_replica()
    grads = list(grads)
    with as_shards(), updating(grads, square_of):
        if replica is None or not grads:
            return original(self, grads, trainable_variables)
        given = trainable_variables
        variables = list(self._trainable_variables if given is None else given)
        # An optimizer that was created outside the scope creates its variables here.
        self._distribution_strategy = replica.strategy
        _prepare(self, variables)
        grads, origins = origins_of(grads, variables, replica)
        path = GradientPath(replica, self, variables, origins)
        with path.current():
            return original(self, path.weigh(grads), trainable_variables)


@PATCHES.of(BaseOptimizer, "apply_gradients")
def _apply_gradients(self, grads_and_vars, *, original, **kwargs):
    """Supports the arguments of Keras 2 that declare gradients as already reduced."""
    replica = current_replica()
    if replica is None or not kwargs:
        return original(self, grads_and_vars, **kwargs)
    is_global = bool(kwargs.pop("skip_gradients_aggregation", False))
    is_global |= not kwargs.pop("experimental_aggregate_gradients", True)
    with attributes_set(replica, gradients_are_global=is_global):
        return original(self, grads_and_vars, **kwargs)


@PATCHES.of(LossScaleOptimizer, "apply")
def _apply_scaled(self, grads, trainable_variables=None, *, original):
    """Replaces handles: a loss scale reads the gradients of every step, without the user."""
    replica = current_replica()
    grads = list(grads)
    with updating(grads, square_of):
        if replica is not None and replica.gradient_reads is not None:
            grads = replica.gradient_reads.behind(grads)
        return original(self, grads, trainable_variables)


def _prepare(optimizer, variables) -> None:
    """Checks an optimizer; under ZeRO, sets the flat shards of parameters for its state."""
    strategy = current_strategy()
    if any(layout_of(variable).slice is not None for variable in variables):
        check_elementwise(optimizer)
    if strategy is None or not strategy.zero_stage:
        return
    check_elementwise(optimizer)
    for variable in variables:
        layout = layout_of(variable)
        group = strategy.group(*layout.gradient_axes(strategy.mesh))
        if layout.state is None and group.size > 1:
            state = layout.flat or FlatShard(group, tuple(variable.shape))
            update_layout(variable, state=state)


@PATCHES.of(BaseOptimizer, "_clip_gradients")
def _clip_gradients(self, grads, *, original):
    """Reduces gradients, once per step, after accumulation and before clipping."""
    path = current_path()
    if path is None:
        return original(self, grads)
    grads = path.reduce(path.accumulated(grads))
    return path.clip(grads) if path.is_spread() else original(self, grads)


@PATCHES.of(TFOptimizer, "add_variable_from_reference", "self", "reference_variable")
def _add_variable_from_reference(self, reference_variable, name=None, *args, original, **kwargs):
    """Creates the state of a slice or shard, in its shape and with its layout."""
    strategy = current_strategy()
    with as_shards():
        if strategy is None:
            _check_scope(self, reference_variable)
            return original(self, reference_variable, name, *args, **kwargs)
        if isinstance(reference_variable, keras.Variable):
            _prepare(self, [reference_variable])
        layout = layout_of(reference_variable)
        state = layout.state
        # Averages are assigned to parameters, so they have the same layout.
        if name == "average" or (name == "gradient_accumulator" and strategy.zero_stage < 2):
            state = layout.flat
        like = reference_variable
        if state is not None:
            path, dtype = reference_variable.path, reference_variable.dtype
            like = types.SimpleNamespace(path=path, shape=(state.share,), dtype=dtype)
        # TensorFlow's method needs the device of the reference; here everything is on one device.
        variable = super(TFOptimizer, self).add_variable_from_reference(like, name, *args, **kwargs)
        if layout.is_spread or layout.partial_over:
            over = layout.partial_over if name == "gradient_accumulator" else None
            part = {"slice": layout.slice, "flat": state, "stage": layout.stage}
            update_layout(variable, **part, partial_over=over)
        return variable


def _check_scope(optimizer, reference) -> None:
    """Raises RuntimeError if an optimizer creates its state outside the scope of its strategy.

    TensorFlow's error does not contain the cause.
    """
    strategy = optimizer._distribution_strategy
    if not isinstance(strategy, DistributedStrategy):
        return
    value = stored_value(reference) if isinstance(reference, keras.Variable) else reference
    if getattr(value, "_distribute_strategy", None) is strategy:
        cause = "the optimizer was called outside `strategy.run` and outside the scope"
        remedy = "Call `optimizer.build(model.trainable_variables)` inside the scope first"
    else:
        cause = "the model was built outside the scope"
        remedy = "Build both inside `with strategy.scope():`"
    # Keras has marked it as built, and would not build it again.
    optimizer.built = False
    raise RuntimeError(
        f"The optimizer `{optimizer.name}` was created in `strategy.scope()`, so its variables must be "
        f"created there, too. Received: the variable `{getattr(reference, 'path', reference.name)}`; "
        f"{cause}. {remedy}."
    )


@PATCHES.of(TFOptimizer, "_backend_update_step")
def _update_step(self, grads, trainable_variables, learning_rate, *, original):
    """Under ZeRO 1 and 2, updates this rank's shards, and gathers the whole parameters."""
    # A context on whose exit an optimizer updates parameters of which ranks have exchanged parts.
    joint_update = getattr(self, "joint_update", contextlib.nullcontext)
    path = current_path()
    if path is None:
        replica = current_replica()
        if replica is None:
            with joint_update():
                return original(self, grads, trainable_variables, learning_rate)
        path = GradientPath(replica, self, trainable_variables)
    # Keras would reduce here; needed for optimizers that never call `_clip_gradients`.
    grads = path.reduce(grads)
    shards = _local_shards(trainable_variables, path.options)
    with path.updating(), shards as variables, joint_update():
        return original(self, grads, variables, learning_rate)


@contextlib.contextmanager
def _local_shards(variables, options: GradientOptions) -> Iterator[list]:
    """Replaces variables whose state is sharded by their shards; on exit, gathers the whole variables."""
    layouts = [layout_of(variable) for variable in variables]
    shards = [layout.state if layout.flat is None else None for layout in layouts]
    if all(shard is None for shard in shards):
        yield list(variables)
        return
    from tfdist.zero.update import LocalShard, all_gather_parameters

    pairs = zip(variables, shards, strict=True)
    found = [each if shard is None else LocalShard(each.value, shard) for each, shard in pairs]
    yield found
    changed = [view for view in found if isinstance(view, LocalShard) and view.is_changed]
    if changed:
        all_gather_parameters(changed, options)
