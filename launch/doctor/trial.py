"""Imports of a rank, with a line on stdout for each step: `python -m tfdist.launch.doctor.trial`.

It runs in a separate process, which a library built for another TensorFlow may crash.
"""

from __future__ import annotations

import importlib.util
import json
import textwrap
import time
from collections.abc import Callable
from typing import Any

#: The prefix of its lines; libraries may print others.
PREFIX = "tfdist-doctor: "

#: The title of each step on the page.
STEPS = {
    "tensorflow": "TensorFlow engine",
    "tfdist": "Strategies",
    "horovod": "Horovod engine",
    "native": "Native library",
}
#: The remedy of each step.
REMEDIES = {
    "tensorflow": "Reinstall TensorFlow: pip install --force-reinstall tensorflow",
    "tfdist": "Install the versions of Keras and TensorFlow that tfdist requires: pip install tfdist",
    "horovod": "tfdist-install-horovod builds Horovod for this TensorFlow",
    "native": "tfdist-install-horovod, where a C++ compiler is installed",
}


def _tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    gpus = [
        tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    cuda = tf.test.is_built_with_cuda()
    try:
        # Only with oneDNN does TensorFlow's allocator on CPUs have statistics.
        tf.config.experimental.get_memory_info("CPU:0")
        onednn = True
    except ValueError:
        onednn = False
    text = f"works, TensorFlow {tf.__version__}"
    return {"text": text, "gpus": gpus, "cuda": cuda, "onednn": onednn}


def _tfdist() -> dict[str, Any]:
    import keras

    from tfdist import strategies

    # Checks the signatures of all patched functions of Keras.
    with strategies.LocalStrategy().scope():
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    return {"text": f"work on Keras {keras.__version__}"}


def _horovod() -> dict[str, Any]:
    if importlib.util.find_spec("horovod") is None:
        return {"missing": "not installed: ranks use TensorFlow's collectives"}
    import horovod.tensorflow as hvd

    names = {"Gloo": hvd.gloo_built, "MPI": hvd.mpi_built, "NCCL": hvd.nccl_built}
    carriers = [name for name, is_built in names.items() if is_built()]
    if not carriers:
        return {"error": "Horovod was built without Gloo, MPI and NCCL"}
    return {"text": f"works, over {' and '.join(carriers)}"}


def _native() -> dict[str, Any]:
    from tfdist.backend.native import TRANSPORT

    path = TRANSPORT.path()
    if not path.exists():
        return {"missing": "not built: latency-critical tensors use the slower engine"}
    TRANSPORT.load()
    return {"text": f"works, {path.name}"}


def main() -> None:
    """Run all steps in turn; a failed step does not prevent the others."""
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "tensorflow": _tensorflow,
        "tfdist": _tfdist,
        "horovod": _horovod,
        "native": _native,
    }
    for name, step in steps.items():
        begin = time.monotonic()
        try:
            found = step()
        except Exception as error:  # A broken library may raise any exception.
            words = textwrap.shorten(str(error), 500, placeholder=" ...")
            found = {"error": f"{type(error).__name__}: {words}"}
        found |= {"step": name, "seconds": round(time.monotonic() - begin, 2)}
        print(PREFIX + json.dumps(found), flush=True)
        if name == "tensorflow" and "error" in found:
            return  # The other steps require TensorFlow.


if __name__ == "__main__":
    main()
