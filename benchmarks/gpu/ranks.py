"""Checks on two ranks, which share a GPU where there is one."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.gpu.parts import LAYOUTS
from tfdist import Mesh
from tfdist.testing import RankPool

_TIME = 60.0


def libraries(rehearse: bool) -> dict[str, Any]:
    """The driver, the GPU, the versions of NCCL and Horovod's sum of two ranks."""
    import tensorflow as tf

    from tfdist.launch.install_horovod.cuda_packages import driver_version
    from tfdist.runtime.horovod_variables import has_nccl

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    found: dict[str, Any] = {
        "gpu": ", ".join(each.get("device_name", "a GPU") for each in details) or "no GPU",
        "driver": driver_version(),
        "tensorflow": tf.__version__,
        "horovod_has_nccl": has_nccl(),
    }
    with RankPool(2, "horovod") as pool:
        answers = pool.run(_sum, timeout=_TIME)
    found["sum"], found["nccl"], found["libraries_of_nccl"], found["on_gpu"] = answers[0]
    return found


def _sum() -> tuple[float, int, int, bool]:
    import tensorflow as tf

    from tfdist.backend import devices
    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    world = engine()
    with tf.device(devices.device_name()):
        total = all_reduce(tf.fill([1 << 20], world.rank + 1.0), world.group(), name="sum")
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:
        version.value = 0
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libnccl" in line}
    return float(total[0]), version.value, len(paths), "GPU" in total.device


def conformance(rehearse: bool, engine: str) -> dict[str, Any]:
    """The collectives that differ from NumPy, or do not end within 15 s each."""
    from tfdist.testing.conformance import DTYPES, OPERATIONS

    wrong: dict[str, str] = {}
    count = 0
    pool = RankPool(2, engine)
    try:
        for operation in ("all_reduce", "broadcast") if rehearse else OPERATIONS:
            for dtype in ("float32", "int32", "bfloat16") if rehearse else DTYPES:
                count += 1
                try:
                    answers = pool.run(_differences, operation, dtype, timeout=15.0)
                except Exception as error:
                    wrong[f"{operation}/{dtype}"] = str(error).strip().splitlines()[0][:100]
                    pool.close(kill=True)
                    pool = RankPool(2, engine)
                    continue
                if any(answers):
                    wrong[f"{operation}/{dtype}"] = str(next(filter(None, answers))[0])[:100]
    finally:
        pool.close(kill=True)
    return {"calls": count, "wrong": len(wrong), **({"which": wrong} if wrong else {})}


def _differences(operation: str, dtype: str) -> list:
    from tfdist.testing import engine
    from tfdist.testing.conformance import differences

    return differences(engine(Mesh()), operation, [dtype])


def parity(rehearse: bool, engine: str, jit: bool = False) -> dict[str, Any]:
    """By layout the largest difference of a loss of two ranks to one process, over 12 steps of SGD.

    Args:
        rehearse: Whether only two layouts are run.
        engine: The engine.
        jit: Whether XLA compiles the steps of the two ranks.
    """
    found: dict[str, Any] = {}
    with RankPool(1, "local") as one, RankPool(2, engine) as two:
        for name, (axes, options) in LAYOUTS.items():
            if rehearse and name not in ("data", "tensor"):
                continue
            (expected,) = one.run(_losses, name, {}, {}, timeout=_TIME)
            try:
                answers = two.run(_losses, name, axes, options, jit, timeout=_TIME)
            except Exception as error:
                found[name] = str(error).strip().splitlines()[0][:100]
                continue
            found[name] = float(max(np.abs(np.subtract(each, expected)).max() for each in answers))
    return found


