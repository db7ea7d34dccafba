"""The collectives that layers, strategies and users call, with their gradients.

Written once for all engines. Every function takes this rank's tensor and a `Group`, and is called
by all members of the group, eagerly or inside a `tf.function`. Gradients are those of the sum of
all ranks' losses, so that a program over many ranks differentiates like the same program over one.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist import checks
from tfdist.collectives.engine import REDUCTIONS
from tfdist.collectives.group import Group
from tfdist.collectives.names import unique_name
from tfdist.graph.custom_gradient import custom_gradient

_SEND = "send-recv"

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "receive_tensor",
    "recv",
    "reduce_scatter",
    "send",
    "send_tensor",
]


def all_reduce(
    tensor, group: Group, reduction: str = "sum", *, bulk: bool = False, name: str | None = None
):
    """Reduces a tensor over the group; every member gets the result.

    Args:
        tensor: A tensor of any shape, the same on all members.
        group: The group.
        reduction: "sum", "mean" (floating dtypes), "max" or "min". For bool only "max" (any) and
            "min" (all).
        bulk: Whether nothing waits for the result soon, as with the gradients of a step: it then
            goes by the engine's own ring, together with others, and not directly.
        name: What the operation serves, for messages.

    Returns:
        A tensor of the shape and dtype of `tensor`.

    Raises:
        ValueError: The reduction is unknown, or has no meaning for the dtype.
    """
    tensor = _checked("tensor", tensor, group, name)
    _check_reduction(reduction, tensor.dtype)
    checks.boolean("bulk", bulk)
    if group.size == 1:
        return tf.identity(tensor)

    @custom_gradient
    def reduce(x):
        y = _raw_all_reduce(x, group, reduction, name, bulk)

        def gradient(dy):
            if reduction in ("sum", "mean"):
                return _raw_all_reduce(dy, group, reduction, _backward(name))
            # Shared evenly among all elements that attain the extremum, as tf.reduce_max does.
            attains = tf.cast(tf.equal(x, y), dy.dtype)
            sums = _raw_all_reduce(tf.stack([dy, attains]), group, "sum", _backward(name))
            return attains * sums[0] / sums[1]

        return y, gradient

    return reduce(tensor)


def all_gather(
    tensor, group: Group, axis: int = 0, *, uneven: bool = False, name: str | None = None
):
    """Concatenates the members' tensors in group order; every member gets the result.

    Args:
        tensor: A tensor of rank one or more.
        group: The group.
        axis: The dim along which the tensors are joined.
        uneven: Whether the members' sizes along `axis` may differ. All other sizes are the same
            on all members, and with `uneven=False` this one too.
        name: What the operation serves, for messages.

    Returns:
        A tensor whose size along `axis` is the sum of the members'.
    """
    tensor = _checked("tensor", tensor, group, name)
    checks.boolean("uneven", uneven)
    axis = _check_axis(tensor, axis, "all_gather")
    if group.size == 1:
        return tf.identity(tensor)

    @custom_gradient
    def gather(x):
        rows = _to_front(x, axis)
        y = _raw_all_gather(rows, group, uneven, name)
        if uneven:
            own = tf.shape(rows)[:1]
            sizes = _raw_all_gather(own, group, False, f"{name or 'gathered'}/sizes")
            start = tf.reduce_sum(sizes[: group.rank])

        def gradient(dy):
            dy = _to_front(dy, axis)
            if uneven:
                total = _raw_all_reduce(dy, group, "sum", _backward(name))
                mine = total[start : start + own[0]]
            else:
                mine = _raw_reduce_scatter(dy, group, "sum", _backward(name))
            mine.set_shape(rows.shape)
            return _from_front(mine, axis)

        return _from_front(y, axis), gradient

    return gather(tensor)


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
    tensor = _checked("tensor", tensor, group, name)
    axis = _check_axis(tensor, axis, "reduce_scatter")
    _check_reduction(reduction, tensor.dtype)
    _check_divides(tensor, axis, group, "reduce_scatter")
    if group.size == 1:
        return tf.identity(tensor)

    @custom_gradient
    def scatter(x):
        y = _raw_reduce_scatter(_to_front(x, axis), group, reduction, name)

        def gradient(dy):
            if reduction not in ("sum", "mean"):
                raise NotImplementedError(
                    f"reduce_scatter has a gradient for 'sum' and 'mean'. Received: {reduction!r}."
                )
            dx = _raw_all_gather(_to_front(dy, axis), group, False, _backward(name))
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
    tensor = _checked("tensor", tensor, group, name)
    _check_axis(tensor, 0, "all_to_all")
    if splits is None:
        _check_divides(tensor, 0, group, "all_to_all")
        if group.size == 1:
            return tf.identity(tensor)

        @custom_gradient
        def exchange(x):
            return _raw_all_to_all(x, group, name), lambda dy: _raw_all_to_all(
                dy, group, _backward(name)
            )

        return exchange(tensor)

    splits = _check_splits(splits, tensor, group)
    if group.size == 1:
        return tf.identity(tensor), splits

    @custom_gradient
    def exchange_uneven(x):
        y, received = _raw_all_to_all_uneven(x, splits, group, name)

        def gradient(dy, _):
            return _raw_all_to_all_uneven(dy, received, group, _backward(name))[0]

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
    tensor = _checked("tensor", tensor, group, name)
    root = _check_member(root, group, "root")
    if group.size == 1:
        return tf.identity(tensor)

    @custom_gradient
    def copy(x):
        y = _raw_broadcast(x, root, group, name)

        def gradient(dy):
            total = _raw_all_reduce(dy, group, "sum", _backward(name))
            return total if group.rank == root else tf.zeros_like(total)

        return y, gradient

    return copy(tensor)


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
    tensor = _checked("tensor", tensor, group, name)
    to = _check_other(to, group, "to")
    backward = _backward(name or _SEND)

    @custom_gradient
    def transfer(x):
        def gradient(dy):
            return dy + receive_tensor(_shape_of(dy), dy.dtype, group, to, name=backward)

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
    like = _checked("like", like, group, name)
    source = _check_other(source, group, "source")
    backward = _backward(name or _SEND)

    @custom_gradient
    def transfer(x):
        def gradient(dy):
            return tf.zeros_like(send_tensor(dy, group, source, name=backward))

        return receive_tensor(_shape_of(x), x.dtype, group, source, name=name), gradient

    return transfer(like)


def send_tensor(tensor: tf.Tensor, group: Group, to: int, *, name: str | None = None) -> tf.Tensor:
    """Sends a tensor to one member, which calls `receive_tensor`; without a gradient.

    Args:
        tensor: The tensor, of any shape and dtype.
        group: The group.
        to: The receiver's place in the group.
        name: What the transfer serves, for messages; the same at the receiver.

    Returns:
        The tensor, once it is on its way. It is sent also where nobody uses that.
    """
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    engine, other = group.engine, group.ranks[to]
    pair = engine.pair(other)
    transport = engine.transport(pair)
    wire, restore = _movable(tensor, transport)
    flat, reshape = _as_vector(wire)
    what = f"{engine.rank}-to-{other}/{name or _SEND}"
    sent = _run("send", what, pair, flat, lambda x, full: engine.send(x, other, full))
    if not transport.sends_unused:
        _use(sent, f"{pair.label}/{what}")
    return restore(reshape(sent))


def receive_tensor(
    shape: Sequence, dtype: tf.DType, group: Group, source: int, *, name: str | None = None
) -> tf.Tensor:
    """Receives a tensor from one member, which calls `send_tensor`; without a gradient.

    Args:
        shape: The sizes of its dims: ints, or int32 scalars where only the run knows.
        dtype: Its dtype.
        group: The group.
        source: The sender's place in the group.
        name: What the transfer serves, for messages; the same at the sender.
    """
    static = [size if isinstance(size, int) else None for size in shape]
    elements = tf.TensorShape(static).num_elements()
    if elements == 0:
        return tf.zeros(shape, dtype)
    engine, other = group.engine, group.ranks[source]
    pair = engine.pair(other)
    wire, restore = _movable_dtype(dtype, engine.transport(pair))
    size = elements if elements is not None else tf.reduce_prod(tf.stack(list(shape)))
    what = f"{other}-to-{engine.rank}/{name or _SEND}"
    flat = _run(
        "send",
        what,
        pair,
        tf.constant(0),
        lambda after, full: engine.receive(size, wire, other, full, after),
    )
    found = restore(tf.reshape(flat, shape))
    found.set_shape(static)
    return found


def _shape_of(tensor: tf.Tensor) -> list:
    """The sizes of a tensor's dims, ints where they are known."""
    sizes = tf.shape(tensor)
    return [sizes[i] if size is None else size for i, size in enumerate(tensor.shape)]


