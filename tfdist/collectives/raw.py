"""The operations without gradients, in any dtype and shape: what engines lack is made up for here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collectives.engine import Engine
from tfdist.collectives.group import Group
from tfdist.collectives.names import unique_name
from tfdist.graph.arrival import arrival

__all__ = [
    "SEND_NAME",
    "raw_all_gather",
    "raw_all_reduce",
    "raw_all_to_all",
    "raw_all_to_all_uneven",
    "raw_broadcast",
    "raw_reduce_scatter",
    "receive_tensor",
    "send_tensor",
    "shape_of",
]

SEND_NAME = "send-recv"

#: Complex numbers travel as pairs of these, which all engines carry.
_HALVES = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def _in_halves(operation: Callable) -> Callable:
    """The operation, also for complex numbers, whose real and imaginary parts are its last dim then."""

    @functools.wraps(operation)
    def carried(tensor, *args, **kwargs):
        half = _HALVES.get(tensor.dtype)
        if half is None:
            return operation(tensor, *args, **kwargs)
        moved = operation(tf.bitcast(tensor, half), *args, **kwargs)
        return tf.nest.map_structure(
            lambda part: tf.bitcast(part, tensor.dtype) if part.dtype == half else part, moved
        )

    return carried


@_in_halves
def raw_all_reduce(tensor, group: Group, reduction: str, name: str | None):
    """As `all_reduce`."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    transport, dtype = group.engine.transport(group, reduces=True), tensor.dtype
    if dtype == tf.bool:
        whole = raw_all_reduce(tf.cast(tensor, tf.int32), group, reduction, name)
        return tf.cast(whole, tf.bool)
    wire = tf.cast(tensor, transport.reduce_as.get(dtype, dtype))
    flat, restore = _as_vector(wire)
    flat = _run(
        "all_reduce",
        name,
        group,
        flat,
        lambda x, n: transport.all_reduce(x, group, reduction, n),
        transport,
    )
    return tf.cast(restore(flat), dtype)


@_in_halves
def raw_all_gather(tensor, group: Group, uneven: bool, name: str | None):
    """As `all_gather` along dim 0."""
    if tensor.dtype == tf.string:
        return _gather_text(tensor, group, uneven, name)
    if not uneven and tensor.shape.num_elements() == 0:
        return tf.tile(tensor, [group.size] + [1] * (tensor.shape.rank - 1))
    transport = group.engine.transport(group)
    gather = transport.all_gather_uneven if uneven else transport.all_gather
    wire, restore = _movable(tensor, transport)
    gathered = _run("all_gather", name, group, wire, lambda x, n: gather(x, group, n), transport)
    rows = tensor.shape[0]
    gathered.set_shape([None if uneven or rows is None else rows * group.size, *tensor.shape[1:]])
    return restore(gathered)


def _gather_text(tensor, group: Group, uneven: bool, name: str | None):
    """Strings travel as their bytes, beside their lengths."""
    with tf.device("/CPU:0"):
        own = tf.io.decode_raw(tf.strings.reduce_join(tf.reshape(tensor, [-1])), tf.uint8)
        lengths = raw_all_gather(
            tf.strings.length(tensor), group, uneven, f"{name or 'text'}/lengths"
        )
        content = raw_all_gather(own, group, True, name)
        letters = tf.gather([bytes([code]) for code in range(256)], tf.cast(content, tf.int32))
        counts = tf.reshape(lengths, [-1])
        places = tf.repeat(tf.range(tf.size(counts)), counts)
        joined = tf.strings.unsorted_segment_join(letters, places, tf.size(counts))
        return _shaped(tf.reshape(joined, tf.shape(lengths)), lengths.shape)


