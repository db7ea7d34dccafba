"""LoRA on split layers: Y = X W + s (X A) B, of which A or B is split as the kernel is.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". For a kernel of shape [..., n],
Keras adds an A of shape [..., rank] and a B of shape [rank, n]. If the kernel's last dim is split,
so is B's, and A is whole; otherwise A is split along the kernel's dim, and B is whole. Each rank
computes a part of the gradient of the whole one.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.mappings import linear
from tfdist.sharding.weights import value_tensor


def lora_axes(layer, axis: int, dims: int) -> tuple[list[tuple], list]:
    """The split of A and B.

    Args:
        layer: A Dense or EinsumDense.
        axis: The kernel's dim that is split.
        dims: The number of dims of the kernel.

    Returns:
        The split variables, each with its dim; and the whole ones.
    """
    if not layer.lora_enabled:
        return [], []
    a, b = layer.lora_kernel_a, layer.lora_kernel_b
    return ([(b, 1)], [a]) if axis == dims - 1 else ([(a, axis)], [b])


def add_lora(layer, outputs, through_a):
    """Adds the term of LoRA, without the product of A and B, which is as large as the kernel.

    Args:
        layer: The layer; without LoRA, the outputs are returned unchanged.
        outputs: X W.
        through_a: A function from A to X A.
    """
    if not layer.lora_enabled:
        return outputs
    a, b = value_tensor(layer.lora_kernel_a), value_tensor(layer.lora_kernel_b)
    rows = tf.convert_to_tensor(through_a(a))
    term = linear(rows, tf.cast(b, rows.dtype))
    return outputs + tf.cast((layer.lora_alpha / layer.lora_rank) * term, outputs.dtype)
