"""Checks of the arguments that collectives share."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.engine import REDUCTIONS
from tfdist.collectives.group import Group
from tfdist.utils import checks


def check_reduction(reduction: str, dtype: tf.DType) -> None:
    """Raises ValueError where a reduction is unknown, or has no meaning for a dtype."""
    checks.one_of("reduction", reduction, REDUCTIONS)
    if dtype == tf.bool and reduction not in ("max", "min"):
        raise ValueError(
            f"Booleans reduce by 'max' (any) or 'min' (all). Received: reduction={reduction!r}; "
            "cast to an integer dtype to count them."
        )
    if dtype.is_complex and reduction in ("max", "min"):
        raise ValueError(
            f"Complex numbers have no order. Received: reduction={reduction!r} of {dtype.name}; "
            "reduce their `tf.abs`."
        )
    if reduction == "mean" and not (dtype.is_floating or dtype.is_complex):
        raise ValueError(
            f"The mean of {dtype.name} is not {dtype.name}. Cast to a floating dtype first, or "
            "use reduction='sum'."
        )


def checked_tensor(
    tensor, group: Group, name: str | None, argument: str = "tensor", *, may_be_text: bool = False
) -> tf.Tensor:
    """What is to be carried, as a tensor, once the group and the name are known to be some."""
    check_group(group, name)
    try:
        found = tf.convert_to_tensor(tensor)
    except (ValueError, TypeError, OverflowError) as error:
        raise checks.refuse(
            argument, tensor, "a tensor, or what TensorFlow makes one of", TypeError
        ) from error
    if not (may_be_text and found.dtype == tf.string):
        check_carried(found.dtype)
    return found


def check_carried(dtype: tf.DType) -> None:
    """Raises TypeError where an operation cannot carry what is no number."""
    if dtype in (tf.string, tf.variant, tf.resource):
        raise TypeError(
            "This operation carries numbers and booleans; strings are carried by `all_gather` alone. "
            f"Received: a tensor of dtype {dtype.name}. Send what the strings stand for, such as ids."
        )


def check_group(group: Group, name: str | None) -> None:
    """Raises TypeError where this is no group, or the name no text."""
    checks.instance("group", group, Group, "a Group, as of `strategy.group()`")
    if name is not None:
        checks.text("name", name, optional=True)


def checked_axis(tensor, axis: int, operation: str) -> int:
    """Which dim `axis` is, counted from the front."""
    rank = tensor.shape.rank
    if rank == 0:
        raise ValueError(f"`{operation}` works along a dim of `tensor`. Received: a scalar.")
    if rank is None:
        return checks.integer("axis", axis)
    return checks.integer("axis", axis, minimum=-rank, maximum=rank - 1) % rank


def checked_splits(splits, tensor, group: Group) -> tf.Tensor:
    """How many rows go to each member, as far as that is known now."""
    meaning = f"{group.size} int32 numbers of rows, for the members, that sum to those of `tensor`"
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
    """Raises ValueError where a known size does not divide by that of the group."""
    size = tensor.shape[axis]
    if size is not None and size % group.size:
        raise ValueError(
            f"`{operation}` splits dim {axis} evenly over the {group.size} ranks of the "
            f"{group.label} group. Received: shape {tuple(tensor.shape)}."
        )


def checked_member(index: int, group: Group, argument: str) -> int:
    """A place in the group, once it is known to be one."""
    return checks.integer(argument, index, minimum=0, maximum=group.size - 1)


def checked_other(index: int, group: Group, argument: str) -> int:
    """The place of another member, once it is known to be one."""
    if checked_member(index, group, argument) == group.rank:
        raise ValueError(
            f"A rank does not send to itself: `{argument}` is another member. Received: {index}."
        )
    return int(index)
