"""The matrix product that computes logits, for losses that evaluate it in parts.

The logits of a model are rows times a kernel. In a graph a loss can inspect the operations that compute
them, and use the rows and the kernel instead. Operations whose results are not used do not run, so the
logits themselves are then never computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Product:
    """cap * tanh(rows kernel / cap), or the product without the cap.

    Attributes:
        rows: Shape [..., features].
        kernel: Shape [features, columns], or with `transposed` [columns, features].
        transposed: Whether the kernel is transposed in the product.
        soft_cap: The cap, or None.
    """

    rows: tf.Tensor
    kernel: tf.Tensor
    transposed: bool
    soft_cap: float | None = None

    @property
    def features(self) -> int | None:
        """The last dim of the rows."""
        return self.kernel.shape[1 if self.transposed else 0]

    @property
    def columns(self) -> int | None:
        """The last dim of the product."""
        return self.kernel.shape[0 if self.transposed else 1]


def note_source(made: tf.Tensor, function: Callable, *tensors: tf.Tensor) -> None:
    """Records the function of rows that has computed a tensor, for `product_behind`.

    Args:
        made: The result of the function.
        function: A function that only changes dim 0, of any tensors.
        *tensors: The arguments of the call.
    """
    if tf.is_symbolic_tensor(made) and not any(made is tensor for tensor in tensors):
        made._tfdist_source = (function, tensors)


def product_behind(tensor) -> Product | None:
    """The product that computes a tensor of a graph; None if there is none, or it is not recognized.

    The search continues through casts to wider types, identities, checks of shapes, reshapes that keep the
    last dim, and the functions recorded by `note_source`.
    """
    if not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank:
        return None
    function, sources = getattr(tensor, "_tfdist_source", (None, ()))
    if function is not None:
        return _moved(function, sources)
    operation = tensor.op
    if "_gradient_op_type" in operation.node_def.attr:
        return None
    if operation.type == "Cast":
        source = operation.inputs[0]
        wider = source.dtype.is_floating and source.dtype.size <= tensor.dtype.size
        return product_behind(source) if wider else None
    if operation.type in ("Identity", "EnsureShape"):
        return product_behind(operation.inputs[0])
    if operation.type == "Reshape":
        return _reshaped(product_behind(operation.inputs[0]), tensor)
    if operation.type == "Mul":
        return _capped(operation)
    if operation.type in ("MatMul", "BatchMatMulV2"):
        return _of_matmul(operation)
    return None


def _of_matmul(operation) -> Product | None:
    rows, kernel = operation.inputs
    is_matrix = operation.type == "MatMul"
    first, second = ("transpose_a", "transpose_b") if is_matrix else ("adj_x", "adj_y")
    if operation.get_attr(first) or kernel.shape.rank != 2:
        return None
    transposed = operation.get_attr(second)
    source = kernel.op
    if source.type == "Transpose" and _constant(source.inputs[1]) == [1, 0]:
        # Then neither the kernel nor its gradient is transposed.
        kernel, transposed = source.inputs[0], not transposed
    return Product(rows, kernel, transposed)


def _capped(operation) -> Product | None:
    """tanh(x / cap) * cap, as in KerasHub."""
    for tanh, factor in (operation.inputs, reversed(operation.inputs)):
        if tanh.op.type != "Tanh" or tanh.op.inputs[0].op.type != "RealDiv":
            continue
        scores, divisor = tanh.op.inputs[0].op.inputs
        cap, other = _constant(factor), _constant(divisor)
        product = product_behind(scores)
        if product is None or not isinstance(cap, float) or cap != other or cap <= 0:
            return None
        # A cap before a cast, or a second one, is a different function.
        if product.soft_cap or scores.dtype != product.rows.dtype:
            return None
        return dataclasses.replace(product, soft_cap=cap)
    return None


def _reshaped(product: Product | None, tensor) -> Product | None:
    columns = None if product is None else product.columns
    if product is None or None in (columns, product.features) or tensor.shape[-1] != columns:
        return None
    # The shape of the operation, not that of its result, which would then be computed.
    leading = tensor.op.inputs[1][:-1]
    rows = tf.reshape(product.rows, tf.concat([leading, [product.features]], axis=0))
    rows = tf.ensure_shape(rows, [*tensor.shape[:-1], product.features])
    return dataclasses.replace(product, rows=rows)


def _moved(function: Callable, tensors) -> Product | None:
    """The product of the rows that the function returns: of several tensors, with one kernel."""
    found = [product for tensor in tensors if (product := product_behind(tensor))]
    if (
        len(found) < len(tensors)
        or len({(p.kernel.name, p.transposed, p.soft_cap) for p in found}) > 1
    ):
        return None
    return dataclasses.replace(found[0], rows=function(*(each.rows for each in found)))


def _constant(tensor) -> Any:
    """The value of a constant, also through casts; None if it is not constant."""
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    value = tf.get_static_value(tensor)
    return None if value is None else value.tolist()
