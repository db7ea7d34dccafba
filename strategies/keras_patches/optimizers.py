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

from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.collectives.gradient_options import GradientOptions
from tfdist.context import current_replica, current_strategy
from tfdist.gradients.elementwise import check_elementwise
from tfdist.gradients.path import GradientPath, current_path
from tfdist.keras_internals.patching import Wrapper
from tfdist.sharding.layout import layout_of, update_layout
from tfdist.sharding.parts import FlatShard
from tfdist.zero.update import LocalShard, all_gather_parameters

__all__ = ["WRAPPERS"]


def _apply_gradients(original, self, grads, trainable_variables):
    """Before accumulation: a micro-step's gradient counts by that micro-step's shares."""
    replica = current_replica()
    if replica is None:
        return original(self, grads, trainable_variables)
    path = GradientPath(replica, self, trainable_variables)
    if any(layout_of(variable).slice is not None for variable in path.variables):
        check_elementwise(self)
    replica.gradient_paths.append(path)
    try:
        grads = path.weigh(grads)
        if path.accumulates_global():
            grads = path.reduce_once(grads)
        return original(self, grads, trainable_variables)
    finally:
        replica.gradient_paths.pop()


def _clip_gradients(original, self, grads):
    """After accumulation and before clipping: the one reduction of the step."""
    path = current_path()
    if path is None:
        return original(self, grads)
    grads = path.reduce_once(grads)
    return path.clip(grads) if path.is_spread() else original(self, grads)


def _all_reduce_sum_gradients(original, self, grads_and_vars):
    """Where Keras would reduce: for optimizers that do not clip at all."""
    replica = current_replica()
    if replica is None:
        return original(self, grads_and_vars)
    grads_and_vars = list(grads_and_vars)
    path = current_path() or GradientPath(replica, self, [v for _, v in grads_and_vars])
    grads = path.reduce_once([grad for grad, _ in grads_and_vars])
    return [(grad, variable) for grad, (_, variable) in zip(grads, grads_and_vars, strict=True)]


def _build(original, self, variables):
    """Under ZeRO the state of each parameter is that of this rank's flat shard."""
    strategy = current_strategy()
    if strategy is not None and strategy.zero_stage:
        check_elementwise(self)
        for variable in variables:
            layout = layout_of(variable)
            group = strategy.group(*layout.gradient_axes(strategy.mesh))
            state = layout.flat or FlatShard(group, tuple(variable.shape))
            update_layout(variable, state=state)
    return original(self, variables)


def _add_variable_from_reference(original, self, reference_variable, name=None, *args, **kwargs):
    """The moments of a slice are slices of the moments, and lie where it lies."""
    layout = layout_of(reference_variable)
    state = layout.state
    if state is not None and name == "gradient_accumulator":
        strategy = current_strategy()
        state = state if strategy is not None and strategy.zero_stage >= 2 else None
    like = reference_variable
    if state is not None:
        like = _Shape(reference_variable.path, (state.share,), reference_variable.dtype)
    variable = original(self, like, name, *args, **kwargs)
    if layout.is_spread:
        update_layout(variable, slice=layout.slice, flat=state, stage=layout.stage)
    return variable


@dataclasses.dataclass
class _Shape:
    """All that an optimizer's variable takes over from its reference."""

    path: str
    shape: tuple[int, ...]
    dtype: str


def _update_step(original, self, grads, trainable_variables, learning_rate):
    """Under ZeRO each rank updates its shards, and then all get the whole parameters."""
    with _local_shards(trainable_variables) as variables:
        return original(self, grads, variables, learning_rate)


def _of_shards(original, self, trainable_variables):
    """Moving averages of parameters are split as the rest of the state."""
    with _local_shards(trainable_variables) as variables:
        return original(self, variables)


@contextlib.contextmanager
def _local_shards(variables) -> Iterator[list]:
    """Variables, those whose state is split as their shards; in the end all ranks get the whole."""
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
        # At the end of `fit`, where averages become the parameters, no strategy is in scope.
        strategy = current_strategy()
        options = GradientOptions() if strategy is None else strategy.gradient_options
        all_gather_parameters(changed, options)


WRAPPERS = (
    Wrapper(
        BaseOptimizer,
        "_backend_apply_gradients",
        ("self", "grads", "trainable_variables"),
        _apply_gradients,
    ),
    Wrapper(BaseOptimizer, "_clip_gradients", ("self", "grads"), _clip_gradients),
    Wrapper(
        TFOptimizer,
        "_all_reduce_sum_gradients",
        ("self", "grads_and_vars"),
        _all_reduce_sum_gradients,
    ),
    Wrapper(
        BaseOptimizer,
        "add_variable_from_reference",
        ("self", "reference_variable"),
        _add_variable_from_reference,
    ),
    Wrapper(BaseOptimizer, "build", ("self", "variables"), _build),
    Wrapper(
        TFOptimizer,
        "_backend_update_step",
        ("self", "grads", "trainable_variables", "learning_rate"),
        _update_step,
    ),
    Wrapper(
        BaseOptimizer,
        "_update_model_variables_moving_average",
        ("self", "trainable_variables"),
        _of_shards,
    ),
    Wrapper(
        TFOptimizer,
        "_overwrite_model_variables_with_average_value",
        ("self", "trainable_variables"),
        _of_shards,
    ),
)
