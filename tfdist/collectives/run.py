"""`run`: one collective without a gradient, in any dtype and shape, named and recorded.

It handles what engines do not support: dtypes that they cannot add or send, scalars, and tensors without
elements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.arrival import arrival
from tfdist.backend.graph.compiling import excluded, mark_sized_by_values
from tfdist.collectives.engine import Engine
from tfdist.collectives.engine import shape_of as shape_of
from tfdist.collectives.group import Group
from tfdist.collectives.names import unique_name
from tfdist.utils.temporary import attributes_set

SEND_NAME = "send-recv"

#: Complex numbers are sent as pairs of these, which all engines support.
_HALVES = {tf.complex64: tf.float32, tf.complex128: tf.float64}
#: Operations that do not depend on rows: their tensors are sent as vectors, so there are no scalars.
_FLAT = {"all_reduce", "broadcast", "send"}
_REDUCING = {"all_reduce", "reduce_scatter"}
#: The users' names of variants.
_NAMES = {"all_gather_uneven": "all_gather", "all_to_all_uneven": "all_to_all", "receive": "send"}


class _Local(threading.local):
    over_host: bool = False


_local = _Local()


def over_host() -> contextlib.AbstractContextManager[None]:
    """Has collectives of this thread inside use the memory of the host also on ranks with GPUs.

    NCCL requires one order of all collectives, which collectives outside the step do not have.
    """
    return attributes_set(_local, over_host=True)


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective, without its tensors.

    Attributes:
        operation: The method of the engine.
        group: The group; for "send" and "receive" a pair.
        name: What the operation serves, for messages.
        reduction: "sum", "mean", "max" or "min", of an operation that reduces.
        root: The root's place in the group, of a broadcast.
    """

    operation: str
    group: Group
    name: str | None = None
    reduction: str | None = None
    root: int | None = None

    @property
    def arguments(self) -> tuple:
        """The arguments of the engine's method between the tensors and the name."""
        if self.operation in ("send", "receive"):
            return ()
        if self.root is not None:
            return self.root, self.group
        return (self.group,) if self.reduction is None else (self.group, self.reduction)

    @property
    def label(self) -> str:
        """The operation, its group and what it serves; not yet unique."""
        parts = _NAMES.get(self.operation, self.operation), self.group.label, self.name
        return "/".join(filter(None, parts))

    @property
    def needed(self) -> tuple[int, ...]:
        """The ranks that must begin it before it can end on this one."""
        ranks, own = self.group.ranks, self.group.rank
        if self.operation == "receive":
            return (ranks[1 - own],)
        # A sender, and the root of a broadcast, may finish before the others begin.
        if self.operation == "send" or self.root == own:
            return ()
        return ranks if self.root is None else (ranks[self.root],)


def run(call: Call, tensor: tf.Tensor, *more):
    """Runs a collective.

    Args:
        call: The collective.
        tensor: This rank's tensor: numbers or booleans.
        *more: Further arguments for the engine, such as the splits of "all_to_all_uneven".

    Returns:
        The result, in the dtype of `tensor`; for "all_to_all_uneven" also the numbers of received rows.
    """
    group = call.group
    is_empty = tensor.shape.num_elements() == 0
    if is_empty and call.operation != "send" and not call.operation.endswith("_uneven"):
        return tf.zeros(_output_shape(call, tensor.shape), tensor.dtype)
    transport, on_host = _transport(call.operation, group, more[1] if more[1:] else tensor.dtype)
    with devices.placed(on_host):
        wire, restore = _on_wire(tensor, transport, call)
        with excluded():
            flight = group.engine.recorder.flight(
                unique_name(call.label),
                group,
                transport.lane,
                call.needed,
                gates=on_host or not devices.has_gpu(),
            )
            with flight.begin(wire) as wire:
                operation = getattr(transport, call.operation)
                result = operation(wire, *more, *call.arguments, flight.name)
            result = flight.end(result)
        if call.operation.endswith("_uneven"):
            for part in tf.nest.flatten(result):
                mark_sized_by_values(part)
        return restore(result)


def _transport(operation: str, group: Group, dtype: tf.DType) -> tuple[Engine, bool]:
    """The engine that executes an operation, and whether its tensors stay on the host of a rank with a GPU."""
    uses_host = _local.over_host or group.engine.uses_host(operation, dtype)
    on_host = devices.has_gpu() and uses_host
    reduces = operation == "all_reduce"
    return group.engine.transport(group, reduces=reduces, on_host=on_host), on_host


def _on_wire(tensor: tf.Tensor, transport: Engine, call: Call) -> tuple[tf.Tensor, Callable]:
    """The tensor in the form that the transport sends, and a function that restores results."""
    if call.operation == "receive":
        # Its tensor only determines when it begins.
        return _unfoldable(tensor), lambda moved: moved
    half = _HALVES.get(tensor.dtype)
    parts = tensor if half is None else tf.bitcast(tensor, half)
    reduces = call.operation in _REDUCING
    via = _wire_dtype(parts.dtype, transport, reduces)
    wire = _converted(parts, via, reduces)
    is_flat = call.operation in _FLAT and wire.shape.rank != 1
    if is_flat:
        wire = tf.reshape(wire, [-1])

    def restore(moved):
        if isinstance(moved, tuple):
            rows, received = moved
            received.set_shape([call.group.size])
            return restore(rows), received
        if is_flat:
            shape = parts.shape
            moved = tf.reshape(moved, shape if shape.is_fully_defined() else tf.shape(parts))
        moved.set_shape(_output_shape(call, parts.shape))
        moved = _converted(moved, parts.dtype, reduces)
        return moved if half is None else tf.bitcast(moved, tensor.dtype)

    return _unfoldable(wire), restore


