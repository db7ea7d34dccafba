"""The mappings of tensor parallelism: pairs of collectives, each the gradient of the other.

Layers that split a matrix over a group compute one function on all members, each a part of it.
A replicated tensor (an activation that every member has as a whole) has one gradient, which is the same on
all members; a split tensor has one part per member. These operations convert between the two:

| forward | backward |
|---|---|
| `copy_to_region`: identity | sum over the members |
| `reduce_from_region`: sum over the members | identity |
| `scatter_to_region`: this member's slice | concatenation of the slices |
| `gather_from_region`: concatenation | this member's slice |
| `all_gather` of a sequence: concatenation | sum, of which this member's slice |
| `reduce_scatter` to a sequence: sum, this member's slice | concatenation |

The first four differ from `all_reduce` and similar operations, whose gradients are those of the sum of all
members' losses: there every member has a separate loss, here all have the same.

Sources: Shoeybi et al. 2019, "Megatron-LM" (f and g: `copy_to_region` and
`reduce_from_region`; the names are Megatron's); Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models" (the sequence pair).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.few_rows import matmul
from tfdist.collectives.arguments import check_divides, checked_axis, checked_tensor
from tfdist.collectives.engine import shape_of
from tfdist.collectives.group import Group
from tfdist.collectives.names import backward_name
from tfdist.collectives.operations import all_gather, all_reduce


def copy_to_region(tensor, group: Group, *, name: str | None = None):
    """Enters a region where each member computes a part: identity, and a sum backward."""
    return _pair(tensor, group, name, tf.identity, reduce_from_region)


def reduce_from_region(tensor, group: Group, *, name: str | None = None):
    """Leaves such a region: the sum of the members' parts, and identity backward."""
    return _pair(tensor, group, name, lambda x: all_reduce(x, group, name=name), copy_to_region)


def scatter_to_region(tensor, group: Group, axis: int = -1, *, name: str | None = None):
    """This member's slice along `axis` of a tensor that is replicated on all members.

    Raises:
        ValueError: The size along `axis` is not divisible by the size of the group.
    """
    tensor = checked_tensor(tensor, group, name)
    axis = checked_axis(tensor, axis, "scatter_to_region")
    backward = functools.partial(gather_from_region, axis=axis)
    return _pair(tensor, group, name, lambda x: own_slice(x, group, axis), backward)


def gather_from_region(tensor, group: Group, axis: int = -1, *, name: str | None = None):
    """The members' slices joined along `axis`; the result must be used identically on all members."""
    tensor = checked_tensor(tensor, group, name)
    axis = checked_axis(tensor, axis, "gather_from_region")
    backward = functools.partial(scatter_to_region, axis=axis)
    return _pair(tensor, group, name, lambda x: all_gather(x, group, axis, name=name), backward)


def _pair(tensor, group: Group, name: str | None, forward: Callable, backward: Callable):
    """The tensor in a group of one; otherwise `forward` of it, whose gradient is the mapping `backward`."""
    tensor = checked_tensor(tensor, group, name)
    if group.size == 1:
        return tensor
    gradient = functools.partial(backward, group=group, name=backward_name(name))
    return custom_gradient(lambda x: (forward(x), gradient))(tensor)


def whole_input(tensor, group: Group, sequence_axis: int | None, *, name: str | None):
    """The whole input of this member's part of a product: `copy_to_region`, or `all_gather` of a sequence.

    Args:
        tensor: Whole on every member, or with `sequence_axis` its slice.
        group: The group.
        sequence_axis: The dim along which `tensor` is split, or None.
        name: What the product serves, for messages.
    """
    if sequence_axis is None:
        return copy_to_region(tensor, group, name=name)
    return all_gather(tensor, group, sequence_axis, name=name)


def column_parallel_matmul(
    tensor, kernel, group: Group, sequence_axis: int | None = None, *, bias=None, name=None
):
    """`linear` of the `whole_input` and this member's columns.

    In the backward pass the product for the input's gradient comes first, so that the communication of
    its sum over the members overlaps with the computation of the kernel's gradient.

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
    tensor = whole_input(tensor, group, sequence_axis, name=name)

    @custom_gradient
    def multiply(x, w, *b):
        rows = tf.reshape(x, [-1, w.shape[0]])
        y = tf.nn.bias_add(matmul(rows, w), *b) if b else matmul(rows, w)

        def gradient(dy):
            dy = tf.reshape(dy, [-1, w.shape[1]])
            dx = tf.reshape(tf.matmul(dy, w, transpose_b=True), tf.shape(x))
            dx = tf.ensure_shape(dx, x.shape)
            # Waits for the product, not for the sum, which is then already being sent.
            with tf.control_dependencies([dx]):
                dw = tf.matmul(rows, tf.identity(dy), transpose_a=True)
            db = [tf.raw_ops.BiasAddGrad(out_backprop=dy)] if b else []
            return dx, dw, *db

        return _unflatten(y, x), gradient

    return multiply(tensor, kernel, *([] if bias is None else [bias]))


def linear(tensor, kernel, bias=None):
    """[..., inputs] times [inputs, columns], plus a bias [columns], as one product of two matrices.

    `tf.matmul` of more dims would multiply batch by batch, and sum the kernel's gradient over
    batches afterwards. TensorFlow fuses a product and a bias that follows it directly.
    """
    rows = matmul(tf.reshape(tensor, [-1, kernel.shape[0]]), kernel)
    return _unflatten(rows if bias is None else tf.nn.bias_add(rows, bias), tensor)


def own_slice(tensor, group: Group, axis: int):
    """This member's slice of a tensor along `axis`, without a custom gradient.

    Raises:
        ValueError: The size along `axis` is not divisible by the size of the group.
    """
    check_divides(tensor, axis, group, "own_slice")
    share = shape_of(tensor)[axis] // group.size
    begin, sizes = [0] * tensor.shape.rank, [-1] * tensor.shape.rank
    begin[axis], sizes[axis] = group.rank * share, share
    return tf.slice(tensor, begin, sizes)


def _unflatten(rows, like):
    """Reshapes rows [n, columns] to the leading dims of `like`."""
    return tf.reshape(rows, [*shape_of(like)[:-1], rows.shape[-1]])
