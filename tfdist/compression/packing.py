"""Several tensors that travel as one of each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.compression.meter import exchange_began

__all__ = ["exchange_packed"]


def exchange_packed(
    tensors: Sequence[tf.Tensor], exchange: Callable[[tf.Tensor, str], tf.Tensor], name: str
) -> list[tf.Tensor]:
    """Gives tensors to a collective, those of one dtype as one.

    Args:
        tensors: Tensors of shape [rows, ...], all with as many rows.
        exchange: From a tensor of shape [rows, n], and a name, to one of shape [rows', n].
        name: What travels, for messages.

    Returns:
        The tensors, each of shape [rows', ...].
    """
    found: list = list(tensors)
    places: dict[tf.DType, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    for dtype, some in places.items():
        flat = [_as_rows(tensors[place]) for place in some]
        sizes = [tf.shape(each)[1] for each in flat]
        packed = flat[0] if len(flat) == 1 else tf.concat(flat, axis=1)
        ended = exchange_began(packed)
        rows = exchange(packed, f"{name}/{dtype.name}")
        ended(rows)
        parts = [rows] if len(flat) == 1 else tf.split(rows, sizes, axis=1)
        for place, part in zip(some, parts, strict=True):
            inside = tensors[place].shape[1:]
            shape = tf.concat([[-1], tf.shape(tensors[place])[1:]], axis=0)
            found[place] = tf.ensure_shape(tf.reshape(part, shape), [None, *inside])
    return found


def _as_rows(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, [tf.shape(tensor)[0], -1])
