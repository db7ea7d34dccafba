"""The functions of Keras that tfdist wraps: found, checked, and unchanged outside of a strategy."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import needs_addon
from tests.strategies import programs
from tests.strategies.patch_table import wrapping_modules
from tests.strategies.programs import BATCH, UNEVEN_ROWS, finish, images, start
from tfdist.backend.keras.patching import Patch, apply_patches
from tfdist.strategies import LocalStrategy, keras_patches

PATCHES = [patch for module in wrapping_modules() for patch in module.PATCHES]


def name_of(patch: Patch) -> str:
    return f"{patch.owner.__name__.rpartition('.')[2]}.{patch.name}"


each_patch = pytest.mark.parametrize("patch", PATCHES, ids=name_of)


@pytest.fixture(scope="module", autouse=True)
def installed():
    """The seam is installed when the first strategy is made."""
    return LocalStrategy()


def unwrap_all(monkeypatch):
    """Puts Keras' own functions back until the test ends."""
    for patch in PATCHES:
        wrapped = getattr(patch.owner, patch.name)
        monkeypatch.setattr(patch.owner, patch.name, wrapped.__wrapped__)


@each_patch
def test_keras_has_the_function(patch):
    original = getattr(patch.owner, patch.name).__wrapped__
    assert original.__module__.split(".")[0] in ("keras", "tensorflow")
    found = tuple(inspect.signature(original).parameters)
    assert found[: len(patch.parameters)] == patch.parameters


@each_patch
def test_a_keras_with_other_parameters_is_refused(patch):
    def moved(something_else):
        raise AssertionError

    owner = types.SimpleNamespace(__name__="Owner", **{patch.name: moved})
    with pytest.raises(ImportError) as raised:
        apply_patches([dataclasses.replace(patch, owner=owner)])
    message = str(raised.value)
    assert f"`Owner.{patch.name}{patch.parameters}`" in message
    assert "Received: ('something_else',) in Keras" in message
    assert keras.__version__ in message
    assert "Install a version" in message
    assert getattr(owner, patch.name) is moved


@each_patch
def test_a_keras_without_the_function_is_refused(patch):
    owner = types.SimpleNamespace(__name__="Owner")
    # An `__init__` that is gone leaves that of `object`.
    found = re.escape(f"Owner.{patch.name}") + r".*Received: (nothing|\('args', 'kwargs'\))"
    with pytest.raises(ImportError, match=found):
        apply_patches([dataclasses.replace(patch, owner=owner)])
    assert vars(owner) == {"__name__": "Owner"}


class Owner:
    """Stays alive: what is wrapped is known by its owner's id."""

    @staticmethod
    def function(value, more=0):
        return value + more


def test_wrapping_twice_does_nothing():
    patch = Patch(
        Owner, "function", ("value",), lambda *args, original, **kwargs: -original(*args, **kwargs)
    )
    apply_patches([patch])
    wrapped = Owner.function
    apply_patches([patch, patch])
    assert Owner.function is wrapped
    assert Owner.function(1, more=2) == -3
    assert wrapped.__name__ == "function"


def test_installing_again_does_nothing():
    before = [getattr(patch.owner, patch.name) for patch in PATCHES]
    LocalStrategy()
    keras_patches.install()
    assert [getattr(patch.owner, patch.name) for patch in PATCHES] == before


LOSSES = {
    "mean": {"reduction": "sum_over_batch_size"},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "mean_with_sample_weight": {"reduction": "mean_with_sample_weight"},
}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("reduction", LOSSES)
def test_losses_are_kerass_own(monkeypatch, reduction, masked, weighted):
    chance = np.random.default_rng(0)
    y_true, y_pred = chance.normal(size=(2, 6, 5, 3)).astype("float32")
    weights = chance.uniform(size=(6, 5)).astype("float32") if weighted else None
    mask = tf.constant(chance.uniform(size=(6, 5)) > 0.3)

    def measure():
        loss = keras.losses.MeanSquaredError(**LOSSES[reduction])
        predictions = tf.constant(y_pred)
        if masked:
            keras.src.backend.set_keras_mask(predictions, mask)
        return np.asarray(loss(y_true, predictions, sample_weight=weights))

    wrapped = measure()
    with monkeypatch.context() as patch:
        unwrap_all(patch)
        np.testing.assert_array_equal(wrapped, measure())


