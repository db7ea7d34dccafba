"""Asynchronous beside synchronous training: speed with a slow worker, convergence, and Hogwild!.

    python -m benchmarks.asynchronous [--rounds=5] [--only=hogwild|slow-worker|backup|speculative|digits]

Each round measures both sides of a comparison, one after the other. Measure on an idle machine: each
worker has one thread, and a job of three workers and a server wants four cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_WORKERS = 3
#: How many times slower worker 1 is; with backup ranks it is one of one more.
_SLOWER, _MUCH_SLOWER = 4, 10
#: What speed is measured on.
_PACED = {"epochs": 3, "steps": 60, "seed": 0, "step_seconds": 0.05}
#: Of the sparse logistic regression.
_FEATURES, _PER_SAMPLE, _SAMPLES, _ROWS, _EPOCHS = 8_000_000, 32, 400_000, 1024, 3


def spread(values: Sequence[float]) -> str:
    """The median and the quartiles."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


# -- Hogwild! ------------------------------------------------------------------------------------


def hogwild(rounds: int) -> None:
    """Rows per second, and loss after updates of one size, with two threads and with one."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.addons.asynchronous import HogwildStrategy

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, _FEATURES, (_SAMPLES, _PER_SAMPLE)).astype("int32")
    truth = rng.normal(size=_FEATURES)
    odds = 1 / (1 + np.exp(-truth[ids].sum(1) / 2))
    clicked = (rng.random(_SAMPLES) < odds).astype("float32")[:, None]

    def trained(threads: int) -> tuple[keras.Model, float, float]:
        """A model after an epoch that traces it, and the seconds, and CPU seconds, of more."""
        keras.utils.set_random_seed(0)
        with HogwildStrategy(threads).scope():
            model = keras.Sequential(
                [
                    keras.Input((_PER_SAMPLE,), dtype="int32"),
                    keras.layers.Embedding(_FEATURES, 1, embeddings_initializer="zeros"),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1, kernel_initializer="ones", trainable=False),
                ]
            )
            model.compile(
                keras.optimizers.SGD(300.0),
                keras.losses.BinaryCrossentropy(from_logits=True),
                steps_per_execution=100,
            )
        data = tf.data.Dataset.from_tensor_slices((ids, clicked)).batch(_ROWS).cache()
        model.fit(data, epochs=1, verbose=0, shuffle=False)
        begun, cpu = time.perf_counter(), time.process_time()
        model.fit(data, epochs=_EPOCHS, verbose=0, shuffle=False)
        return model, time.perf_counter() - begun, time.process_time() - cpu

    speed, loss, cpu = [], [], []
    for turn in range(rounds):
        one, seconds_of_one, cpu_of_one = trained(1)
        two, seconds_of_two, cpu_of_two = trained(2)
        speed.append(seconds_of_one / seconds_of_two)
        losses = [m.evaluate(ids, clicked, batch_size=8192, verbose=0) for m in (one, two)]
        loss.append(losses[1] / losses[0])
        cpu.append(cpu_of_two / cpu_of_one)
        rate = _EPOCHS * _SAMPLES / seconds_of_one
        print(
            f"hogwild round {turn + 1}: {rate:,.0f} rows/s in 1 thread, {speed[-1]:.3f} times in 2, loss "
            f"{losses[0]:.4f} and {losses[1]:.4f}, "
            f"{cpu[-1]:.3f} times the CPU seconds; cores busy {cpu_of_one / seconds_of_one:.2f} and {cpu_of_two / seconds_of_two:.2f}",
            flush=True,
        )
    print(
        f"Hogwild!, 2 threads over 1: speed {spread(speed)}, loss {spread(loss)}, CPU seconds {spread(cpu)}"
    )


# -- Jobs ----------------------------------------------------------------------------------------


def worker(folder: str, options: dict) -> None:
    """What `tfdist-run` starts: trains, and writes its rate and what it reached."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    tf.config.threading.set_intra_op_parallelism_threads(1)
    if (backup := options.get("backup")) is None:
        strategy = tfdist.strategies.auto()
    else:
        strategy = tfdist.addons.asynchronous.ParameterServerStrategy(
            backup_ranks=backup, speculative=options.get("speculative", False)
        )
    is_synchronous = options["kind"] == "synchronous"
    index = strategy.mesh.rank if is_synchronous else strategy.worker_index
    seconds = options["step_seconds"] * (options["slower"] if index == 1 else 1)

    def pause():
        time.sleep(seconds)
        return np.int32(0)

    class Pause(keras.layers.Layer):
        """Sleeps as long as a larger model would compute, on one worker for longer."""

        def call(self, inputs, training=None):
            if not (training and seconds):
                return inputs
            paused = tf.numpy_function(pause, [], tf.int32)
            with tf.control_dependencies([paused]):
                return tf.identity(inputs)

    x, y, held_out = _digits()
    keras.utils.set_random_seed(options["seed"])
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                Pause(),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.002),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    class Pace(keras.callbacks.Callback):
        """Counts steps."""

        begun, ended, steps = 0.0, 0.0, 0

        def on_epoch_begin(self, epoch, logs=None):
            # In the first, this worker traces its step, and then others trace theirs beside it.
            if epoch == 1:
                self.begun, self.steps = time.perf_counter(), 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            self.ended = time.perf_counter()

    pace = Pace()
    # A worker's step has as many rows as a rank's.
    rows = 32 * (_WORKERS if is_synchronous else 1)
    how = {"epochs": options["epochs"], "verbose": 0, "callbacks": [pace]}
    if steps := options.get("steps"):
        # Without an end: TensorFlow's data sets begin anew in some 40 ms, and at times in 650.
        data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(rows, drop_remainder=True)
        model.fit(data, steps_per_epoch=steps, **how)
    else:
        model.fit(x, y, batch_size=rows, **how)
    loss, accuracy = model.evaluate(*held_out, verbose=0)
    found = {
        "rate": 32 * pace.steps / (pace.ended - pace.begun),
        "dropped": int(strategy.dropped_gradients().sum()) if backup else 0,
        "redone": int(strategy.redone_gradients().sum()) if backup else 0,
        "loss": loss,
        "accuracy": accuracy,
    }
    with open(os.path.join(folder, f"{index}.json"), "w") as file:
        json.dump(found, file)


