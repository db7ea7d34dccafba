"""The mappings of tensor parallelism: collectives whose gradient is the other one of a pair.

Layers that split a matrix over a group compute one function on all members, each a part of it.
What is replicated (an activation that every member holds whole) has one gradient, the same on all
members; what is split has each member's part. These operations cross the border between the two:

| forward | backward |
|---|---|
| `copy_to_region`: as it is | sum over the members |
| `reduce_from_region`: sum over the members | as it is |
| `scatter_to_region`: this member's slice | concatenation of the slices |
| `gather_from_region`: concatenation | this member's slice |
| `gather_from_sequence_region`: concatenation | sum, of which this member's slice |
| `reduce_scatter_to_sequence_region`: sum, this member's slice | concatenation |

They differ from `all_reduce` and its kin, whose gradients are those of the sum of all members'
losses: there every member has a loss of its own, here all have the same.

Sources: Shoeybi et al. 2019, "Megatron-LM" (f and g: `copy_to_region` and
`reduce_from_region`; the names are Megatron's); Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models" (the sequence pair).
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.few_rows import matmul
from tfdist.collectives.arguments import checked_axis, checked_tensor
from tfdist.collectives.group import Group
from tfdist.collectives.operations import all_gather, all_reduce, reduce_scatter


def copy_to_region(tensor, group: Group, *, name: str | None = None):
    """Enters a region where each member computes a part: identity, and a sum backward."""
    tensor = checked_tensor(tensor, group, name)
    if group.size == 1:
        return tensor

    @custom_gradient
    def enter(x):
        return tf.identity(x), lambda dy: all_reduce(dy, group, name=_backward(name))

    return enter(tensor)


def reduce_from_region(tensor, group: Group, *, name: str | None = None):
    """Leaves such a region: the sum of the members' parts, and identity backward."""
    tensor = checked_tensor(tensor, group, name)
    if group.size == 1:
        return tensor

    @custom_gradient
    def leave(x):
        return all_reduce(x, group, name=name), lambda dy: dy

    return leave(tensor)


def scatter_to_region(tensor, group: Group, axis: int = -1, *, name: str | None = None):
    """This member's slice along `axis` of what every member holds whole.

    Raises:
        ValueError: The size along `axis` does not divide by the size of the group.
    """
    tensor = checked_tensor(tensor, group, name)
    axis = checked_axis(tensor, axis, "scatter_to_region")
    if group.size == 1:
        return tensor

    @custom_gradient
    def cut(x):
        return own_slice(x, group, axis), lambda dy: all_gather(
            dy, group, axis, name=_backward(name)
        )

    return cut(tensor)


def gather_from_region(tensor, group: Group, axis: int = -1, *, name: str | None = None):
    """The members' slices joined along `axis`; each member then uses the whole alike."""
    tensor = checked_tensor(tensor, group, name)
    axis = checked_axis(tensor, axis, "gather_from_region")
    if group.size == 1:
        return tensor

    @custom_gradient
    def join(x):
        return all_gather(x, group, axis, name=name), lambda dy: own_slice(dy, group, axis)

    return join(tensor)


def gather_from_sequence_region(tensor, group: Group, axis: int = 1, *, name: str | None = None):
    """Joins slices along `axis` for a region where each member computes a part of the rest."""
    if group.size == 1:
        return tensor
    return all_gather(tensor, group, _positive(tensor, axis), name=name)


def reduce_scatter_to_sequence_region(
    tensor, group: Group, axis: int = 1, *, name: str | None = None
):
    """Sums the members' parts; each goes on with its slice along `axis`.

    Raises:
        ValueError: The size along `axis` does not divide by the size of the group.
    """
    if group.size == 1:
        return tensor
    return reduce_scatter(tensor, group, "sum", _positive(tensor, axis), name=name)


