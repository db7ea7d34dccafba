"""What one process does for the tests of asynchronous strategies."""

from __future__ import annotations

import contextlib
from unittest import mock

__all__ = [
    "CASES",
    "bytes_read",
    "compare",
    "hogwild_counts",
    "hogwild_is_serial",
    "hogwild_losses",
    "refusals",
]

#: By name: the optimizer, servers, whether there is a table, and lambda; None for backup ranks, of which
#: there are none here.
CASES: dict[str, tuple[str, int, bool, float | None]] = {
    "momentum": ("sgd", 1, False, 0.0),
    "adam-schedule-global-norm-3-servers": ("adam", 3, False, 0.5),
    "accumulating-weight-decay": ("adamw", 1, False, 0.0),
    "adagrad-table": ("adagrad", 2, True, 0.1),
    "backup-momentum-3-servers": ("sgd", 3, False, None),
    "backup-momentum-table": ("sgd", 1, True, None),
}


def _optimizer(name: str):
    import keras

    schedule = keras.optimizers.schedules.CosineDecay
    return {
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(schedule(0.01, 100), global_clipnorm=0.5),
        "adamw": lambda: keras.optimizers.AdamW(
            0.01, weight_decay=0.01, clipnorm=0.5, gradient_accumulation_steps=2
        ),
        "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    }[name]()


def _model(optimizer: str, has_table: bool):
    import keras

    if has_table:
        layers = [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(5000, 8),
            keras.layers.Flatten(),
        ]
    else:
        layers = [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
        ]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_optimizer(optimizer), loss, metrics=["accuracy"])
    return model


def _data(has_table: bool, rows: int = 50):
    import numpy as np

    rng = np.random.default_rng(0)
    # Ids below zero count from the end, as in Keras.
    x = rng.integers(-9, 5000, (rows, 6)) if has_table else rng.normal(size=(rows, 6))
    return x.astype("int32" if has_table else "float32"), rng.integers(0, 3, rows)


def compare(case: str) -> tuple[float, list, int]:
    """The largest difference to one process, and how many updates servers and optimizer counted."""
    import keras
    import numpy as np

    from tfdist.addons.asynchronous import ParameterServerStrategy

    optimizer, servers, has_table, compensation = CASES[case]
    if compensation is None:
        strategy = ParameterServerStrategy(servers, backup_ranks=0)
    else:
        strategy = ParameterServerStrategy(servers, 0, delay_compensation=compensation)
    found = []
    for scope in (contextlib.nullcontext, strategy.scope):
        keras.utils.set_random_seed(3)
        with scope():
            model = _model(optimizer, has_table)
        # The last batch is smaller.
        model.fit(*_data(has_table), batch_size=8, epochs=2, verbose=0)
        found.append(model)
    plain, served = found
    pairs = [*zip(plain.weights, served.weights, strict=True)]
    pairs += zip(plain.optimizer.variables, served.optimizer.variables, strict=True)
    difference = max(
        float(np.abs(np.float64(one.numpy()) - np.float64(other.numpy())).max())
        for one, other in pairs
    )
    return difference, strategy.applied_updates().tolist(), 2 * 7


def bytes_read() -> tuple[int, int]:
    """How many values a step reads whole, and how many rows of the table at most."""
    from tfdist.addons.asynchronous import ParameterServerStrategy
    from tfdist.addons.asynchronous.hosted_model import HostedModel

    strategy = ParameterServerStrategy()
    with strategy.scope():
        model = _model("sgd", has_table=True)
    read, rows = [], []
    whole, by_row = HostedModel.pull, HostedModel.pull_rows

    def pull(self, indices):
        values, versions = whole(self, indices)
        read.append(sum(value.size for value in values.values()))
        return values, versions

    def pull_rows(self, index, ids):
        rows.append(len(ids))
        return by_row(self, index, ids)

    with (
        mock.patch.object(HostedModel, "pull", pull),
        mock.patch.object(HostedModel, "pull_rows", pull_rows),
    ):
        model.fit(*_data(True, 16), batch_size=4, epochs=1, verbose=0)
    # The first and the last are before and after the steps.
    return min(read), max(rows)


