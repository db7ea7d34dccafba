"""Scripts that ended unlike one process."""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(3).normal(size=(41, 6)).astype("float32")


def on(ranks: bool, **options):
    import tfdist
    from tfdist.testing import strategy

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    if ranks:
        return strategy(tfdist.Mesh(), **options).scope()
    return tfdist.strategies.LocalStrategy().scope()


class Nested(keras.callbacks.Callback):
    """Predicts without a progress bar, and then reads the logs of batches."""

    def __init__(self):
        super().__init__()
        self.losses: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.model.predict(X[:4], verbose=0)

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


def nested_predict(ranks: bool) -> list[float]:
    seen = Nested()
    with on(ranks):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(X, X[:, :3], batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[seen])
    return seen.losses


def head_without_a_loss(ranks: bool) -> list[float]:
    """Gradients are accumulated, and one weight has none."""
    with on(ranks, zero_stage=2):
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(4)(inputs)
        outputs = [keras.layers.Dense(1, name=name)(hidden) for name in ("a", "b")]
        model = keras.Model(inputs, outputs)
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(optimizer, loss={"a": "mse", "b": None})
    targets = {"a": X[:40, :1], "b": X[:40, 1:2]}
    history = model.fit(X[:40], targets, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"]


class Normed(keras.layers.Layer):
    """Not defined for a row of zeros."""

    def call(self, x):
        return x / keras.ops.norm(x, axis=-1, keepdims=True)


def scale_of_empty_ranks(ranks: bool) -> tuple[float, int]:
    """The last of six batches has one row."""
    with on(ranks):
        layers = [Normed(dtype="mixed_float16"), keras.layers.Dense(3, dtype="mixed_float16")]
        model = keras.Sequential([keras.Input((6,)), *layers])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 16.0)
        model.compile(optimizer, "mse")
    model.fit(X, X[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return float(optimizer.dynamic_scale), int(optimizer.iterations)


def state_in_float64(ranks: bool) -> float:
    with on(ranks):
        layer = keras.layers.Normalization(dtype="float64")
        layer.adapt(1.7e9 + np.arange(7.0)[:, None])
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(1.7e9 + X[:, :1].astype("float64"), X[:, :1], verbose=0)
    return float(np.asarray(layer.adapt_mean)[0])


class WithARate(keras.Sequential):
    """Logs more than its metrics."""

    def train_step(self, data):
        return {**super().train_step(data), "rate": self.optimizer.learning_rate}


class WithAMean(keras.Sequential):
    """Keras' step, with a metric of a batch."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "mean": keras.ops.mean(y_pred)}


def other_logs(ranks: bool) -> list[float]:
    """History and evaluation of the last batch, which has one row."""
    found = []
    for kind in (WithARate, WithAMean):
        with on(ranks):
            model = kind([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile("sgd", "mse", metrics=["mae", keras.metrics.AUC()])
        y = (X[:, :3] > 0).astype("float32")
        history = model.fit(X, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        found += [value for values in history.values() for value in values]
        found += model.evaluate(X, y, batch_size=8, verbose=0, return_dict=True).values()
    return found


def renamed(step):
    def other(self, data):
        return step(self, data)

    return other


class Decorated(keras.Sequential):
    """A step with another name."""

    @renamed
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def decorated_step(ranks: bool) -> list[float]:
    with on(ranks):
        model = Decorated([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd")
    return model.fit(X, X[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]


def float8_scales(**options) -> tuple[list[float], list[float]]:
    """The losses, and the scales of layers, which their gradients overwrite."""
    with on(True, **options):
        hidden = keras.layers.Dense(16, activation="relu")
        model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(3)])
        model.quantize("float8")
        model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(X, X[:, :3], batch_size=8, epochs=4, shuffle=False, verbose=0).history
    scales = [v.numpy() for v in model.variables if "scale" in v.name]
    return history["loss"], [float(np.ravel(scale)[0]) for scale in scales]


class Late(keras.callbacks.Callback):
    """Creates variables of an optimizer in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            with self.model.distribute_strategy.scope():
                self.model.late.build(self.model.trainable_variables)


def created_later(folder: str) -> list[str]:
    """The names in the last of several checkpoints."""
    from tfdist.callbacks import Checkpointer
    from tfdist.checkpoint.directory import complete_checkpoints
    from tfdist.checkpoint.manifest import Manifest
    from tfdist.checkpoint.storage import Storage

    with on(True):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.late = keras.optimizers.Adam(0.1)
        model.compile("sgd", "mse")
    callbacks = [Checkpointer(folder, every_steps=2), Late()]
    model.fit(X, X[:, :3], batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    manifest = Manifest.read(Storage(f"{folder}/{complete_checkpoints(folder)[0]}"))
    return [] if manifest is None else list(manifest.arrays)


class Traced(keras.Sequential):
    """A step that is a function of TensorFlow already."""

    @tf.function
    def train_step(self, data):
        return {}


class Inside(keras.Sequential):
    """A function of TensorFlow computes gradients, and clips them by hand."""

    @tf.function
    def update(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        variables = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}

    def train_step(self, data):
        return self.update(*data)


def traced_step(kind: type) -> str:
    with on(True):
        model = kind([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    try:
        model.fit(X, X[:, :3], verbose=0)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def counts_on_batches(ranks: bool) -> list[float]:
    """Counts and sums of batches of which ranks have different numbers of rows."""
    keras.utils.set_random_seed(1)
    with on(ranks):
        inputs = [keras.Input((6,)), keras.Input((2,))]
        hidden = keras.layers.BatchNormalization(synchronized=True)(inputs[0])
        outputs = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([hidden, inputs[1]]))
        model = keras.Model(inputs, outputs)
        counts = [keras.metrics.TruePositives(0.3), keras.metrics.FalseNegatives(0.3)]
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=counts)
    found = []
    for rows in (7, 6, 1, 13):
        x, y = [X[:rows], X[:rows, :2]], (X[:rows, :1] > 0).astype("float32")
        found += model.train_on_batch(x, y, class_weight={0: 1.0, 1: 0.5})
        found += model.test_on_batch(x, y)
        found.append(np.sum(model.predict_on_batch(x)))
    return [float(each) for each in found]


def accumulated_before(ranks: bool, folder: str, save: str, **options) -> list[float]:
    """Five micro-steps of updates of two, then what follows in another call or another model."""
    from tfdist.addons.monitoring.model_sync import verify_model_sync
    from tfdist.checkpoint import restore
    from tfdist.checkpoint import save as save_checkpoint

    def made():
        with on(ranks, **options):
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)
            if save == "several":
                optimizer = keras.optimizers.MultiOptimizer(
                    keras.optimizers.OptimizerMap(optimizer)
                )
            model.compile(optimizer, "mse")
            optimizer.build(model.trainable_variables)
        return model

    model = made()
    model.fit(X[:40], X[:40, :3], batch_size=8, shuffle=False, verbose=0)
    verify_model_sync(model)
    if save == "file":
        os.makedirs(folder, exist_ok=True)
        model.save(f"{folder}/model.keras")
        with on(ranks, **options):
            model = keras.models.load_model(f"{folder}/model.keras")
    elif save != "none":
        save_checkpoint(folder, model, step=5)
        model = made()
        restore(folder, model)
    model.fit(X[:24], X[:24, 3:], batch_size=8, shuffle=False, verbose=0)
    return [float(each) for each in np.ravel(model.get_weights()[0])]


class Pair(keras.Model):
    """Two optimizers, as of a GAN; only one of them is that of `compile`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(5), keras.layers.Dense(3)
        self.other = keras.optimizers.Adam(0.05)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 5))
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self.second(self.first(x)) - y))
        for layer, optimizer in ((self.first, self.other), (self.second, self.optimizer)):
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def two_optimizers(ranks: bool, folder: str, **options) -> list[float]:
    """Both optimizers are restored from a checkpoint, and those of the chief are broadcast."""
    from tfdist.checkpoint import restore, save

    def made():
        with on(ranks, **options):
            model = Pair()
            model.build((None, 6))
            model.compile(keras.optimizers.Adam(0.1))
        return model

    model = made()
    model.fit(X[:40], X[:40, :3], batch_size=8, shuffle=False, verbose=0)
    save(folder, model, step=5)
    model = made()
    restore(folder, model)
    if ranks and not model.distribute_strategy.is_chief and not options:
        model.other.variables[-1].assign(model.other.variables[-1] + 1.0)
    model.fit(X[:40], X[:40, 3:], batch_size=8, shuffle=False, verbose=0)
    return [float(each) for value in model.get_weights() for each in np.ravel(value)]


class Uncalled(Pair):
    """Two networks without a `call`, so that it is never built."""

    build = keras.Model.build
    call = keras.Model.call

    def __init__(self, other):
        super().__init__()
        self.other = other
        self.first.build((None, 6))
        self.second.build((None, 5))


def never_built(folder: str, kind: str) -> tuple[bool, list, list]:
    """Whether it is built; the state of the other optimizer when it was saved, and after a restore."""
    from tfdist.checkpoint import restore, save

    def made():
        with on(True):
            other = keras.optimizers.get(kind)
            if kind == "sgd":
                other = keras.optimizers.LossScaleOptimizer(other, initial_scale=2.0**12)
            model = Uncalled(other)
            model.compile(keras.optimizers.Adam(0.1))
        return model

    model = made()
    model.fit(X[:40], X[:40, :3], batch_size=8, verbose=0)
    save(folder, model, step=5)
    other = made()
    restore(folder, other)
    first, second = ([v.numpy().tolist() for v in m.other.variables] for m in (model, other))
    other.fit(X[:8], X[:8, :3], verbose=0)
    return model.built, first, second


def new_optimizer(folder: str) -> list[str]:
    """A checkpoint without the optimizers that a model holds beside its own is restored."""
    from tfdist.checkpoint import restore, save

    def made():
        with on(True):
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile("adam", "mse")
        return model

    model = made()
    save(folder, model, step=5)
    model = made()
    model.late = keras.optimizers.Adam(0.1)
    return list(restore(folder, model).arrays)


def scales_of_adam(folder: str) -> list[float]:
    """The losses after a restore of a model with variables for which optimizers have no slots."""
    from tfdist.checkpoint import restore, save

    def made():
        with on(True):
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.quantize("float8")
            model.compile("adam", "mse")
        return model

    model = made()
    model.fit(X, X[:, :3], batch_size=8, shuffle=False, verbose=0)
    save(folder, model, step=5)
    restored = made()
    restore(folder, restored)
    data = {"x": X, "y": X[:, :3], "batch_size": 8, "shuffle": False, "verbose": 0}
    return [each.fit(**data).history["loss"][0] for each in (model, restored)]


def scaled_attribute(folder: str) -> list[str]:
    """The names of a checkpoint of a model with an attribute that is inside of its optimizer."""
    from tfdist.checkpoint import save
    from tfdist.checkpoint.manifest import Manifest
    from tfdist.checkpoint.storage import Storage

    with on(True):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.own = keras.optimizers.Adam()
        model.compile(keras.optimizers.LossScaleOptimizer(model.own), "mse")
    manifest = Manifest.read(Storage(save(folder, model, step=5)))
    return [] if manifest is None else list(manifest.arrays)


def runs_of_two_meshes() -> list[int]:
    """The numbers of calls of `fit` by strategies of one process, some of which fail in a step."""
    import tfdist
    from tfdist.testing import strategy

    found: list[int] = []
    for mesh in (tfdist.Mesh(), tfdist.Mesh(), tfdist.Mesh(data=1, tensor=2)):
        keras.backend.clear_session()
        with strategy(mesh).scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile("sgd", "sparse_categorical_crossentropy")
        try:
            model.fit(X[:8], np.full(8, len(found) * 9), batch_size=8, verbose=0)
        except tf.errors.InvalidArgumentError:
            found.append(-1)
        found.append(model.distribute_strategy.engine.run)
    return found