def _losses(name: str, axes: dict, options: dict, jit: bool = False) -> list[float]:
    import keras
    import tensorflow as tf

    from tfdist import models
    from tfdist.pipeline import PipelineModel
    from tfdist.testing import strategy

    tf.config.experimental.enable_tensor_float_32_execution(False)
    shared = strategy(Mesh(**axes), **options)
    keras.utils.set_random_seed(1)
    with shared.scope():
        experts: dict[str, Any] = {"num_experts": 4} if name == "expert" else {}
        model = models.gpt(96, num_layers=2, width=64, num_heads=4, max_length=32, **experts)
        if name == "pipeline":
            model = PipelineModel(model, num_microbatches=4, input_shape=(32,))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit)
    ids = np.random.default_rng(0).integers(0, 96, (48, 32)).astype("int32")
    history = model.fit(ids, np.roll(ids, -1, 1), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"]


def memory_of_groups(rehearse: bool) -> dict[str, Any]:
    """What the driver counts after the use of one, two and four groups, in MB more than before."""
    mesh = {"tensor": 2}
    with RankPool(2, "horovod") as pool:
        answers = pool.run(_memory_of_groups, mesh, 1 << (10 if rehearse else 24), timeout=_TIME)
    return answers[0]


def _memory_of_groups(axes: dict, elements: int) -> dict[str, float]:
    import tensorflow as tf

    from tfdist.addons.monitoring.memory import driver_bytes
    from tfdist.backend import devices
    from tfdist.collectives import all_reduce, all_to_all
    from tfdist.testing import engine

    world = engine(Mesh(**axes))
    found: dict[str, float] = {}
    with tf.device(devices.device_name()):
        tensor = tf.ones([elements])
        before = driver_bytes() or 0
        for name, group, call in (
            ("first_sum", world.group(), all_reduce),
            ("first_exchange", world.group(), all_to_all),
            ("second_group", world.group("tensor"), all_reduce),
        ):
            float(tf.reduce_sum(call(tensor, group)))
            found[f"{name}_mb"] = ((driver_bytes() or 0) - before) / 1e6
    return found


def deterministic(rehearse: bool) -> dict[str, Any]:
    """Whether two runs of two ranks with deterministic operations end in the same weights."""
    ends = []
    for _ in range(2):
        with RankPool(2, "horovod", environment={"TF_DETERMINISTIC_OPS": "1"}) as pool:
            ends.append(pool.run(_deterministic, timeout=_TIME)[0])
    return {"equal": bool(ends[0] == ends[1])}


def _deterministic() -> list[float]:
    import keras
    import tensorflow as tf

    from tfdist import models
    from tfdist.layers import VocabParallelCrossEntropy
    from tfdist.testing import strategy

    tf.config.experimental.enable_op_determinism()
    shared = strategy()
    keras.utils.set_random_seed(1)
    with shared.scope():
        model = models.gpt(96, num_layers=1, width=32, num_heads=2, max_length=32)
        model.compile("adam", VocabParallelCrossEntropy(96, chunk_size=64))
    ids = np.random.default_rng(0).integers(0, 96, (32, 32)).astype("int32")
    model.fit(ids, ids, batch_size=8, shuffle=False, verbose=0)
    return [float(tf.reduce_sum(each)) for each in model.trainable_variables]


def killed(rehearse: bool) -> dict[str, Any]:
    """After how many seconds the others end if a rank is killed within sums."""
    pool = RankPool(2, "horovod")
    try:
        pool.run(_sums, 10, None, timeout=_TIME)
        began = time.monotonic()
        try:
            pool.run(_sums, 1_000_000, 2.0, timeout=_TIME)
            return {"ended": False}
        except Exception as error:
            said = str(error).strip().splitlines()[0][:100]
            return {"seconds_after_the_kill": time.monotonic() - began - 2.0, "said": said}
    finally:
        pool.close(kill=True)


def _sums(rounds: int, kill_after: float | None) -> None:
    import tensorflow as tf

    from tfdist.backend import devices
    from tfdist.collectives import all_reduce
    from tfdist.testing import engine, strategy

    strategy(watchdog_seconds=60.0)
    world, began = engine(), time.monotonic()
    step = tf.function(lambda x: all_reduce(x, world.group(), name="killed"))
    with tf.device(devices.device_name()):
        x = tf.ones([1 << 20])
    for _ in range(rounds):
        if kill_after is not None and world.rank == 1 and time.monotonic() - began > kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        x = step(x) / 2.0


def checkpoint(rehearse: bool) -> dict[str, Any]:
    """The rate of a save and of a restore of two ranks' weights, in GB/s."""
    with tempfile.TemporaryDirectory() as folder, RankPool(2, "horovod") as pool:
        return pool.run(_checkpoint, folder, 64 if rehearse else 8192, timeout=_TIME)[0]


def _checkpoint(folder: str, width: int) -> dict[str, float]:
    import keras

    from tfdist.callbacks import Checkpointer
    from tfdist.testing import strategy

    shared = strategy()
    with shared.scope():
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(4)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile("sgd", "mse")
    x = np.ones((4, width), np.float32)
    size = 4 * 4 * width * width / 1e9
    found = {}
    for name in ("save", "restore"):
        began = time.monotonic()
        model.fit(x, x, batch_size=4, verbose=0, callbacks=[Checkpointer(folder)])
        found[f"fit_with_{name}_s"] = time.monotonic() - began
    return {"gb": size, **found}
