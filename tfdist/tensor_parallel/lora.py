"""LoRA on split layers: Y = X W + s (X A) B, of which A or B is split as the kernel is.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". Keras gives a kernel of shape
[..., n] an A of shape [..., rank] and a B of shape [rank, n]. Where the kernel's last dim is split,
so is B's, and A is whole; else A is split along the kernel's dim, and B is whole. Of the one that is
whole each rank computes a part of the gradient.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.mappings import linear
from tfdist.sharding.weights import value_tensor


def lora_axes(layer, axis: int, dims: int) -> tuple[list[tuple], list]:
    """How A and B are split.

    Args:
        layer: A Dense or EinsumDense.
        axis: The kernel's dim that is split.
        dims: How many dims the kernel has.

    Returns:
        The variables that are split, each with the dim; and those that are whole.
    """
    if not layer.lora_enabled:
        return [], []
    a, b = layer.lora_kernel_a, layer.lora_kernel_b
    return ([(b, 1)], [a]) if axis == dims - 1 else ([(a, axis)], [b])


def add_lora(layer, outputs, through_a):
    """Adds the term of LoRA, without the product of A and B, which is as large as the kernel.

    Args:
        layer: The layer; where it has no LoRA, the outputs are returned as they are.
        outputs: X W.
        through_a: From A to X A.
    """
    if not layer.lora_enabled:
        return outputs
    a, b = value_tensor(layer.lora_kernel_a), value_tensor(layer.lora_kernel_b)
    rows = tf.convert_to_tensor(through_a(a))
    term = linear(rows, tf.cast(b, rows.dtype))
    return outputs + tf.cast((layer.lora_alpha / layer.lora_rank) * term, outputs.dtype)