def column_parallel_matmul(
    tensor, kernel, group: Group, sequence_axis: int | None = None, *, bias=None, name=None
):
    """`copy_to_region` (or `gather_from_sequence_region`) and a `linear` with this member's columns, in one.

    In the backward pass the product that gives the input's gradient comes first, so that its sum
    over the members travels while the kernel's gradient is computed.

    Args:
        tensor: Shape [..., inputs]: whole on every member, or with `sequence_axis` its slice.
        kernel: This member's columns, shape [inputs, columns].
        group: The group.
        sequence_axis: The dim along which `tensor` is split, or None.
        bias: This member's part of a bias, shape [columns], or None.
        name: What the product serves, for messages.

    Returns:
        A tensor of shape [..., columns].
    """
    if group.size == 1:
        return linear(tensor, kernel, bias)

    @custom_gradient
    def multiply(x, w, *b):
        if sequence_axis is not None:
            x = all_gather(x, group, sequence_axis, name=name)
        rows = tf.reshape(x, [-1, w.shape[0]])
        y = matmul(rows, w)
        y = tf.nn.bias_add(y, *b) if b else y

        def gradient(dy):
            dy = tf.reshape(dy, [-1, w.shape[1]])
            dx = tf.reshape(tf.matmul(dy, w, transpose_b=True), tf.shape(x))
            dx = tf.ensure_shape(dx, x.shape)
            # Tied to the product, not to the sum, which is then already on its way.
            with tf.control_dependencies([dx]):
                dw = tf.matmul(rows, tf.identity(dy), transpose_a=True)
            if sequence_axis is None:
                dx = all_reduce(dx, group, name=_backward(name))
            else:
                dx = reduce_scatter(dx, group, "sum", sequence_axis, name=_backward(name))
            db = [tf.raw_ops.BiasAddGrad(out_backprop=dy)] if b else []
            return dx, dw, *db

        return _unflatten(y, x), gradient

    return multiply(tensor, kernel) if bias is None else multiply(tensor, kernel, bias)


def linear(tensor, kernel, bias=None):
    """[..., inputs] times [inputs, columns], plus a bias [columns], as one product of two matrices.

    `tf.matmul` of more dims would multiply batch by batch, and sum the kernel's gradient over
    batches afterwards. Where nothing stands between product and bias, TensorFlow adds the two in
    one kernel.
    """
    rows = matmul(tf.reshape(tensor, [-1, kernel.shape[0]]), kernel)
    return _unflatten(rows if bias is None else tf.nn.bias_add(rows, bias), tensor)


def own_slice(tensor, group: Group, axis: int):
    """This member's slice of a tensor along `axis`, without a gradient of its own.

    Raises:
        ValueError: The size along `axis` does not divide by the size of the group.
    """
    size = tensor.shape[axis]
    if size is None:
        size = tf.shape(tensor)[axis]
    elif size % group.size:
        raise ValueError(
            f"Dim {axis} is split evenly over the {group.size} ranks of the {group.label} group. "
            f"Received: shape {tuple(tensor.shape)}."
        )
    share = size // group.size
    begin = [0] * tensor.shape.rank
    begin[axis] = group.rank * share
    sizes = [-1] * tensor.shape.rank
    sizes[axis] = share
    return tf.slice(tensor, begin, sizes)


def _positive(tensor, axis: int) -> int:
    rank = tensor.shape.rank
    if not -rank <= axis < rank:
        raise ValueError(f"`axis` lies in [-{rank}, {rank}) for this tensor. Received: {axis}.")
    return axis % rank


def _unflatten(rows, like):
    """Rows [n, columns] with the leading dims of `like` again."""
    lead = like.shape[:-1]
    if lead.is_fully_defined():
        return tf.reshape(rows, [*lead, rows.shape[-1]])
    whole = tf.reshape(rows, tf.concat([tf.shape(like)[:-1], [rows.shape[-1]]], axis=0))
    return tf.ensure_shape(whole, [*lead, rows.shape[-1]])


def _backward(name: str | None) -> str:
    return f"{name}/backward" if name else "backward"
