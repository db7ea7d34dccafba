"""The collectives that layers, strategies and users call, with their gradients.

They are independent of the engine. Every function has this rank's tensor and a `Group` as arguments, and is
called by all members of the group, eagerly or inside a `tf.function`. Gradients are those of the sum of all
ranks' losses, so that a program over many ranks differentiates like the same program over one.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.collectives.arguments import (
    check_divides,
    check_group,
    check_reduction,
    checked_axis,
    checked_member,
    checked_other,
    checked_splits,
    checked_tensor,
)
from tfdist.collectives.engine import shape_of
from tfdist.collectives.group import Group
from tfdist.collectives.names import backward_name
from tfdist.collectives.run import SEND_NAME, Call, gather_text, receive_tensor, run, send_tensor
from tfdist.collectives.shared import note_shared
from tfdist.utils import checks


def all_reduce(tensor, group: Group, reduction: str = "sum", *, name: str | None = None):
    """Reduces a tensor over the group; every member gets the result.

    Args:
        tensor: A tensor of any shape, the same on all members.
        group: The group.
        reduction: "sum", "mean" (floating dtypes), "max" or "min". For bool only "max" (any) and
            "min" (all).
        name: What the operation serves, for messages.

    Returns:
        A tensor of the shape and dtype of `tensor`.

    Raises:
        ValueError: The reduction is unknown, or not defined for the dtype.
    """
    tensor = checked_tensor(tensor, group, name)
    check_reduction(reduction, tensor.dtype)
    if group.size == 1:
        return tf.identity(tensor)
    return note_shared(_reducer(group, reduction, name)(tensor), is_sum=reduction == "sum")


def _reducer(group: Group, reduction: str, name: str | None):
    """An `all_reduce` whose results are not recorded as the same on all ranks: also for gradients, and theirs."""

    @custom_gradient
    def reduce(x):
        y = run(Call("all_reduce", group, name, reduction), x)

        def gradient(dy):
            if reduction in ("sum", "mean"):
                return _reducer(group, reduction, backward_name(name))(dy)
            # Split evenly among all elements that attain the extremum, as tf.reduce_max does.
            attains = tf.cast(tf.equal(x, y), dy.dtype)
            sums = _reducer(group, "sum", backward_name(name))(tf.stack([dy, attains]))
            return attains * sums[0] / sums[1]

        return y, gradient

    return reduce


def all_gather(
    tensor, group: Group, axis: int = 0, *, uneven: bool = False, name: str | None = None
):
    """Concatenates the members' tensors in group order; every member gets the result.

    Args:
        tensor: A tensor of rank one or more; also one of strings, which have no gradient.
        group: The group.
        axis: The dim along which the tensors are joined.
        uneven: Whether the members' sizes along `axis` may differ. All other sizes are the same
            on all members, and with `uneven=False` this one too.
        name: What the operation serves, for messages.

    Returns:
        A tensor whose size along `axis` is the sum of the members'.
    """
    tensor = checked_tensor(tensor, group, name, may_be_text=True)
    checks.boolean("uneven", uneven)
    axis = checked_axis(tensor, axis, "all_gather")
    if group.size == 1:
        return tf.identity(tensor)
    if tensor.dtype == tf.string:
        rows = gather_text(_swapped(tensor, axis), group, uneven, name)
        return note_shared(_swapped(rows, axis))
    call = Call("all_gather_uneven" if uneven else "all_gather", group, name)

    @custom_gradient
    def gather(x):
        rows = _swapped(x, axis)
        y = run(call, rows)
        if uneven:
            own = tf.shape(rows)[:1]
            sizes = run(Call("all_gather", group, f"{name or 'gathered'}/sizes"), own)
            start = tf.reduce_sum(sizes[: group.rank])

        def gradient(dy):
            if uneven:
                total = _reducer(group, "sum", backward_name(name))(_swapped(dy, axis))
                mine = _swapped(total[start : start + own[0]], axis)
            else:
                mine = reduce_scatter(dy, group, axis=axis, name=backward_name(name))
            return tf.ensure_shape(mine, x.shape)

        return _swapped(y, axis), gradient

    return note_shared(gather(tensor))


def reduce_scatter(
    tensor, group: Group, reduction: str = "sum", axis: int = 0, *, name: str | None = None
):
    """Reduces a tensor over the group; each member gets its equal share along `axis`.

    Args:
        tensor: A tensor of the same shape on all members, whose size along `axis` is a multiple of
            the size of the group.
        group: The group.
        reduction: As for `all_reduce`.
        axis: The dim along which the result is split, in group order.
        name: What the operation serves, for messages.

    Raises:
        ValueError: The size along `axis` is known and not a multiple of the size of the group.
    """
    tensor = checked_tensor(tensor, group, name)
    axis = checked_axis(tensor, axis, "reduce_scatter")
    check_reduction(reduction, tensor.dtype)
    check_divides(tensor, axis, group, "reduce_scatter")
    if group.size == 1:
        return tf.identity(tensor)

    @custom_gradient
    def scatter(x):
        y = run(Call("reduce_scatter", group, name, reduction), _swapped(x, axis))

        def gradient(dy):
            if reduction not in ("sum", "mean"):
                raise NotImplementedError(
                    "The gradient of reduce_scatter is not supported except for 'sum' and 'mean'. "
                    f"Received: {reduction!r}."
                )
            dx = all_gather(dy, group, axis, name=backward_name(name))
            return dx / tf.cast(group.size, dx.dtype) if reduction == "mean" else dx

        return _swapped(y, axis), gradient

    return scatter(tensor)


def all_to_all(tensor, group: Group, splits=None, *, name: str | None = None):
    """Sends a part of dim 0 to each member, and returns the received parts in group order.

    Args:
        tensor: A tensor of rank one or more.
        group: The group.
        splits: None for equal parts. Otherwise the number of rows for each member, an int32 tensor of
            shape [group.size] that sums to the size of dim 0.
        name: What the operation serves, for messages.

    Returns:
        The received rows; with `splits` also the number of rows from each member, int32 of shape
        [group.size].

    Raises:
        ValueError: Without `splits`, dim 0 is known and not a multiple of the size of the group.
    """
    tensor = checked_tensor(tensor, group, name)
    checked_axis(tensor, 0, "all_to_all")
    if splits is None:
        check_divides(tensor, 0, group, "all_to_all")
    else:
        splits = checked_splits(splits, tensor, group)
    if group.size == 1:
        same = tf.identity(tensor)
        return same if splits is None else (same, splits)

    @custom_gradient
    def exchange(x):
        back = functools.partial(all_to_all, group=group, name=backward_name(name))
        if splits is None:
            return run(Call("all_to_all", group, name), x), back
        y, received = run(Call("all_to_all_uneven", group, name), x, splits)
        return (y, received), lambda dy, _: back(dy, splits=received)[0]

    return exchange(tensor)


def broadcast(tensor, group: Group, root: int = 0, *, name: str | None = None):
    """Sends the tensor of one member to all members.

    Args:
        tensor: The tensor; members other than the root pass one of the same shape and dtype.
        group: The group.
        root: The root's place in the group.
        name: What the operation serves, for messages.

    Raises:
        ValueError: `root` is not in the group.
    """
    tensor = checked_tensor(tensor, group, name)
    root = checked_member(root, group, "root")
    if group.size == 1:
        return tf.identity(tensor)

    call, backward = Call("broadcast", group, name, root=root), backward_name(name)

    @custom_gradient
    def sum_at_root(dy):
        total = run(Call("all_reduce", group, backward, "sum"), dy)
        dx = total if group.rank == root else tf.zeros_like(total)
        return dx, functools.partial(broadcast, group=group, root=root, name=backward)

    return note_shared(custom_gradient(lambda x: (run(call, x), sum_at_root))(tensor))


def send(tensor, group: Group, to: int, *, name: str | None = None):
    """Sends a tensor to one member, which calls `recv` at the same time.

    Args:
        tensor: The tensor.
        group: The group.
        to: The receiver's place in the group.
        name: What the transfer serves, for messages; the same at the receiver.

    Returns:
        The tensor itself. Its gradient includes the contribution of the receiver's copy, if the rest of
        the sender's computation uses the returned tensor.

    Raises:
        ValueError: `to` is this rank or not in the group.
    """
    tensor = checked_tensor(tensor, group, name)
    to = checked_other(to, group, "to")
    backward = backward_name(name or SEND_NAME)

    def gradient(dy):
        return dy + recv(dy, group, to, name=backward)

    return custom_gradient(lambda x: (send_tensor(x, group, to, name=name), gradient))(tensor)


def recv(like, group: Group, source: int, *, name: str | None = None):
    """Receives a tensor from one member, which calls `send` at the same time.

    Args:
        like: A tensor of the shape and dtype that will be received. Its values are not read; a
            gradient tape must watch it to send the gradient back, and its own gradient is zero.
        group: The group.
        source: The sender's place in the group.
        name: What the transfer serves, for messages; the same at the sender.

    Raises:
        ValueError: `source` is this rank or not in the group.
    """
    like = checked_tensor(like, group, name, "like")
    source = checked_other(source, group, "source")
    backward = backward_name(name or SEND_NAME)

    @custom_gradient
    def give_back(dy):
        sent = send_tensor(dy, group, source, name=backward)
        again = functools.partial(recv, group=group, source=source, name=backward_name(backward))
        return tf.zeros_like(sent), again

    @custom_gradient
    def transfer(x):
        return receive_tensor(shape_of(x), x.dtype, group, source, name=name), give_back

    return transfer(like)


def barrier(group: Group, *, name: str | None = None) -> None:
    """Returns when every member has called it. Eager only.

    Raises:
        RuntimeError: Called during the construction of a graph, where it would have no effect.
    """
    check_group(group, name)
    if not tf.executing_eagerly():
        raise RuntimeError("`barrier` must be called eagerly, outside tf.function.")
    if group.size > 1:
        run(Call("all_reduce", group, name or "barrier", "max"), tf.zeros([1], tf.int32))


def _swapped(tensor, axis: int):
    """Swaps dim 0 and `axis`, which is its own inverse."""
    if axis == 0:
        return tensor
    order = list(range(tensor.shape.rank))
    order[0], order[axis] = axis, 0
    return tf.transpose(tensor, order)
