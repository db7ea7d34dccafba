"""Several tensors sent as one per dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.addons.slow_links.meter import exchange_began, sends_of_all_reduce
from tfdist.collectives import Group, all_gather, all_reduce, all_to_all


def exchange_packed(
    collective: str, tensors: Sequence[tf.Tensor], group: Group, name: str
) -> list[tf.Tensor]:
    """Applies a collective to tensors, packed into one per dtype.

    Args:
        collective: "mean", an all-reduce; "all_gather"; or "all_to_all".
        tensors: Tensors of shape [rows, ...], all with the same number of rows. For "all_to_all" there
            is a row for each rank, otherwise one.
        group: The ranks.
        name: A name of the data, for messages.

    Returns:
        The tensors, each of shape [rows', ...]: a row from each rank, or one with the means.
    """
    exchange, sends = _COLLECTIVES[collective]
    found: list = list(tensors)
    places: dict[tf.DType, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    for dtype, some in places.items():
        flat = [_as_rows(tensors[place]) for place in some]
        sizes = [tf.shape(each)[1] for each in flat]
        packed = flat[0] if len(flat) == 1 else tf.concat(flat, axis=1)
        ended = exchange_began(packed, sends(group.size))
        rows = exchange(packed, group, f"{name}/{dtype.name}")
        ended(rows)
        parts = [rows] if len(flat) == 1 else tf.split(rows, sizes, axis=1)
        for place, part in zip(some, parts, strict=True):
            inside = tensors[place].shape[1:]
            shape = tf.concat([[-1], tf.shape(tensors[place])[1:]], axis=0)
            found[place] = tf.ensure_shape(tf.reshape(part, shape), [None, *inside])
    return found


#: The function of each, and how often each of n ranks sends the bytes of its input.
_COLLECTIVES: dict[str, tuple[Callable, Callable[[int], float]]] = {
    "mean": (
        lambda tensor, group, name: all_reduce(tensor, group, "mean", name=name),
        sends_of_all_reduce,
    ),
    "all_gather": (
        lambda tensor, group, name: all_gather(tensor, group, name=name),
        lambda n: n - 1,
    ),
    "all_to_all": (
        lambda tensor, group, name: all_to_all(tensor, group, name=name),
        lambda n: (n - 1) / n,
    ),
}


def _as_rows(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, [tf.shape(tensor)[0], -1])
