"""A training of the digits on a local cluster of Ray: `job.py FOLDER '{"engine": ..., "kill": ...}'`.

Its result are the files `starts`, `result` and `outcome` of the folder.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train.tensorflow import TensorflowTrainer

from tfdist.addons.ray import TfdistConfig


def train(config: dict) -> None:
    """What each worker runs."""
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist.addons.ray import RayReport, run_directory

    tf.config.threading.set_intra_op_parallelism_threads(1)
    folder = Path(config["folder"])
    kind = {"horovod": "HorovodStrategy", "tensorflow": "MultiWorkerStrategy"}[config["engine"]]
    strategy = getattr(tfdist.strategies, kind)(
        tfdist.Mesh(**config["mesh"]), watchdog_seconds=60.0, deterministic=True
    )
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
        )
        if config["mesh"].get("tensor", 1) > 1:
            tfdist.parallelize(model, {".*dense/kernel": "column", ".*dense_1/kernel": "row"})
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    digits = tfdist.addons.datasets.load("digits", "train", data_dir=folder / "data")[0]
    data = digits.map(lambda x, y: (tf.reshape(x, [64]), y)).shuffle(2000, seed=3).batch(96)

    class Events(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if config["pause"]:
                time.sleep(config["pause"])
            step = int(self.model.optimizer.iterations)
            once = folder / f"killed-{strategy.mesh.rank}"
            if config["kill"] == [step, strategy.mesh.rank] and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_begin(self, logs=None):
            line = {"size": strategy.mesh.size, "step": int(self.model.optimizer.iterations)}
            if strategy.is_chief:
                with open(folder / "starts", "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    directory = f"{run_directory()}/checkpoints"
    callbacks = [
        tfdist.callbacks.Checkpointer(directory, every_steps=5),
        RayReport(directory),
        Events(),
    ]
    history = model.fit(data, epochs=config["epochs"], verbose=0, callbacks=callbacks).history
    whole = [tfdist.sharding.whole_value(variable).numpy() for variable in model.variables]
    if strategy.is_chief:
        result = {"weights": [value.tolist() for value in whole], "loss": history["loss"][-1]}
        (folder / "result").write_text(json.dumps(result))


def join(address: str) -> None:
    """Starts one more node of a cluster, until this process ends."""
    command = ["ray", "start", f"--address={address}", "--num-cpus=1", "--block"]
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    atexit.register(node.terminate)


def main() -> None:
    """Runs the job."""
    folder = Path(sys.argv[1])
    given: dict[str, Any] = {
        "engine": "horovod",
        "mesh": {},
        "kill": None,
        "epochs": 3,
        "workers": 2,
        "pause": 0.0,
    }
    config = {**given, "folder": str(folder), **json.loads(sys.argv[2])}
    scaling: dict[str, Any] = {"num_workers": config["workers"]}
    if isinstance(config["workers"], list):
        scaling = {
            "num_workers": tuple(config["workers"]),
            "elastic_resize_monitor_interval_s": 1.0,
        }
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        atexit.register(cluster.shutdown)
        threading.Timer(config["joins"], join, [cluster.address]).start()
    else:
        # Not a cluster that another test has left.
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    # Ray's types are those of its former version.
    library: Any = ray.train
    result: Any = TensorflowTrainer(
        train,
        train_loop_config=config,
        tensorflow_config=TfdistConfig(),
        scaling_config=library.ScalingConfig(**scaling),
        run_config=library.RunConfig(
            name="digits",
            storage_path=str(folder / "storage"),
            failure_config=library.FailureConfig(max_failures=1),
        ),
    ).fit()
    outcome = {"metrics": result.metrics, "checkpoint": result.checkpoint.path}
    (folder / "outcome").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
