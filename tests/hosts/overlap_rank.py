"""What `tests.hosts.overlap` runs on each rank: a step that computes, one that talks, one that does both.

Prints a line of JSON on the chief: seconds of each, and the bytes of the gradients. With a file as
its argument it also writes a trace of some whole steps there (Chrome's format, one row a rank): the
steps, and the bytes that have come over the link.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import keras
import tensorflow as tf

import tfdist
from tfdist import layers, models
from tfdist.collectives import all_reduce
from tfdist.collectives.objects import all_gather_object
from tfdist.testing.traffic import traffic

ROUNDS, STEPS, TRACED = 9, 2, 3
LAYERS, WIDTH, TOKENS, VOCABULARY, ROWS = 4, 256, 128, 512, 32


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tfdist.strategies.auto()
    group = strategy.group("data")
    alone, _ = training(tfdist.strategies.LocalStrategy(), ROWS)
    together, variables = training(strategy, ROWS * group.size)
    gradients = [tf.ones(variable.shape) for variable in variables]

    @tf.function
    def talk():
        made = [tf.identity(gradient) for gradient in gradients]  # Reductions wait for operations.
        return strategy.extended.reduce_gradients(made, "mean")

    for step in (alone, talk, together):  # Functions are traced a second time on their second call.
        slowest(step, group)
    seconds: dict[str, list[float]] = {"compute": [], "talk": [], "both": []}
    for _ in range(ROUNDS):
        for name, step in (("compute", alone), ("talk", talk), ("both", together)):
            seconds[name].append(slowest(step, group))
    rows = all_gather_object(trace_of(together, group.rank), strategy.group(), name="trace")
    if strategy.is_chief:
        size = sum(gradient.shape.num_elements() * 4 for gradient in gradients)
        print(json.dumps({**seconds, "bytes": size}), flush=True)
        if len(sys.argv) > 1:
            with open(sys.argv[1], "w") as file:
                json.dump({"traceEvents": [event for row in rows for event in row]}, file)


def training(strategy, rows: int):
    """A function that trains a GPT for a step, warm; and what it trains."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.gpt(
            VOCABULARY, num_layers=LAYERS, width=WIDTH, num_heads=4, max_length=TOKENS
        )
        model.compile("adam", layers.VocabParallelCrossEntropy(VOCABULARY), jit_compile=False)
    tokens = tf.random.uniform((rows, TOKENS), 0, VOCABULARY, tf.int32)
    data = tf.data.Dataset.from_tensors((tokens, tokens)).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(data))
    train = model.make_train_function() or model.train_function

    def step():
        return train(iterator)

    step()
    return step, model.trainable_variables


def slowest(step, group) -> float:
    """The mean time of some steps, on the slowest rank; all begin together."""
    all_reduce(tf.zeros([]), group, name="begin").numpy()
    begun = time.perf_counter()
    for _ in range(STEPS):
        results = step()
    for result in tf.nest.flatten(results):
        result.numpy()
    own = tf.constant((time.perf_counter() - begun) / STEPS, tf.float64)
    return float(all_reduce(own, group, "max", name="slowest"))


def trace_of(step, rank: int) -> list[dict]:
    """Events of some steps: each of them, and how many bytes had come by when."""
    events, over = [], threading.Event()
    before = traffic().received

    def watch():
        while not over.wait(0.002):
            came = {"bytes": traffic().received - before}
            events.append({"ph": "C", "name": "received", "pid": rank, "ts": now(), "args": came})

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    for number in range(TRACED):
        begun = now()
        for result in tf.nest.flatten(step()):
            result.numpy()
        name = f"step {number}"
        events.append(
            {"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": begun, "dur": now() - begun}
        )
    over.set()
    watcher.join()
    return events


def now() -> float:
    """Microseconds; the hosts' clocks are one."""
    return time.time() * 1e6


if __name__ == "__main__":
    main()
