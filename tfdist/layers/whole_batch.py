"""Losses and metrics of a whole batch, and how the states of metrics are aggregated.

A rank has some rows of the batch. A function with a number for each row needs nothing; one with a
number for all of them is another one of fewer rows, unless it is a mean over rows.
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
    """A loss or metric function that is given the rows of the whole batch, on every rank.

    Its value is the same on all ranks, and its gradient that of one process. In a pipeline it
    requires `num_microbatches=1`.

    ```python
    model.compile("adam", loss=over_batch(soft_dice), metrics=[over_batch(dice_coefficient)])
    ```

    Args:
        function: A function of `y_true` and `y_pred`, nests of tensors of shape [rows, ...], such as one
            that compares rows with each other or takes a quotient of sums over them; or a
            `keras.losses.Loss`.

    Returns:
        A function of the same name.

    Raises:
        TypeError: It is not callable.
    """
    _check(function)

    @functools.wraps(function, updated=())
    def gathered(y_true, y_pred, *args, **kwargs):
        return function(*all_rows((y_true, y_pred)), *args, **kwargs)

    setattr(gathered, _GATHERS, True)
    return _declared(gathered, function)


def mean_of_rows(function: Callable) -> Callable:
    """A loss or metric function whose value is a mean over rows: so declared, it is used as it is.

    Args:
        function: A function of `y_true` and `y_pred` that returns a scalar.

    Returns:
        A function of the same name.

    Raises:
        TypeError: It is not callable.
    """
    _check(function)

    @functools.wraps(function, updated=())
    def called(*args, **kwargs):
        return function(*args, **kwargs)

    return _declared(called, function)


def set_aggregation(variable: keras.Variable, aggregation: str) -> keras.Variable:
    """Says how the ranks' values of a metric's variable become one; the sum is the default.

    ```python
    self.largest = set_aggregation(self.add_weight(initializer="zeros", name="largest"), "max")
    ```

    Args:
        variable: A variable of a metric.
        aggregation: "sum", "mean", "max" or "min".

    Returns:
        The variable.

    Raises:
        TypeError: It is not a Keras variable.
        ValueError: The aggregation is unknown.
    """
    checks.instance("variable", variable, keras.Variable, "a Keras variable")
    setattr(variable, _AGGREGATION, checks.one_of("aggregation", aggregation, _AGGREGATIONS))
    return variable


def aggregation_of(variable: keras.Variable) -> str:
    """How the ranks' values of a metric's variable become one."""
    return getattr(variable, _AGGREGATION, variable.aggregation)


def is_declared(function: Any) -> bool:
    """Whether the user has said what a function of a batch is."""
    return getattr(function, _DECLARED, False)


def compares_rows(function: Any, arguments: dict) -> bool:
    """Whether a function of Keras' has sums over the rows in it, or compares them with each other."""
    if function is keras.losses.circle:
        return arguments.get("ref_embeddings") is None
    if function not in (keras.losses.dice, keras.losses.tversky):
        return False
    axis = arguments.get("axis")
    return axis is None or 0 in tf.nest.flatten(axis)


def check_micro_batches(losses: Any, parts: int, name: str) -> None:
    """Refuses losses that need the rows of the whole batch where a step has micro-batches.

    Args:
        losses: What `compile` was given: a nest of losses, functions and names.
        parts: The number of micro-batches.
        name: The model's.

    Raises:
        ValueError: There is such a loss.
    """
    for loss in keras.tree.flatten(losses) if parts > 1 else ():
        loss = keras.losses.get(loss)
        function, arguments = getattr(loss, "fn", loss), loss_arguments(loss, {})
        if getattr(function, _GATHERS, False) or compares_rows(function, arguments):
            raise _of_micro_batches(parts, name)


def _of_micro_batches(parts: int, name: str) -> ValueError:
    return ValueError(
        "A loss over the whole batch cannot be computed from micro-batches. Received: "
        f"num_microbatches={parts} in `{name}`. Use num_microbatches=1, or a loss with a number for each "
        "row."
    )


def all_rows(values: Any) -> Any:
    """A nest of tensors of rows, in a step those of all ranks; outside of one as it is.

    Raises:
        ValueError: In a pipeline's step of several micro-batches.
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


def _check(function: Any) -> None:
    if isinstance(function, keras.metrics.Metric):
        raise checks.refuse(
            "function",
            function,
            "a function of y_true and y_pred, or a keras.losses.Loss",
            TypeError,
        )
    checks.function("function", function)


def _declared(wrapper: Any, function: Any) -> Callable:
    wrapper.__name__ = getattr(function, "__name__", None) or getattr(function, "name", "loss")
    setattr(wrapper, _DECLARED, True)
    return wrapper
