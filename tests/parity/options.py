"""What `compile`, `fit` and callbacks offer: averages, precision, schedules, files, executions."""

from __future__ import annotations

import os
import tempfile

import keras
import numpy as np
from keras import layers

from tests.parity.feeding import Feed, Result, adam, rng, run, scope, sgd, start

__all__ = [
    "averaged_weights",
    "best_weights_back",
    "cosine_schedule",
    "early_stop",
    "exported",
    "frozen_then_tuned",
    "half_precision",
    "many_optimizers",
    "plateau",
    "saved_and_loaded",
    "several_steps_per_execution",
    "short_floats",
    "swapped_average",
    "tensorboard",
    "unrolled_eagerly",
    "whole_evaluation",
    "xla_if_it_can",
]


def network():
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, activation="relu"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(3),
        ]
    )


def points(rows: int):
    random = rng()
    return random.normal(size=(rows, 5)).astype("float32"), random.integers(0, 3, rows)


def compiled(optimizer=sgd, **options):
    return lambda: {
        "optimizer": optimizer(),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **options,
    }


def simple(strategy, feed: Feed, *args, build=network, **fit) -> Result:
    return run(strategy, feed, build, compiled(*args), *points(feed.rows), **fit)


def averaged_weights(strategy, feed: Feed) -> Result:
    return simple(strategy, feed, lambda: adam(use_ema=True, ema_momentum=0.8))


def swapped_average(strategy, feed: Feed) -> Result:
    """The average stands in for the weights while they are evaluated, then they come back."""
    callback = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    return simple(
        strategy,
        feed,
        lambda: sgd(use_ema=True, ema_momentum=0.8),
        callbacks=[callback],
        validation_data=points(7),
    )


def half_precision(strategy, feed: Feed) -> Result:
    return with_policy("mixed_float16", strategy, feed)


def short_floats(strategy, feed: Feed) -> Result:
    return with_policy("mixed_bfloat16", strategy, feed)


def with_policy(policy: str, strategy, feed: Feed) -> Result:
    keras.config.set_dtype_policy(policy)

    def build():
        return keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(6, activation="relu"),
                layers.Dense(3, dtype="float32"),
            ]
        )

    try:
        return simple(strategy, feed, build=build)
    finally:
        keras.config.set_dtype_policy("float32")


def cosine_schedule(strategy, feed: Feed) -> Result:
    schedule = keras.optimizers.schedules.CosineDecayRestarts(0.05, 2)
    return simple(
        strategy,
        feed,
        lambda: keras.optimizers.Nadam(schedule),
        extra=lambda model: float(model.optimizer.learning_rate),
    )


def many_optimizers(strategy, feed: Feed) -> Result:
    """Each optimizer of Keras for one epoch on the same model, from where the last one ended."""
    start()
    kinds = ["Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Lamb", "Lion", "RMSprop"]
    x, y = points(feed.rows)
    with scope(strategy):
        model = keras.Sequential(
            [keras.Input((5,)), layers.Dense(4, activation="tanh"), layers.Dense(3)]
        )
    logs: dict[str, list] = {}
    for kind in kinds:
        with scope(strategy):
            model.compile(
                getattr(keras.optimizers, kind)(1e-3),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        logs[kind] = feed.fit(model, x, y, epochs=1).history["loss"]
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, logs, {}, [])


def plateau(strategy, feed: Feed) -> Result:
    callback = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=1, min_delta=1
    )
    return simple(strategy, feed, epochs=4, callbacks=[callback], validation_data=points(7))


def early_stop(strategy, feed: Feed) -> Result:
    callback = keras.callbacks.EarlyStopping(patience=1, min_delta=10, restore_best_weights=True)
    return simple(strategy, feed, epochs=5, callbacks=[callback], validation_data=points(7))


def best_weights_back(strategy, feed: Feed) -> Result:
    """`ModelCheckpoint` in one folder, and the best weights loaded by all ranks."""
    with _folder(strategy) as folder:
        path = os.path.join(folder, "best.weights.h5")
        callback = keras.callbacks.ModelCheckpoint(
            path, monitor="loss", save_best_only=True, save_weights_only=True
        )
        return simple(
            strategy, feed, callbacks=[callback], extra=lambda model: model.load_weights(path)
        )