def _digits():
    """Images and labels, and those of every fifth apart, to test on."""
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    is_test = np.arange(len(images)) % 5 == 4
    return images[~is_test], labels[~is_test], (images[is_test], labels[is_test])


def job(kind: str, **options) -> list[dict]:
    """Runs a job of either kind; what each worker wrote."""
    with tempfile.TemporaryDirectory() as folder:
        workers = _WORKERS + (options.get("backup") or 0)
        flags = ["--engine=tensorflow", "-np", str(workers)]
        flags += [] if kind == "synchronous" else ["--ps=1"]
        own = [sys.executable, "-m", "benchmarks.asynchronous", "--worker", folder]
        words = [sys.executable, "-m", "tfdist.launch.run.main", *flags, "--", *own]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(
            [*words, json.dumps({"kind": kind, **options})],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=1200,
        )
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def slow_worker(rounds: int) -> None:
    """Samples per second of all workers, where one of them is four times slower."""
    ratios = []
    for turn in range(rounds):
        rates = {
            kind: sum(each["rate"] for each in job(kind, slower=_SLOWER, **_PACED))
            for kind in ("synchronous", "asynchronous")
        }
        ratios.append(rates["asynchronous"] / rates["synchronous"])
        print(f"slow-worker round {turn + 1}: {rates}", flush=True)
    print(
        f"{_WORKERS} workers, one {_SLOWER} times slower: asynchronous over synchronous samples/s "
        f"{spread(ratios)}"
    )


def backup(rounds: int, speculative: bool = False) -> None:
    """Updates per second with a backup rank, where one of all is ten times slower, and without either."""
    name = "speculative" if speculative else "backup"
    how = {"backup": 1, "speculative": speculative, "slower": _MUCH_SLOWER}
    ratios = []
    for turn in range(rounds):
        with_backup = job("asynchronous", **how, **_PACED)[0]
        alone = job("asynchronous", backup=0, slower=1, **_PACED)[0]
        ratios.append(with_backup["rate"] / alone["rate"])
        print(
            f"{name} round {turn + 1}: worker 0 {with_backup['rate']:.0f} samples/s, "
            f"{with_backup['dropped']} gradients dropped, {with_backup['redone']} redone; without the slow worker {alone['rate']:.0f}",
            flush=True,
        )
    print(
        f"{name}: {_WORKERS} gradients of {_WORKERS + 1} workers, one {_MUCH_SLOWER} times slower, over "
        f"{_WORKERS} workers: {spread(ratios)}"
    )


def digits(rounds: int) -> None:
    """What both reach on the digits after as many epochs."""
    found: dict[str, list[dict]] = {"synchronous": [], "asynchronous": []}
    for turn in range(rounds):
        for kind, results in found.items():
            results.append(job(kind, epochs=15, seed=turn, step_seconds=0.0, slower=1)[0])
    for kind, results in found.items():
        for name in ("accuracy", "loss"):
            print(f"digits, {kind}: {name} {spread([each[name] for each in results])}")


_PARTS: dict[str, Callable[[int], None]] = {
    "hogwild": hogwild,
    "slow-worker": slow_worker,
    "backup": backup,
    "speculative": functools.partial(backup, speculative=True),
    "digits": digits,
}


def main() -> int:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--only", choices=list(_PARTS), help="one of the comparisons")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker[0], json.loads(given.worker[1]))
        return 0
    for name, part in _PARTS.items():
        if given.only in (None, name):
            part(given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
