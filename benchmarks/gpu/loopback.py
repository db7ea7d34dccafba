"""An engine of a rank whose partners are copies of itself: the price of a step without that of a network."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdist import Mesh
from tfdist.backend.graph.order import in_any_order
from tfdist.collectives.engine import Engine


class Loopback(Engine):
    """A rank of a mesh whose other ranks have the same tensors: each collective is a copy.

    `DeepCopy` is stateful as collectives are, so TensorFlow keeps it and its order.
    """

    name = "loopback"

    def all_reduce(self, tensor, group, reduction, name):
        """The tensor."""
        return _copy(tensor)

    def all_gather(self, tensor, group, name):
        """As many copies as there are members."""
        return tf.concat([_copy(tensor)] * group.size, axis=0)

    all_gather_uneven = all_gather

    def reduce_scatter(self, tensor, group, reduction, name):
        """The first share."""
        return _copy(tf.split(tensor, group.size)[0])

    def all_to_all(self, tensor, group, name):
        """The tensor."""
        return _copy(tensor)

    def all_to_all_uneven(self, tensor, splits, group, name):
        """The tensor and its splits."""
        return _copy(tensor), tf.identity(splits)

    def broadcast(self, tensor, root, group, name):
        """The tensor."""
        return _copy(tensor)

    def send(self, tensor, to, name):
        """The tensor."""
        return _copy(tensor)

    def receive(self, after, size, dtype, source, name):
        """Zeros."""
        with tf.control_dependencies([after]):
            return _copy(tf.zeros([size], dtype))


def loopback(**axes: Any) -> Loopback:
    """The engine of rank 0 of a mesh with axes of these sizes."""
    return Loopback(Mesh(**axes).resolve(size=math.prod(axes.values()), rank=0))


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    found = tf.raw_ops.DeepCopy(x=tensor)
    if not tf.executing_eagerly() and "CPU:0" in found.device:
        in_any_order(found.op)
    return found