@_in_halves
def raw_reduce_scatter(tensor, group: Group, reduction: str, name: str | None):
    """As `reduce_scatter` along dim 0."""
    transport, dtype, rows = group.engine.transport(group), tensor.dtype, tensor.shape[0]
    if tensor.shape.num_elements() == 0:
        return tensor[: rows // group.size]
    if dtype == tf.bool:
        return tf.cast(
            raw_reduce_scatter(tf.cast(tensor, tf.int32), group, reduction, name), tf.bool
        )
    wire = tf.cast(tensor, transport.reduce_as.get(dtype, dtype))
    share = _run(
        "reduce_scatter",
        name,
        group,
        wire,
        lambda x, n: transport.reduce_scatter(x, group, reduction, n),
        transport,
    )
    share.set_shape([None if rows is None else rows // group.size, *tensor.shape[1:]])
    return tf.cast(share, dtype)


@_in_halves
def raw_all_to_all(tensor, group: Group, name: str | None):
    """As `all_to_all` with equal parts."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    transport = group.engine.transport(group)
    wire, restore = _movable(tensor, transport)
    received = _run(
        "all_to_all", name, group, wire, lambda x, n: transport.all_to_all(x, group, n), transport
    )
    received.set_shape(tensor.shape)
    return restore(received)


@_in_halves
def raw_all_to_all_uneven(tensor, splits, group: Group, name: str | None):
    """As `all_to_all` with splits."""
    transport = group.engine.transport(group)
    wire, restore = _movable(tensor, transport)
    rows, received = _run(
        "all_to_all",
        name,
        group,
        wire,
        lambda x, n: transport.all_to_all_uneven(x, splits, group, n),
        transport,
    )
    rows.set_shape([None, *tensor.shape[1:]])
    received.set_shape([group.size])
    return restore(rows), received


@_in_halves
def raw_broadcast(tensor, root: int, group: Group, name: str | None):
    """As `broadcast`."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    transport = group.engine.transport(group)
    wire, restore = _movable(tensor, transport)
    flat, reshape = _as_vector(wire)
    flat = _run(
        "broadcast",
        name,
        group,
        flat,
        lambda x, n: transport.broadcast(x, root, group, n),
        transport,
        # The root may go on before the others have come.
        needed=() if group.rank == root else (group.ranks[root],),
    )
    return restore(reshape(flat))


def _use(sent, name: str) -> None:
    """Sees to it that a message goes, also where nobody uses the sender's copy or the receiver's.

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


def _run(
    operation: str,
    name: str | None,
    group: Group,
    tensor,
    call,
    transport: Engine,
    needed: tuple[int, ...] | None = None,
):
    """Calls the engine under a name, with the flight recorder on."""
    full = unique_name(f"{operation}/{group.label}" + (f"/{name}" if name else ""))
    if not tf.executing_eagerly():
        # Grappler would run a collective of constants while it optimizes, on the ranks where it
        # happens to; it never folds a placeholder, whatever its default.
        with arrival():
            tensor = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
    return group.engine.recorder.watch(
        full,
        group.label,
        group.ranks,
        tensor,
        lambda x: call(x, full),
        transport.lane,
        needed,
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


@_in_halves
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
    what = f"{engine.rank}-to-{other}/{name or SEND_NAME}"
    sent = _run(
        "send", what, pair, flat, lambda x, full: engine.send(x, other, full), transport, needed=()
    )
    if not transport.sends_unused:
        _use(sent, f"{pair.label}/{what}")
    return restore(reshape(sent))


def receive_tensor(
    shape: Sequence,
    dtype: tf.DType,
    group: Group,
    source: int,
    *,
    name: str | None = None,
    unused: bool = False,
) -> tf.Tensor:
    """Receives a tensor from one member, which calls `send_tensor`; without a gradient.

    Args:
        shape: The sizes of its dims: ints, or int32 scalars where only the run knows.
        dtype: Its dtype.
        group: The group.
        source: The sender's place in the group.
        name: What the transfer serves, for messages; the same at the sender.
        unused: Whether it is received also where nobody uses it.
    """
    if dtype in _HALVES:
        halves = receive_tensor(
            [*shape, 2], _HALVES[dtype], group, source, name=name, unused=unused
        )
        return tf.bitcast(halves, dtype)
    static = [size if isinstance(size, int) else None for size in shape]
    elements = tf.TensorShape(static).num_elements()
    if elements == 0:
        return tf.zeros(shape, dtype)
    engine, other = group.engine, group.ranks[source]
    pair = engine.pair(other)
    transport = engine.transport(pair)
    wire, restore = _movable_dtype(dtype, transport)
    size = elements if elements is not None else tf.reduce_prod(tf.stack(list(shape)))
    what = f"{other}-to-{engine.rank}/{name or SEND_NAME}"
    flat = _run(
        "send",
        what,
        pair,
        tf.constant(0),
        lambda after, full: engine.receive(size, wire, other, full, after),
        transport,
        needed=(other,),
    )
    if unused:
        _use(flat, f"{pair.label}/{what}")
    found = restore(tf.reshape(flat, shape))
    found.set_shape(static)
    return found


def shape_of(tensor: tf.Tensor) -> list:
    """The sizes of a tensor's dims, ints where they are known."""
    sizes = tf.shape(tensor)
    return [sizes[i] if size is None else size for i, size in enumerate(tensor.shape)]