def train_with_much(strategy, optimizer):
    """Goes through most of what is wrapped: masks, weights, dropout, metrics, the batch methods."""
    start()
    chance = np.random.default_rng(0)
    tokens = chance.integers(0, 9, (UNEVEN_ROWS, 7))
    targets = chance.integers(0, 5, (UNEVEN_ROWS, 7))
    weights = chance.uniform(0, 2, (UNEVEN_ROWS, 7)).astype("float32")
    with programs.scope(strategy):
        model = keras.Sequential(
            [
                keras.layers.Embedding(9, 6, mask_zero=True),
                keras.layers.Dense(6, "tanh"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(5),
            ]
        )
        model.compile(optimizer(), programs.cross_entropy(), weighted_metrics=["accuracy"])
    history = model.fit(
        tokens,
        targets,
        sample_weight=weights,
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        validation_data=(tokens[:9], targets[:9]),
    )
    extra = [
        model.train_on_batch(tokens[:7], targets[:7]),
        model.test_on_batch(tokens[:7], targets[:7]),
        model.predict_on_batch(tokens[:7]),
    ]
    return finish(model, history, tokens, targets, extra=extra)


def assert_identical(result, expected):
    programs.assert_same([result], expected, weights=0, logs=0)
    for got, wanted in zip(result.extra, expected.extra, strict=True):
        np.testing.assert_array_equal(got, wanted)


def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0"])


def much_in_one_optimizer():
    optimizer = programs.optimizer("sgd", global_clipnorm=0.5, gradient_accumulation_steps=2)
    return keras.optimizers.LossScaleOptimizer(optimizer)


def clipping():
    return programs.optimizer("sgd", clipnorm=0.1)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    # Keras itself cannot accumulate or scale under a mirrored strategy.
    [
        (lambda: None, much_in_one_optimizer),
        pytest.param(mirrored, clipping, marks=pytest.mark.slow),
    ],
    ids=["none", "mirrored"],
)
def test_training_outside_is_kerass_own(monkeypatch, strategy, optimizer):
    wrapped = train_with_much(strategy(), optimizer)
    with monkeypatch.context() as patch:
        unwrap_all(patch)
        expected = train_with_much(strategy(), optimizer)
    assert_identical(wrapped, expected)


@pytest.mark.slow
def test_mirrored_strategy_is_as_no_strategy():
    x, y = images(UNEVEN_ROWS)

    def train(strategy):
        start()
        with programs.scope(strategy):
            model = programs.mlp()
            model.compile(programs.optimizer("sgd"), programs.cross_entropy())
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        return finish(model, model.fit(data, epochs=2, verbose=0), x, y)

    programs.assert_same([train(mirrored())], train(None), weights=1e-6, logs=1e-6)


def test_saving_outside_is_kerass_own(tmp_path):
    start()
    model = programs.mlp()
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    model.export(tmp_path / "exported", verbose=False)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for got, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (tmp_path / "exported" / "saved_model.pb").exists()


@needs_addon("cpu_kernels")
def test_the_document_lists_what_is_wrapped():
    from tests.strategies import patch_table

    text = patch_table.DOCUMENT.read_text(encoding="utf-8")
    _, begin, rest = text.partition(f"<!-- {patch_table.MARK} -->\n")
    listed, end, _ = rest.partition("\n<!-- end -->")
    assert begin and end
    assert listed == patch_table.table(), "python -m tests.strategies.patch_table renews the table"


def test_each_module_with_wrappers_is_installed():
    listed = {each for each in wrapping_modules() if "keras_patches" in each.__name__}
    assert listed == set(keras_patches._MODULES)
    functions = [(id(each.owner), each.name) for module in listed for each in module.PATCHES]
    assert len(functions) == len(set(functions))
