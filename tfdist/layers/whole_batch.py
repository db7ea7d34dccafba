"""Losses and metrics of a whole batch, and the aggregation of the states of metrics.

A rank has some rows of the batch. A function that returns a number per row is correct on any ranks. One
that returns a single number for all rows is correct only if it is a mean over rows, or is computed from the
rows of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.graph.provenance import with_provenance
from tfdist.backend.keras.attributes import loss_arguments
from tfdist.step.context import current_replica, role_of
from tfdist.utils import checks

_DECLARED, _GATHERS = "_tfdist_declared", "_tfdist_gathers"
_AGGREGATION = "_tfdist_aggregation"
_AGGREGATIONS = ("sum", "mean", "max", "min")


def over_batch(function: Callable) -> Callable:
    """Makes a loss or metric function receive the rows of the whole batch, on every rank.

    The value is the same on all ranks, and the gradient that of one process. A pipeline requires
    `num_microbatches=1`.

    ```python
    model.compile("adam", loss=over_batch(soft_dice), metrics=[over_batch(dice_coefficient)])
    ```

    Args:
        function: A function of `y_true` and `y_pred`, nests of tensors of shape [rows, ...], such as one
            that compares rows with each other or is a quotient of sums over them; or a
            `keras.losses.Loss`.

    Returns:
        A function of the same name.

    Raises:
        TypeError: The function is not callable.
    """

    def gathered(y_true, y_pred, *args, **kwargs):
        return function(*all_rows((y_true, y_pred)), *args, **kwargs)

    setattr(gathered, _GATHERS, True)
    return _declared(gathered, function)


def mean_of_rows(function: Callable) -> Callable:
    """Declares that the value of a loss or metric function is a mean over rows, so that it is used unchanged.

    Args:
        function: A function of `y_true` and `y_pred` that returns a scalar.

    Returns:
        A function of the same name.

    Raises:
        TypeError: The function is not callable.
    """
    return _declared(lambda *args, **kwargs: function(*args, **kwargs), function)


def set_aggregation(variable: keras.Variable, aggregation: str) -> keras.Variable:
    """Sets the aggregation of the ranks' values of a metric's variable; the default is the sum.

    ```python
    self.largest = set_aggregation(self.add_weight(initializer="zeros", name="largest"), "max")
    ```

    Args:
        variable: A variable of a metric.
        aggregation: "sum", "mean", "max" or "min".

    Returns:
        The variable.

    Raises:
        TypeError: `variable` is not a Keras variable.
        ValueError: The aggregation is unknown.
    """
    checks.instance("variable", variable, keras.Variable, "a Keras variable")
    setattr(variable, _AGGREGATION, checks.one_of("aggregation", aggregation, _AGGREGATIONS))
    return variable


def aggregation_of(variable: keras.Variable) -> str:
    """The aggregation of the ranks' values of a metric's variable."""
    return getattr(variable, _AGGREGATION, variable.aggregation)


def is_declared(function: Any) -> bool:
    """Whether a function is the result of `over_batch` or `mean_of_rows`."""
    return getattr(function, _DECLARED, False)


def compares_rows(function: Any, arguments: dict) -> bool:
    """Whether a function of Keras contains sums over rows, or compares rows with each other."""
    if function is keras.losses.circle:
        return arguments.get("ref_embeddings") is None
    if function not in (keras.losses.dice, keras.losses.tversky):
        return False
    axis = arguments.get("axis")
    return axis is None or 0 in tf.nest.flatten(axis)


def check_micro_batches(losses: Any, parts: int, name: str) -> None:
    """Checks that no loss requires the rows of the whole batch if a step has several micro-batches.

    Args:
        losses: The losses that were passed to `compile`: a nest of losses, functions and names.
        parts: The number of micro-batches.
        name: The name of the model.

    Raises:
        ValueError: A loss requires them.
    """
    for loss in keras.tree.flatten(losses) if parts > 1 else ():
        loss = keras.losses.get(loss)
        function, arguments = getattr(loss, "fn", loss), loss_arguments(loss, {})
        if getattr(function, _GATHERS, False) or compares_rows(function, arguments):
            raise _of_micro_batches(parts, name)


def _of_micro_batches(parts: int, name: str) -> ValueError:
    return ValueError(
        "A loss over the whole batch cannot be computed from micro-batches. Received: "
        f"num_microbatches={parts} in `{name}`. Use num_microbatches=1, or a loss that returns a number "
        "per row."
    )


def all_rows(values: Any) -> Any:
    """Gathers the rows of all ranks, for each tensor of a nest; outside of a strategy returns the nest.

    Raises:
        ValueError: The step is that of a pipeline with several micro-batches.
    """
    replica = current_replica()
    if replica is None:
        return values
    step = replica.step
    if step is not None and step.kind == "train":
        parts = role_of(step.model).num_microbatches
        if parts > 1:
            raise _of_micro_batches(parts, step.model.name)
    if replica.strategy.row_group.size == 1:
        return values

    def gather(tensor):
        if tensor is None:
            return None
        tensor = keras.ops.convert_to_tensor(tensor)
        if not tensor.shape.rank:
            return tensor
        return with_provenance(lambda part: replica.all_gather(part, 0), tensor)

    return tf.nest.map_structure(gather, values)


def _declared(wrapper: Any, function: Any) -> Callable:
    if isinstance(function, keras.metrics.Metric):
        meaning = "a function of y_true and y_pred, or a keras.losses.Loss"
        raise checks.refuse("function", function, meaning, TypeError)
    functools.update_wrapper(wrapper, checks.function("function", function), updated=())
    wrapper.__name__ = getattr(function, "__name__", None) or getattr(function, "name", "loss")
    setattr(wrapper, _DECLARED, True)
    return wrapper