def _folder(strategy):
    """A folder that all ranks know; the chief's, which lives as long as the program's."""
    if strategy is None:
        return tempfile.TemporaryDirectory()
    from tfdist.collectives.objects import broadcast_object

    group = strategy.group()
    own = tempfile.TemporaryDirectory()
    shared = broadcast_object(own.name, group, name="folder")

    class Shared:
        def __enter__(self):
            return shared

        def __exit__(self, *_):
            from tfdist.collectives import barrier

            barrier(group)
            own.cleanup()

    return Shared()


def tensorboard(strategy, feed: Feed) -> Result:
    with _folder(strategy) as folder:
        callbacks = [
            keras.callbacks.TensorBoard(folder, histogram_freq=1, update_freq=1),
            keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
            keras.callbacks.TerminateOnNaN(),
        ]
        return simple(strategy, feed, callbacks=callbacks, validation_data=points(7))


def exported(strategy, feed: Feed) -> Result:
    """A SavedModel, whose answers are compared as those of the model."""
    import tensorflow as tf

    x, y = points(feed.rows)
    with _folder(strategy) as folder:

        def export(model):
            path = os.path.join(folder, "served")
            model.export(path, verbose=False)
            served = tf.saved_model.load(path)
            return served.serve(x).numpy()

        result = run(strategy, feed, network, compiled(), x, y, extra=export)
    result.predictions.append(result.extra)
    result.extra = None
    return result


def saved_and_loaded(strategy, feed: Feed) -> Result:
    """Train, save, load under the strategy, train on: optimizer and all."""
    start()
    x, y = points(feed.rows)
    with _folder(strategy) as folder:
        path = os.path.join(folder, "model.keras")
        with scope(strategy):
            model = network()
            model.compile(**compiled(adam)())
        feed.fit(model, x, y, epochs=1)
        model.save(path)
        with scope(strategy):
            loaded = keras.saving.load_model(path)
        history = feed.fit(loaded, x, y, epochs=1)
        measured = loaded.evaluate(x, y, batch_size=3, verbose=0, return_dict=True)
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(loaded.weights)}
    return Result(weights, history.history, measured, [])


def frozen_then_tuned(strategy, feed: Feed) -> Result:
    """Fine-tuning: the first layer frozen, then all, compiled anew with a lower rate."""
    start()
    x, y = points(feed.rows)
    with scope(strategy):
        model = network()
        model.layers[0].trainable = False
        model.compile(**compiled(adam)())
    feed.fit(model, x, y, epochs=1)
    with scope(strategy):
        model.layers[0].trainable = True
        model.compile(**compiled(lambda: keras.optimizers.Adam(1e-4))())
    history = feed.fit(model, x, y, epochs=1, validation_split=0.0)
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, history.history, {}, [])


def several_steps_per_execution(strategy, feed: Feed) -> Result:
    x, y = points(feed.rows)
    options = compiled(adam, steps_per_execution=2)
    return run(strategy, feed, network, options, x, y, validation_data=(x, y))


def unrolled_eagerly(strategy, feed: Feed) -> Result:
    x, y = points(feed.rows)
    return run(strategy, feed, network, compiled(adam, run_eagerly=True), x, y, epochs=1)


def xla_if_it_can(strategy, feed: Feed) -> Result:
    x, y = points(feed.rows)
    return run(strategy, feed, network, compiled(sgd, jit_compile="auto"), x, y)


def whole_evaluation(strategy, feed: Feed) -> Result:
    """Evaluation and prediction in sizes from one row to all, and steps that end before the rows."""
    result = simple(strategy, feed)
    start()
    x, y = points(feed.rows)
    with scope(strategy):
        model = network()
        model.compile(**compiled()())
    for rows in (1, 2, 3, 7, feed.rows + 4):
        found = model.evaluate(x, y, batch_size=rows, verbose=0, return_dict=True)
        result.evaluation |= {f"{name}-{rows}": value for name, value in found.items()}
        result.predictions.append(model.predict(x, batch_size=rows, verbose=0))
    short = model.evaluate(x, y, batch_size=2, steps=3, verbose=0, return_dict=True)
    result.evaluation |= {f"{name}-short": value for name, value in short.items()}
    result.predictions.append(np.asarray(model(x[:1])))
    return result
