"""The collectives that layers, strategies and users call, with their gradients.

Written once for all engines. Every function takes this rank's tensor and a `Group`, and is called
by all members of the group, eagerly or inside a `tf.function`. Gradients are those of the sum of
all ranks' losses, so that a program over many ranks differentiates like the same program over one.
"""

from __future__ import annotations

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
from tfdist.collectives.group import Group
from tfdist.collectives.run import (
    SEND_NAME,
    Call,
    gather_text,
    receive_tensor,
    run,
    send_tensor,
    shape_of,
)
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
        ValueError: The reduction is unknown, or has no meaning for the dtype.
    """
    tensor = checked_tensor(tensor, group, name)
    check_reduction(reduction, tensor.dtype)
    if group.size == 1:
        return tf.identity(tensor)
    call = Call("all_reduce", group, name, reduction)

    @custom_gradient
    def reduce(x):
        y = run(call, x)

        def gradient(dy):
            if reduction in ("sum", "mean"):
                return run(Call("all_reduce", group, _backward(name), reduction), dy)
            # Shared evenly among all elements that attain the extremum, as tf.reduce_max does.
            attains = tf.cast(tf.equal(x, y), dy.dtype)
            sums = run(_sum(group, _backward(name)), tf.stack([dy, attains]))
            return attains * sums[0] / sums[1]

        return y, gradient

    return note_shared(reduce(tensor), is_sum=reduction == "sum")


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
        rows = gather_text(_to_front(tensor, axis), group, uneven, name)
        return note_shared(_from_front(rows, axis))
    call = Call("all_gather_uneven" if uneven else "all_gather", group, name)

    @custom_gradient
    def gather(x):
        rows = _to_front(x, axis)
        y = run(call, rows)
        if uneven:
            own = tf.shape(rows)[:1]
            sizes = run(Call("all_gather", group, f"{name or 'gathered'}/sizes"), own)
            start = tf.reduce_sum(sizes[: group.rank])

        def gradient(dy):
            dy = _to_front(dy, axis)
            if uneven:
                total = run(_sum(group, _backward(name)), dy)
                mine = total[start : start + own[0]]
            else:
                mine = run(Call("reduce_scatter", group, _backward(name), "sum"), dy)
            mine.set_shape(rows.shape)
            return _from_front(mine, axis)

        return _from_front(y, axis), gradient

    return note_shared(gather(tensor))


def reduce_scatter(
    tensor, group: Group, reduction: str = "sum", axis: int = 0, *, name: str | None = None
):
    """Reduces a tensor over the group; each member gets its equal share along `axis`.

    Args:
        tensor: A tensor of one shape on all members, whose size along `axis` divides by the size
            of the group.
        group: The group.
        reduction: As for `all_reduce`.
        axis: The dim along which the result is split, in group order.
        name: What the operation serves, for messages.

    Raises:
        ValueError: The size along `axis` is known and does not divide.
    """
    tensor = checked_tensor(tensor, group, name)
    axis = checked_axis(tensor, axis, "reduce_scatter")
    check_reduction(reduction, tensor.dtype)
    check_divides(tensor, axis, group, "reduce_scatter")
    if group.size == 1:
        return tf.identity(tensor)

    @custom_gradient
    def scatter(x):
        y = run(Call("reduce_scatter", group, name, reduction), _to_front(x, axis))

        def gradient(dy):
            if reduction not in ("sum", "mean"):
                raise NotImplementedError(
                    f"reduce_scatter has a gradient for 'sum' and 'mean'. Received: {reduction!r}."
                )
            dx = run(Call("all_gather", group, _backward(name)), _to_front(dy, axis))
            if reduction == "mean":
                dx /= tf.cast(group.size, dx.dtype)
            return _from_front(dx, axis)

        return _from_front(y, axis), gradient

    return scatter(tensor)


def all_to_all(tensor, group: Group, splits=None, *, name: str | None = None):
    """Sends a part of dim 0 to each member, and returns the parts that came, in group order.

    Args:
        tensor: A tensor of rank one or more.
        group: The group.
        splits: None for equal parts. Else an int32 tensor of shape [group.size]: how many rows go
            to each member; they sum to the size of dim 0.
        name: What the operation serves, for messages.

    Returns:
        The received rows; with `splits` also how many came from each member, int32 of shape
        [group.size].

    Raises:
        ValueError: Without `splits`, dim 0 is known and does not divide by the size of the group.
    """
    tensor = checked_tensor(tensor, group, name)
    checked_axis(tensor, 0, "all_to_all")
    if splits is None:
        check_divides(tensor, 0, group, "all_to_all")
        if group.size == 1:
            return tf.identity(tensor)

        @custom_gradient
        def exchange(x):
            backward = Call("all_to_all", group, _backward(name))
            return run(Call("all_to_all", group, name), x), lambda dy: run(backward, dy)

        return exchange(tensor)

    splits = checked_splits(splits, tensor, group)
    if group.size == 1:
        return tf.identity(tensor), splits

    @custom_gradient
    def exchange_uneven(x):
        y, received = run(Call("all_to_all_uneven", group, name), x, splits)

        def gradient(dy, _):
            return run(Call("all_to_all_uneven", group, _backward(name)), dy, received)[0]

        return (y, received), gradient

    return exchange_uneven(tensor)


def broadcast(tensor, group: Group, root: int = 0, *, name: str | None = None):
    """Gives every member the tensor of one.

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

    @custom_gradient
    def copy(x):
        y = run(Call("broadcast", group, name, root=root), x)

        def gradient(dy):
            total = run(_sum(group, _backward(name)), dy)
            return total if group.rank == root else tf.zeros_like(total)

        return y, gradient

    return note_shared(copy(tensor))


