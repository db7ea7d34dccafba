"""Optimizers: gradients become global before anything looks at them.

Keras reduces gradients over replicas in the last moment, after it has clipped and accumulated
each replica's own. Clipping then sees other norms than a single process would, and a loss scale
that one rank finds too large is found so by that rank only. `tfdist.gradients.path` says what
happens to a gradient, and in which order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import keras

from tfdist.backend.clock.stamps import updating
from tfdist.backend.keras.attributes import stored_value
from tfdist.backend.keras.patching import Patch
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


def _apply(self, grads, trainable_variables=None, *, original):
    """Before accumulation: a micro-step's gradient counts by that micro-step's shares."""
    replica = current_replica()
    grads = list(grads)
    with as_shards(), updating(grads, square_of):
        if replica is None or not grads:
            return original(self, grads, trainable_variables)
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        variables = list(variables)
        # One that was made outside of the scope makes its variables here.
        self._distribution_strategy = replica.strategy
        _prepare(self, variables)
        grads, origins = origins_of(grads, variables, replica)
        path = GradientPath(replica, self, variables, origins)
        with path.under_way():
            grads = path.weigh(grads)
            if path.accumulates_global():
                grads = path.reduce(grads)
            return original(self, grads, trainable_variables)


def _apply_gradients(self, grads_and_vars, *, original, **kwargs):
    """As in TensorFlow's Keras before 3: where the user has reduced gradients, nothing is done to them."""
    replica = current_replica()
    if replica is None or not kwargs:
        return original(self, grads_and_vars, **kwargs)
    is_global = bool(kwargs.pop("skip_gradients_aggregation", False))
    is_global |= not kwargs.pop("experimental_aggregate_gradients", True)
    before, replica.gradients_are_global = replica.gradients_are_global, is_global
    try:
        return original(self, grads_and_vars, **kwargs)
    finally:
        replica.gradients_are_global = before


def _apply_scaled(self, grads, trainable_variables=None, *, original):
    """A loss scale looks at gradients for every step, which is no reading of the user's."""
    replica = current_replica()
    grads = list(grads)
    with updating(grads, square_of):
        if replica is not None and replica.gradient_reads is not None:
            grads = replica.gradient_reads.behind(grads)
        return original(self, grads, trainable_variables)


def _prepare(optimizer, variables) -> None:
    """Under ZeRO the state of each parameter is that of this rank's flat shard."""
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


def _clip_gradients(self, grads, *, original):
    """After accumulation and before clipping: the one reduction of the step."""
    path = current_path()
    if path is None:
        return original(self, grads)
    grads = path.reduce(path.accumulated(grads))
    return path.clip(grads) if path.is_spread() else original(self, grads)


def _add_variable_from_reference(self, reference_variable, name=None, *args, original, **kwargs):
    """The moments of a slice are slices of the moments, and lie where it lies."""
    strategy = current_strategy()
    with as_shards():
        if strategy is None:
            _refuse_outside(self, reference_variable)
            return original(self, reference_variable, name, *args, **kwargs)
        if isinstance(reference_variable, keras.Variable):
            _prepare(self, [reference_variable])
        layout = layout_of(reference_variable)
        state = layout.state
        # Averages become parameters as they are, so they lie as the parameter does.
        if name == "average" or (name == "gradient_accumulator" and strategy.zero_stage < 2):
            state = layout.flat
        like = reference_variable
        if state is not None:
            like = _Shape(reference_variable.path, (state.share,), reference_variable.dtype)
        # TensorFlow's own method asks where the reference lies; here all lies on one device.
        variable = super(TFOptimizer, self).add_variable_from_reference(like, name, *args, **kwargs)
        if layout.is_spread:
            update_layout(variable, slice=layout.slice, flat=state, stage=layout.stage)
        return variable


def _refuse_outside(optimizer, reference) -> None:
    """TensorFlow would say that the scope is missing, and not of what."""
    strategy = optimizer._distribution_strategy
    if not isinstance(strategy, DistributedStrategy):
        return
    value = stored_value(reference) if isinstance(reference, keras.Variable) else reference
    if getattr(value, "_distribute_strategy", None) is strategy:
        cause = "the optimizer was called outside of `strategy.run` and of the scope"
        remedy = "Call `optimizer.build(model.trainable_variables)` inside of the scope before"
    else:
        cause = "the model was built outside of the scope"
        remedy = "Build both inside `with strategy.scope():`"
    # Keras takes it for built by now, and would not begin again.
    optimizer.built = False
    raise RuntimeError(
        f"The optimizer `{optimizer.name}` was made under `strategy.scope()`, and so has to be what it "
        f"updates. Received: the variable `{getattr(reference, 'path', reference.name)}`; {cause}. {remedy}."
    )


@dataclasses.dataclass
class _Shape:
    """All that an optimizer's variable takes over from its reference."""

    path: str
    shape: tuple[int, ...]
    dtype: str


def _update_step(self, grads, trainable_variables, learning_rate, *, original):
    """Under ZeRO each rank updates its shards, and then all get the whole parameters."""
    path = current_path()
    if path is None:
        replica = current_replica()
        if replica is None:
            return original(self, grads, trainable_variables, learning_rate)
        path = GradientPath(replica, self, trainable_variables)
    # Where Keras would reduce: for optimizers that do not clip at all.
    grads = path.reduce(grads)
    with path.updating(), _local_shards(trainable_variables, path.options) as variables:
        return original(self, grads, variables, learning_rate)


def _overwrite_with_averages(self, trainable_variables, *, original):
    with as_shards():
        return original(self, trainable_variables)


@contextlib.contextmanager
def _local_shards(variables, options: GradientOptions) -> Iterator[list]:
    """Variables, those whose state is split as their shards; in the end all ranks get the whole."""
    if all(layout_of(each).state is None or layout_of(each).flat is not None for each in variables):
        yield list(variables)
        return
    from tfdist.zero.update import LocalShard, all_gather_parameters

    views = []
    found: list = []
    for variable in variables:
        layout = layout_of(variable)
        if layout.state is None or layout.flat is not None:
            found.append(variable)
        else:
            views.append(LocalShard(variable.value, layout.state))
            found.append(views[-1])
    yield found
    changed = [view for view in views if view.is_changed]
    if changed:
        all_gather_parameters(changed, options)


PATCHES = (
    Patch(BaseOptimizer, "apply", ("self", "grads", "trainable_variables"), _apply),
    Patch(BaseOptimizer, "apply_gradients", ("self", "grads_and_vars"), _apply_gradients),
    Patch(LossScaleOptimizer, "apply", ("self", "grads", "trainable_variables"), _apply_scaled),
    Patch(BaseOptimizer, "_clip_gradients", ("self", "grads"), _clip_gradients),
    Patch(
        TFOptimizer,
        "_backend_update_step",
        ("self", "grads", "trainable_variables", "learning_rate"),
        _update_step,
    ),
    Patch(
        TFOptimizer,
        "add_variable_from_reference",
        ("self", "reference_variable"),
        _add_variable_from_reference,
    ),
    Patch(
        TFOptimizer,
        "_overwrite_model_variables_with_average_value",
        ("self", "trainable_variables"),
        _overwrite_with_averages,
    ),
)