def barrier(group: Group, *, name: str | None = None) -> None:
    """Returns when every member has called it. Eager only.

    Raises:
        RuntimeError: Called while a graph is built, where it could order nothing.
    """
    _check_group(group, name)
    if not tf.executing_eagerly():
        raise RuntimeError("`barrier` is called eagerly, outside of tf.function.")
    if group.size > 1:
        _raw_all_reduce(tf.zeros([1], tf.int32), group, "max", name or "barrier")


def _raw_all_reduce(tensor, group: Group, reduction: str, name: str | None, bulk: bool = False):
    """Without a gradient; any dtype and shape."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    transport, dtype = group.engine.transport(group, reduces=True, bulk=bulk), tensor.dtype
    if dtype == tf.bool:
        whole = _raw_all_reduce(tf.cast(tensor, tf.int32), group, reduction, name, bulk)
        return tf.cast(whole, tf.bool)
    wire = tf.cast(tensor, transport.reduce_as.get(dtype, dtype))
    flat, restore = _as_vector(wire)
    flat = _run(
        "all_reduce", name, group, flat, lambda x, n: transport.all_reduce(x, group, reduction, n)
    )
    return tf.cast(restore(flat), dtype)


def _raw_all_gather(tensor, group: Group, uneven: bool, name: str | None):
    if not uneven and tensor.shape.num_elements() == 0:
        return tf.tile(tensor, [group.size] + [1] * (tensor.shape.rank - 1))
    transport = group.engine.transport(group)
    gather = transport.all_gather_uneven if uneven else transport.all_gather
    wire, restore = _movable(tensor, transport)
    gathered = _run("all_gather", name, group, wire, lambda x, n: gather(x, group, n))
    rows = tensor.shape[0]
    gathered.set_shape([None if uneven or rows is None else rows * group.size, *tensor.shape[1:]])
    return restore(gathered)


def _raw_reduce_scatter(tensor, group: Group, reduction: str, name: str | None):
    transport, dtype, rows = group.engine.transport(group), tensor.dtype, tensor.shape[0]
    if tensor.shape.num_elements() == 0:
        return tensor[: rows // group.size]
    if dtype == tf.bool:
        return tf.cast(
            _raw_reduce_scatter(tf.cast(tensor, tf.int32), group, reduction, name), tf.bool
        )
    wire = tf.cast(tensor, transport.reduce_as.get(dtype, dtype))
    share = _run(
        "reduce_scatter",
        name,
        group,
        wire,
        lambda x, n: transport.reduce_scatter(x, group, reduction, n),
    )
    share.set_shape([None if rows is None else rows // group.size, *tensor.shape[1:]])
    return tf.cast(share, dtype)


def _raw_all_to_all(tensor, group: Group, name: str | None):
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    transport = group.engine.transport(group)
    wire, restore = _movable(tensor, transport)
    received = _run("all_to_all", name, group, wire, lambda x, n: transport.all_to_all(x, group, n))
    received.set_shape(tensor.shape)
    return restore(received)


def _raw_all_to_all_uneven(tensor, splits, group: Group, name: str | None):
    transport = group.engine.transport(group)
    wire, restore = _movable(tensor, transport)
    rows, received = _run(
        "all_to_all",
        name,
        group,
        wire,
        lambda x, n: transport.all_to_all_uneven(x, splits, group, n),
    )
    rows.set_shape([None, *tensor.shape[1:]])
    received.set_shape([group.size])
    return restore(rows), received


def _raw_broadcast(tensor, root: int, group: Group, name: str | None):
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    transport = group.engine.transport(group)
    wire, restore = _movable(tensor, transport)
    flat, reshape = _as_vector(wire)
    flat = _run("broadcast", name, group, flat, lambda x, n: transport.broadcast(x, root, group, n))
    return restore(reshape(flat))


def _use(sent, name: str) -> None:
    """Sees to it that what was sent is sent, also where nobody uses the sender's copy.

    TensorFlow leaves out operations whose outputs lead to nothing, unless they are known to have
    an effect, which not all engines say of theirs. So an element is written somewhere.
    """
    if tf.executing_eagerly() or sent.shape.num_elements() == 0:
        return
    with tf.init_scope(), tf.device("/CPU:0"):
        handle = tf.raw_ops.VarHandleOp(
            dtype=sent.dtype, shape=[], shared_name=f"tfdist-sent/{name}/{sent.dtype.name}"
        )
    some = tf.reshape(sent, [-1])[:1]
    total = tf.cast(tf.reduce_sum(tf.cast(some, tf.float32)), sent.dtype)
    tf.raw_ops.AssignVariableOp(resource=handle, value=total)


def _run(operation: str, name: str | None, group: Group, tensor, call):
    """Calls the engine under a name, with the flight recorder on."""
    full = unique_name(f"{operation}/{group.label}" + (f"/{name}" if name else ""))
    if not tf.executing_eagerly():
        # Grappler would run a collective of constants while it optimizes, on the ranks where it
        # happens to; it never folds a placeholder, whatever its default.
        tensor = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
    return group.engine.recorder.watch(
        full, group.label, group.ranks, tensor, lambda x: call(x, full)
    )


def _movable(tensor, transport):
    """Returns the tensor in a dtype that the transport can move, and the way back."""
    via, restore = _movable_dtype(tensor.dtype, transport)
    if via == tensor.dtype:
        return tensor, restore
    same_bits = via.size == tensor.dtype.size and tensor.dtype != tf.bool
    return (tf.bitcast if same_bits else tf.cast)(tensor, via), restore


def _movable_dtype(dtype: tf.DType, transport):
    """Returns the dtype that the transport moves in place of another, and the way back."""
    via = transport.move_as.get(dtype, dtype)
    if via == dtype:
        return via, lambda moved: moved
    if via.size == dtype.size and dtype != tf.bool:
        return via, lambda moved: tf.bitcast(moved, dtype)
    return via, lambda moved: tf.cast(moved, dtype)


def _as_vector(tensor):
    """Returns the tensor with one dim, and the way back. Engines see no scalars."""
    if tensor.shape.rank == 1:
        return tensor, lambda flat: _shaped(flat, tensor.shape)
    shape = tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)
    return tf.reshape(tensor, [-1]), lambda flat: _shaped(tf.reshape(flat, shape), tensor.shape)


def _shaped(tensor, shape):
    tensor.set_shape(shape)
    return tensor


def _to_front(tensor, axis: int):
    return tensor if axis == 0 else tf.transpose(tensor, _swapped(tensor.shape.rank, axis))


def _from_front(tensor, axis: int):
    return _to_front(tensor, axis)


def _swapped(rank: int, axis: int) -> list[int]:
    """The permutation that swaps dim 0 and `axis`; it is its own inverse."""
    order = list(range(rank))
    order[0], order[axis] = order[axis], order[0]
    return order


def _backward(name: str | None) -> str:
    return f"{name}/backward" if name else "backward"


def _check_reduction(reduction: str, dtype: tf.DType) -> None:
    checks.one_of("reduction", reduction, REDUCTIONS)
    if dtype == tf.bool and reduction not in ("max", "min"):
        raise ValueError(
            f"Booleans reduce by 'max' (any) or 'min' (all). Received: reduction={reduction!r}; "
            "cast to an integer dtype to count them."
        )
    if reduction == "mean" and not dtype.is_floating:
        raise ValueError(
            f"The mean of {dtype.name} is not {dtype.name}. Cast to a floating dtype first, or "
            "use reduction='sum'."
        )


def _checked(argument: str, tensor, group: Group, name: str | None) -> tf.Tensor:
    """What is to be carried, as a tensor, once the group and the name are known to be some."""
    _check_group(group, name)
    try:
        return tf.convert_to_tensor(tensor)
    except (ValueError, TypeError, OverflowError) as error:
        raise checks.refuse(
            argument, tensor, "a tensor, or what TensorFlow makes one of", TypeError
        ) from error


def _check_group(group: Group, name: str | None) -> None:
    checks.instance("group", group, Group, "a Group, as of `strategy.group()`")
    if name is not None:
        checks.text("name", name, optional=True)


def _check_axis(tensor, axis: int, operation: str) -> int:
    """Which dim `axis` is, counted from the front."""
    rank = tensor.shape.rank
    if rank == 0:
        raise ValueError(f"`{operation}` works along a dim of `tensor`. Received: a scalar.")
    if rank is None:
        return checks.integer("axis", axis)
    return checks.integer("axis", axis, minimum=-rank, maximum=rank - 1) % rank


def _check_splits(splits, tensor, group: Group) -> tf.Tensor:
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


def _check_divides(tensor, axis: int, group: Group, operation: str) -> None:
    size = tensor.shape[axis]
    if size is not None and size % group.size:
        raise ValueError(
            f"`{operation}` splits dim {axis} evenly over the {group.size} ranks of the "
            f"{group.label} group. Received: shape {tuple(tensor.shape)}."
        )


def _check_member(index: int, group: Group, argument: str) -> int:
    return checks.integer(argument, index, minimum=0, maximum=group.size - 1)


def _check_other(index: int, group: Group, argument: str) -> int:
    if _check_member(index, group, argument) == group.rank:
        raise ValueError(
            f"A rank does not send to itself: `{argument}` is another member. Received: {index}."
        )
    return int(index)