def send(tensor, group: Group, to: int, *, name: str | None = None):
    """Sends a tensor to one member, which calls `recv` at the same time.

    Args:
        tensor: The tensor.
        group: The group.
        to: The receiver's place in the group.
        name: What the transfer serves, for messages; the same at the receiver.

    Returns:
        The tensor itself. Its gradient includes what the receiver's copy contributes, if the
        returned tensor is what the rest of the sender's computation uses.

    Raises:
        ValueError: `to` is this rank or not in the group.
    """
    tensor = checked_tensor(tensor, group, name)
    to = checked_other(to, group, "to")
    backward = _backward(name or SEND_NAME)

    @custom_gradient
    def transfer(x):
        def gradient(dy):
            return dy + receive_tensor(shape_of(dy), dy.dtype, group, to, name=backward)

        return send_tensor(x, group, to, name=name), gradient

    return transfer(tensor)


def recv(like, group: Group, source: int, *, name: str | None = None):
    """Receives a tensor from one member, which calls `send` at the same time.

    Args:
        like: A tensor of the shape and dtype that will come. Its values are not read; a gradient
            tape that is to send the gradient back must watch it, and its own gradient is zero.
        group: The group.
        source: The sender's place in the group.
        name: What the transfer serves, for messages; the same at the sender.

    Raises:
        ValueError: `source` is this rank or not in the group.
    """
    like = checked_tensor(like, group, name, "like")
    source = checked_other(source, group, "source")
    backward = _backward(name or SEND_NAME)

    @custom_gradient
    def transfer(x):
        def gradient(dy):
            return tf.zeros_like(send_tensor(dy, group, source, name=backward))

        return receive_tensor(shape_of(x), x.dtype, group, source, name=name), gradient

    return transfer(like)


def barrier(group: Group, *, name: str | None = None) -> None:
    """Returns when every member has called it. Eager only.

    Raises:
        RuntimeError: Called while a graph is built, where it could order nothing.
    """
    check_group(group, name)
    if not tf.executing_eagerly():
        raise RuntimeError("`barrier` is called eagerly, outside of tf.function.")
    if group.size > 1:
        run(Call("all_reduce", group, name or "barrier", "max"), tf.zeros([1], tf.int32))


def _to_front(tensor, axis: int):
    return tensor if axis == 0 else tf.transpose(tensor, _swapped(tensor.shape.rank, axis))


def _from_front(tensor, axis: int):
    return _to_front(tensor, axis)


def _swapped(rank: int, axis: int) -> list[int]:
    """The permutation that swaps dim 0 and `axis`; it is its own inverse."""
    order = list(range(rank))
    order[0], order[axis] = order[axis], order[0]
    return order


def _sum(group: Group, name: str) -> Call:
    return Call("all_reduce", group, name, "sum")


def _backward(name: str | None) -> str:
    return f"{name}/backward" if name else "backward"