def _unfoldable(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, in a form that waits for the batch of the step, and that is not a constant.

    Grappler may run a collective of constants during its optimization, on some ranks only; it never
    folds a placeholder, regardless of its default.
    """
    if tf.executing_eagerly():
        return tensor
    with arrival():
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def _wire_dtype(dtype: tf.DType, transport: Engine, reduces: bool) -> tf.DType:
    if reduces and dtype == tf.bool:
        dtype = tf.int32
    return (transport.reduce_as if reduces else transport.move_as).get(dtype, dtype)


def _converted(tensor: tf.Tensor, dtype: tf.DType, reduces: bool = False) -> tf.Tensor:
    """The tensor in another dtype: the same bits if they are only sent and have the same width."""
    given = tensor.dtype
    if reduces or given.size != dtype.size or tf.bool in (given, dtype):
        return tf.cast(tensor, dtype)
    return tensor if given == dtype else tf.bitcast(tensor, dtype)


def _output_shape(call: Call, shape: tf.TensorShape) -> tf.TensorShape:
    """The static shape of the result for a tensor of this shape."""
    if call.operation in ("all_reduce", "all_to_all", "broadcast", "send"):
        return shape
    rows, size = shape[0], call.group.size
    if rows is not None:
        rows = {"all_gather": rows * size, "reduce_scatter": rows // size}.get(call.operation)
    return tf.TensorShape([rows, *shape[1:]])


def gather_text(tensor: tf.Tensor, group: Group, uneven: bool, name: str | None) -> tf.Tensor:
    """As `all_gather` along dim 0, of strings: sends their bytes and their lengths."""
    with tf.device("/CPU:0"):
        own = tf.io.decode_raw(tf.strings.reduce_join(tf.reshape(tensor, [-1])), tf.uint8)
        gather = "all_gather_uneven" if uneven else "all_gather"
        lengths = run(Call(gather, group, f"{name or 'text'}/lengths"), tf.strings.length(tensor))
        content = run(Call("all_gather_uneven", group, name), own)
        letters = tf.gather([bytes([code]) for code in range(256)], tf.cast(content, tf.int32))
        counts = tf.reshape(lengths, [-1])
        places = tf.repeat(tf.range(tf.size(counts)), counts)
        joined = tf.strings.unsorted_segment_join(letters, places, tf.size(counts))
        return tf.ensure_shape(tf.reshape(joined, tf.shape(lengths)), lengths.shape)


def send_tensor(tensor: tf.Tensor, group: Group, to: int, *, name: str | None = None) -> tf.Tensor:
    """Sends a tensor to one member, which calls `receive_tensor`; without a gradient.

    Args:
        tensor: The tensor, of any shape and dtype.
        group: The group.
        to: The receiver's place in the group.
        name: What the transfer serves, for messages; the same at the receiver.

    Returns:
        The tensor, once it has been handed to the transport. It is sent even if the result is not used.
    """
    if tensor.shape.num_elements() == 0 and not tf.executing_eagerly():
        # TensorFlow would prune a message that it knows to be empty, for which the receiver may wait.
        tensor = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None] * tensor.shape.rank)
    engine, other = group.engine, group.ranks[to]
    pair = engine.pair(other)
    call = Call("send", pair, f"{engine.rank}-to-{other}/{name or SEND_NAME}")
    sent = run(call, tensor, other)
    transport, on_host = _transport("send", pair, tensor.dtype)
    if not transport.sends_unused:
        _use(sent, f"{pair.label}/{call.name}", on_host)
    return sent


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
        shape: The sizes of its dims: ints, or int32 scalars if they are unknown in the graph.
        dtype: Its dtype.
        group: The group.
        source: The sender's place in the group.
        name: What the transfer serves, for messages; the same at the sender.
        unused: Whether it is received even if the result is not used.
    """
    if dtype in _HALVES:
        half = _HALVES[dtype]
        halves = receive_tensor([*shape, 2], half, group, source, name=name, unused=unused)
        return tf.bitcast(halves, dtype)
    static = tf.TensorShape([size if isinstance(size, int) else None for size in shape])
    elements = static.num_elements()
    engine, other = group.engine, group.ranks[source]
    pair = engine.pair(other)
    transport, on_host = _transport("receive", pair, dtype)
    via = _wire_dtype(dtype, transport, reduces=False)
    with devices.on_host():
        size = elements if elements is not None else tf.reduce_prod(tf.stack(list(shape)))
    call = Call("receive", pair, f"{other}-to-{engine.rank}/{name or SEND_NAME}")
    flat = run(call, tf.constant(0), size, via, other)
    if unused:
        _use(flat, f"{pair.label}/{call.name}", on_host)
    return tf.ensure_shape(_converted(tf.reshape(flat, shape), dtype), static)


def _use(sent: tf.Tensor, name: str, on_host: bool) -> None:
    """Makes a message a side effect of the graph, in case neither side's result is used.

    TensorFlow prunes operations whose outputs are not used, unless they are marked as stateful, which
    those of some engines are not. So an element is written to a variable.
    """
    if tf.executing_eagerly():
        return
    with tf.init_scope(), tf.device("/CPU:0" if on_host else devices.device_name()):
        handle = tf.raw_ops.VarHandleOp(
            dtype=sent.dtype, shape=[], shared_name=f"tfdist-sent/{name}/{sent.dtype.name}"
        )
    some = tf.reshape(sent, [-1])[:1]
    some = tf.math.real(some) if sent.dtype.is_complex else some
    total = tf.cast(tf.reduce_sum(tf.cast(some, tf.float32)), sent.dtype)
    with excluded():
        tf.raw_ops.AssignVariableOp(resource=handle, value=total)
