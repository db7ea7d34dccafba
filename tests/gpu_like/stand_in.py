"""The stand-in for a GPU, and an engine of two ranks in one process."""

from __future__ import annotations

import functools
import math

import tensorflow as tf

from tfdist import Mesh
from tfdist.backend import devices
from tfdist.backend.graph.order import in_any_order
from tfdist.collectives.engine import Engine

#: The device that stands for the GPU.
DEVICE = "/CPU:1"


def pretend(has_gpu: bool = True) -> None:
    """Has the second of two logical CPUs stand for a GPU in this process, which has not used TensorFlow before."""
    two_devices()
    devices.has_gpu = lambda: has_gpu
    devices.device_name = lambda: DEVICE if has_gpu else "/CPU:0"


@functools.cache
def two_devices() -> None:
    """Splits the CPU; first called at the start of a process."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)


class Loopback(Engine):
    """A rank of a mesh whose other ranks have the same tensors: each collective is a copy.

    `DeepCopy` is stateful as collectives are, so TensorFlow keeps it and its order.
    """

    name = "loopback"

    def all_reduce(self, tensor, group, reduction, name):
        return _copy(tensor)

    def all_gather(self, tensor, group, name):
        return tf.concat([_copy(tensor)] * group.size, axis=0)

    all_gather_uneven = all_gather

    def reduce_scatter(self, tensor, group, reduction, name):
        return _copy(tf.split(tensor, group.size)[0])

    def all_to_all(self, tensor, group, name):
        return _copy(tensor)

    def all_to_all_uneven(self, tensor, splits, group, name):
        return _copy(tensor), tf.identity(splits)

    def broadcast(self, tensor, root, group, name):
        return _copy(tensor)

    def send(self, tensor, to, name):
        return _copy(tensor)

    def receive(self, after, size, dtype, source, name):
        with tf.control_dependencies([after]):
            return _copy(tf.zeros([size], dtype))


def loopback(**axes: int) -> Loopback:
    """The engine of rank 0 of a mesh with axes of these sizes."""
    return Loopback(Mesh(**axes).resolve(size=math.prod(axes.values()), rank=0))


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    found = tf.raw_ops.DeepCopy(x=tensor)
    if not tf.executing_eagerly() and "CPU:0" in found.device:
        in_any_order(found.op)
    return found
