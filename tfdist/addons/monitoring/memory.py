"""The memory that this process has in use, and its peak over a period."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

import psutil
import tensorflow as tf

from tfdist.addons.monitoring.process_memory import peak_bytes
from tfdist.utils import checks


@functools.cache
def _counting_device() -> str | None:
    """The device whose allocator in TensorFlow counts its bytes; None if there is none.

    A GPU's allocator always counts; a CPU's does with oneDNN, for which TensorFlow keeps a pool.
    """
    if tf.config.list_logical_devices("GPU"):
        return "GPU:0"
    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return None
    return "CPU:0"


def bytes_in_use() -> int:
    """The bytes that this process has in use now.

    They are those of TensorFlow's allocator, where it counts them: on a GPU, and on CPUs for which
    TensorFlow uses oneDNN's kernels and keeps a pool of memory for arrays of 256 KiB and more.
    Otherwise they are those that the C library has allocated and not freed, without freed memory that
    the system still counts for the process; if the C library does not report them, the resident size.
    """
    device = _counting_device()
    if device is not None:
        return int(tf.config.experimental.get_memory_info(device)["current"])
    if not hasattr(psutil, "heap_info"):
        return int(psutil.Process().memory_info().rss)
    heap = psutil.heap_info()
    return int(heap.heap_used + heap.mmap_used)


class PeakMemory:
    """The most bytes in use while the context is open, from the allocator or by sampling.

    ```python
    with PeakMemory() as peak:
        step()
    print(peak.bytes)
    ```

    Args:
        seconds: The sampling interval where no allocator counts. A shorter peak may be missed.

    Raises:
        ValueError: `seconds` is not positive.

    Attributes:
        before: The bytes in use when the context was opened.
        peak: The most bytes in use since.
    """

    def __init__(self, seconds: float = 0.0005):
        self._seconds = checks.number("seconds", seconds, above=0, maximum=checks.YEAR_SECONDS)
        self.before = self.peak = 0
        self._over = threading.Event()

    @property
    def bytes(self) -> int:
        """The difference between the peak and the beginning."""
        return self.peak - self.before

    def __enter__(self) -> PeakMemory:
        device = _counting_device()
        if device is not None:
            tf.config.experimental.reset_memory_stats(device)
        self.before = self.peak = bytes_in_use()
        if device is None:
            self._thread = threading.Thread(target=self._watch, name="tfdist-memory", daemon=True)
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(self._seconds):
            self.peak = max(self.peak, bytes_in_use())

    def __exit__(self, *_) -> None:
        device = _counting_device()
        if device is not None:
            self.peak = int(tf.config.experimental.get_memory_info(device)["peak"])
            return
        self._over.set()
        self._thread.join()
        self.peak = max(self.peak, bytes_in_use())


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def driver_bytes() -> int | None:
    """The bytes in use on this rank's GPU by the driver's count; None without a GPU.

    TensorFlow's allocator does not count what NCCL and CUDA allocate, nor other programs on the GPU.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = gpus[0].name.rpartition(":")[2]
    if int(number) < len(visible) and visible[int(number)]:
        number = visible[int(number)]
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    find = driver.nvmlDeviceGetHandleByUUID
    name: Any = number.encode()
    if number.isdigit():
        find, name = driver.nvmlDeviceGetHandleByIndex_v2, int(number)
    calls = (
        lambda: driver.nvmlInit_v2(),
        lambda: find(name, ctypes.byref(handle)),
        lambda: driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
    )
    return None if any(call() for call in calls) else int(memory.used)


def most_bytes() -> float:
    """The most bytes that this process has used since its start; on a GPU by its allocator."""
    if tf.config.list_logical_devices("GPU"):
        return float(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    return float(peak_bytes())
