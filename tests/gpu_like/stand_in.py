"""The stand-in for a GPU, and an engine of two ranks in one process."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfdist.backend import devices

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
