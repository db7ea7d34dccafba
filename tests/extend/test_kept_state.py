"""A kept state of one's own: an average of the weights, which a resume on another mesh restores."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tests.conftest import on_ranks
from tfdist.extend import FitHook, Kept, KeptState


class WeightAverage(keras.callbacks.Callback, FitHook, KeptState):
    """Keeps the mean of the weights after each epoch."""

    name = "weight_average"

    def __init__(self):
        super().__init__()
        self.epochs, self.means, self.was_missing = 0, [], []

    def kept_states(self, model):
        """This is one; its variables are as many as the model's."""
        if not self.means:
            with model.distribute_strategy.scope():
                self.means = [keras.Variable(w, trainable=False) for w in model.get_weights()]
        return [self]

    def arrays(self):
        """The means, by number."""
        return {str(place): Kept(mean) for place, mean in enumerate(self.means)}

    def missing(self, keys):
        """Notes what a checkpoint did not have."""
        self.was_missing = list(keys)

    def values(self, *, in_epoch):
        """How many epochs there were."""
        return {"epochs": self.epochs}

    def restore(self, values):
        """Goes on with as many."""
        self.epochs = values["epochs"]

    def on_epoch_end(self, epoch, logs=None):
        """Takes the weights into the means."""
        self.epochs += 1
        for mean, weight in zip(self.means, self.model.get_weights(), strict=True):
            own = np.asarray(mean)
            mean.assign(own + (weight - own) / self.epochs)


def fit(folder, epochs, with_average=True):
    strategy = tfdist.testing.strategy(tfdist.Mesh())
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 3)).astype("float32")
    average = WeightAverage()
    callbacks = [tfdist.callbacks.Checkpointer(folder)] + [average] * with_average
    model.fit(
        x, x[:, :2], batch_size=6, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    return [np.asarray(mean) for mean in average.means], average.epochs, average.was_missing


def in_one_go(epochs):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return fit(folder, epochs)


@on_ranks(("horovod", 2), ("tensorflow", 2))
def test_it_continues_on_another_mesh(pool, one_process, tmp_path):
    expected, epochs, _ = one_process.run(in_one_go, 4, timeout=120)[0]
    assert epochs == 4
    pool.run(fit, f"{tmp_path}/run", 2, timeout=120)
    means, epochs, missing = one_process.run(fit, f"{tmp_path}/run", 4, timeout=120)[0]
    assert epochs == 4 and missing == []
    for found, right in zip(means, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)


def test_a_checkpoint_without_it_says_so(one_process, tmp_path):
    one_process.run(fit, f"{tmp_path}/run", 2, False, timeout=120)
    means, epochs, missing = one_process.run(fit, f"{tmp_path}/run", 3, timeout=120)[0]
    assert missing == ["0", "1"] and epochs == 1 and len(means) == 2


def unnamed(folder):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as caught:
        patch.setattr(WeightAverage, "name", "model")
        fit(folder, 1)
    return str(caught.value)


def test_a_name_that_is_taken_is_refused(one_process, tmp_path):
    (said,) = one_process.run(unnamed, f"{tmp_path}/run", timeout=60)
    assert "requires a `name`" in said and "name='model' of WeightAverage" in said