def refusals() -> list[tuple[str, str]]:
    """What was said, and what it should tell the user to do."""
    import keras
    import numpy as np

    from tfdist.addons.asynchronous import HogwildStrategy, ParameterServerStrategy
    from tfdist.callbacks import Checkpointer

    served, threads = ParameterServerStrategy(2), HogwildStrategy(2)
    x, y = _data(False)
    found = []

    def refused(strategy, way_out, callbacks=(), policy=None, **options):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy or before)
        try:
            with strategy.scope():
                model = _model("sgd", False)
                model.compile(options.pop("optimizer", "sgd"), "mse", **options)
            model.fit(x, y[:, None], verbose=0, callbacks=list(callbacks))
        except (ValueError, NotImplementedError) as error:
            found.append((str(error), way_out))
        else:
            found.append(("nothing", way_out))
        finally:
            keras.config.set_dtype_policy(before)

    for strategy in (served, threads):
        refused(strategy, "jit_compile", jit_compile=True)
        refused(strategy, "mixed_bfloat16", policy="mixed_float16")
    refused(served, "one server", optimizer=keras.optimizers.SGD(use_ema=True))
    refused(served, "BackupAndRestore", callbacks=[Checkpointer("/tmp/tfdist-none")])
    refused(threads, "run_eagerly", run_eagerly=True)
    with served.scope():
        model = _model("sgd", False)
    try:
        model.train_on_batch(x, y)
    except NotImplementedError as error:
        found.append((str(error), "Use `fit`"))
    else:
        found.append(("nothing", "Use `fit`"))
    with served.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(1)])
        unbuilt.compile("sgd", "mse")
    unbuilt.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)  # Keras builds it.
    return found


# -- Hogwild! ------------------------------------------------------------------------------------


def _clicks(rows: int, features: int = 2000):
    import numpy as np

    rng = np.random.default_rng(0)
    ids = rng.integers(0, features, (rows, 10)).astype("int32")
    truth = rng.normal(size=features)
    return ids, (truth[ids].sum(1) > 0).astype("float32")[:, None]


def _logistic(strategy, features: int = 2000, **options):
    import keras

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((10,), dtype="int32"),
                keras.layers.Embedding(features, 1, embeddings_initializer="zeros"),
                keras.layers.Flatten(),
                keras.layers.Dense(1, kernel_initializer="ones", trainable=False),
            ]
        )
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(2.0), loss, metrics=["accuracy"], **options)
    return model


def hogwild_losses(threads: int) -> tuple[float, float, int]:
    """The loss that some threads reach on a sparse logistic regression, after updates of one size."""
    from tfdist.addons.asynchronous import HogwildStrategy

    ids, clicked = _clicks(4000)
    model = _logistic(HogwildStrategy(threads), steps_per_execution=12)
    history = model.fit(ids, clicked, batch_size=16, epochs=3, verbose=0).history
    loss = model.evaluate(ids, clicked, batch_size=500, verbose=0)[0]
    return loss, history["loss"][-1], int(model.optimizer.iterations.numpy())


def hogwild_is_serial() -> float:
    """The largest difference between one thread and no strategy."""
    import keras
    import numpy as np

    from tfdist.addons.asynchronous import HogwildStrategy

    found = []
    for scope in (contextlib.nullcontext, HogwildStrategy(1).scope):
        keras.utils.set_random_seed(3)
        with scope():
            model = _model("adagrad", True)
        model.fit(*_data(True), batch_size=8, epochs=2, verbose=0)
        found.append(model)
    return max(
        float(np.abs(one - other).max())
        for one, other in zip(*(model.get_weights() for model in found), strict=True)
    )


def hogwild_counts(optimizer: str, rows: int, batch_size: int, threads: int) -> tuple:
    """Updates, rows that the metrics counted, and the first and the last loss of a dense model."""
    import keras

    from tfdist.addons.asynchronous import HogwildStrategy

    keras.utils.set_random_seed(0)
    with HogwildStrategy(threads).scope():
        model = _model(optimizer, False)
    history = model.fit(*_data(False, rows), batch_size=batch_size, epochs=10, verbose=0).history
    counted = int(model.metrics[0].count.numpy())
    return int(model.optimizer.iterations.numpy()), counted, history["loss"][0], history["loss"][-1]
