"""Checks of the arguments that collectives share."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.engine import REDUCTIONS
from tfdist.collectives.group import Group
from tfdist.utils import checks


def check_reduction(reduction: str, dtype: tf.DType) -> None:
    """Raises ValueError if a reduction is unknown, or not defined for a dtype."""
    checks.one_of("reduction", reduction, REDUCTIONS)
    if dtype == tf.bool and reduction not in ("max", "min"):
        raise ValueError(
            "Booleans require reduction='max' (any) or 'min' (all). Received: "
            f"{reduction=!r}. Cast to an integer dtype to count them."
        )
    if dtype.is_complex and reduction in ("max", "min"):
        raise ValueError(
            f"Complex numbers do not have an order. Received: {reduction=!r} of {dtype.name}. "
            "Reduce their `tf.abs`."
        )
    if reduction == "mean" and not (dtype.is_floating or dtype.is_complex):
        raise ValueError(
            f"The mean requires a floating dtype. Received: {dtype.name}. Cast to a floating dtype "
            "first, or use reduction='sum'."
        )


def checked_tensor(
    tensor, group: Group, name: str | None, argument: str = "tensor", *, may_be_text: bool = False
) -> tf.Tensor:
    """The argument of a collective as a tensor, with its group and name checked."""
    check_group(group, name)
    try:
        found = tf.convert_to_tensor(tensor)
    except (ValueError, TypeError, OverflowError) as error:
        meaning = "a tensor, or an object that TensorFlow converts to one"
        raise checks.refuse(argument, tensor, meaning, TypeError) from error
    refused = {tf.variant, tf.resource} if may_be_text else {tf.string, tf.variant, tf.resource}
    if found.dtype in refused:
        raise TypeError(
            "This operation requires numbers or booleans; only `all_gather` supports strings. "
            f"Received: a tensor of dtype {found.dtype.name}. Send ids instead of strings."
        )
    return found


def check_group(group: Group, name: str | None) -> None:
    """Raises TypeError if the group is not a `Group`, and ValueError for a wrong name."""
    checks.instance("group", group, Group, "a Group, such as `strategy.group()`")
    checks.text("name", name, optional=True)


def checked_axis(tensor, axis: int, operation: str) -> int:
    """The dim `axis`, counted from the front."""
    rank = tensor.shape.rank
    if rank == 0:
        raise ValueError(
            f"`{operation}` requires a tensor of rank one or more. Received: a scalar."
        )
    if rank is None:
        return checks.integer("axis", axis)
    return checks.integer("axis", axis, minimum=-rank, maximum=rank - 1) % rank


def checked_splits(splits, tensor, group: Group) -> tf.Tensor:
    """The number of rows for each member, checked as far as the values are known."""
    meaning = f"{group.size} int32 numbers of rows, one per member, that sum to those of `tensor`"
    try:
        found = tf.convert_to_tensor(splits, dtype=tf.int32)
        found.shape.assert_is_compatible_with([group.size])
    except (ValueError, TypeError, OverflowError) as error:
        raise checks.refuse("splits", splits, meaning) from error
    values, rows = tf.get_static_value(found), tensor.shape[0]
    if values is not None and ((values < 0).any() or rows not in (None, values.sum())):
        raise checks.refuse("splits", splits, meaning)
    return found


def check_divides(tensor, axis: int, group: Group, operation: str) -> None:
    """Raises ValueError if a known size is not divisible by the size of the group."""
    size = tensor.shape[axis]
    if size is not None and size % group.size:
        raise ValueError(
            f"`{operation}` requires that dim {axis} is divisible by {group.size}, the size of the "
            f"{group.label} group. Received: shape {tuple(tensor.shape)}."
        )


def checked_member(index: int, group: Group, argument: str) -> int:
    """The index of a member of the group."""
    return checks.integer(argument, index, minimum=0, maximum=group.size - 1)


def checked_other(index: int, group: Group, argument: str) -> int:
    """The index of another member of the group."""
    if checked_member(index, group, argument) == group.rank:
        raise ValueError(
            f"A rank cannot send to itself: `{argument}` must be another member. Received: {index}."
        )
    return int(index)
