"""What the user named keeps its name; what Keras named does not depend on what was made before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = '''
import json, sys
import keras, numpy as np
import tfdist
from tfdist import checkpoint
from tfdist.checkpoint.errors import OtherModelError
from tfdist.checkpoint.entries import entries_of

layers = keras.layers


class Subclassed(keras.Model):
    """Layers with names of their own, or with names of Keras'."""

    def __init__(self, order, named):
        super().__init__()
        for name in order:
            setattr(self, name, layers.Dense(4, name=name if named else None))

    def call(self, x):
        return getattr(self, min(vars_of(self)))(x) - 2 * getattr(self, max(vars_of(self)))(x)


def vars_of(model):
    return [name for name in vars(model) if isinstance(vars(model)[name], layers.Dense)]


def functional(order, nested=False):
    inputs = keras.Input((4,))
    found = {}
    for name in order:
        layer = layers.Dense(4, name="same" if nested else name)
        if nested:
            inner = keras.Input((4,))
            layer = keras.Model(inner, layer(inner), name=name)
        found[name] = layer(inputs)
    outputs = found[order[0]] if len(order) == 1 else found[min(order)] - 2 * found[max(order)]
    return keras.Model(inputs, outputs)


def chain(order):
    """Layers that follow each other, in the order of their names."""
    made = {name: layers.Dense(4, name=name) for name in order}
    return keras.Sequential([keras.Input((4,)), *(made[name] for name in sorted(order))])


def auto(skip):
    for _ in range(skip):
        layers.Dense(1)
        layers.LSTM(1)
        keras.Variable([1.0])
        keras.Sequential([layers.Dropout(0.5)])
    inputs = keras.Input((4,))
    x = keras.Sequential([layers.Dense(4), layers.Dropout(0.2), layers.Dense(4)])(inputs)
    x = layers.Dense(4)(layers.Dense(4, name="dense_1")(x))
    x = layers.Reshape((2, 2))(x)
    x = layers.Bidirectional(layers.LSTM(2))(x)
    return keras.Model(inputs, Own()(layers.BatchNormalization()(x)))


class Own(layers.Layer):
    def build(self, shape):
        self.first = self.add_weight(shape=(4,))
        self.blocks = [layers.Dense(4), layers.Dense(4)]
        self.by_name = {"x/y": layers.Dense(4)}
        for block in (*self.blocks, *self.by_name.values()):
            block.build(shape)

    def call(self, x):
        for block in (*self.blocks, *self.by_name.values()):
            x = block(x)
        return x + self.first


def ready(model, seed):
    model(np.zeros((1, 4), "float32"))
    model.compile("adam", "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    chance = np.random.default_rng(seed)
    for variable in (*model.trainable_variables, *model.optimizer.variables):
        variable.assign(chance.uniform(1, 9, variable.shape).astype(variable.dtype))
    return model


def moved(build, before, after, folder):
    """Whether a model that is built in another order then computes the same; or what is said."""
    saved, other = ready(build(before), 1), ready(build(after), 2)
    checkpoint.save(folder, saved, step=1)
    try:
        checkpoint.restore(folder, other)
    except OtherModelError as error:
        return str(error)
    x = np.random.default_rng(3).normal(size=(3, 4)).astype("float32")
    same = np.array_equal(saved(x), other(x))
    slots = [
        {
            variable.numpy().tobytes(): (one.numpy().tobytes(), two.numpy().tobytes())
            for variable, one, two in zip(
                model.trainable_variables,
                model.optimizer._momentums,
                model.optimizer._velocities,
                strict=True,
            )
        }
        for model in (saved, other)
    ]
    return bool(same and slots[0] == slots[1])
'''


def run(tmp_path: Path, program: str):
    found = subprocess.run(
        [sys.executable, "-c", f"{PROGRAM}\nfolder = {str(tmp_path)!r}\n{program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_equal_shapes_in_another_order(tmp_path):
    found = run(
        tmp_path,
        """
cases = {
    "subclassed": (lambda order: Subclassed(order, True), "enc_1", "enc_2"),
    "subclassed, auto": (lambda order: Subclassed(order, False), "enc_1", "enc_2"),
    "functional": (functional, "enc_1", "enc_2"),
    "tens": (functional, "block_2", "block_10"),
    "as Keras would": (functional, "dense_1", "dense_2"),
    "chain": (chain, "dense_1", "dense_2"),
    "nested": (lambda order: functional(order, nested=True), "n_1", "n_2"),
}
print(json.dumps({
    name: moved(build, [one, two], [two, one], f"{folder}/{name}")
    for name, (build, one, two) in cases.items()
}))
""",
    )
    assert found == dict.fromkeys(found, True)


@pytest.mark.timeout(300)
def test_a_renamed_layer_is_listed(tmp_path):
    said = run(
        tmp_path,
        """
said = [
    moved(functional, ["enc_1", "enc_2"], ["enc_2", "enc_3"], f"{folder}/a"),
    moved(functional, ["dense_1", "dense_2"], ["dense_2", "dense_3"], f"{folder}/b"),
]
print(json.dumps(said))
""",
    )
    for text, old, new in zip(said, ("enc_1", "dense_1"), ("enc_3", "dense_3"), strict=True):
        assert f"not in the checkpoint: model/{new}/bias, model/{new}/kernel" in text
        assert f"not in the model: model/{old}/bias, model/{old}/kernel" in text


@pytest.mark.timeout(300)
def test_names_do_not_count_what_was_made_before(tmp_path):
    first, later, cloned, cloned_later = run(
        tmp_path,
        "models = [auto(0), auto(5)]\n"
        "models += [keras.models.clone_model(models[0]), keras.models.clone_model(models[1])]\n"
        "print(json.dumps([[e.name for e in entries_of(ready(m, 1))] for m in models]))",
    )
    assert first == later
    assert cloned == cloned_later
    assert "model/dense_1/kernel" in first  # The user's.
    assert "model/dense.0/kernel" in first  # Keras'.
    assert "model/sequential.0/dense.1/kernel" in first  # Keras' second one there.
    assert "model/own.0/blocks_1/kernel" in first
    assert "model/own.0/by_name_x_y/kernel" in first
    assert len(set(first)) == len(first)


def _printed(program: str) -> list[str]:
    """The words that a program prints in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.split()


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_layers_from_before_the_import_of_tfdist():
    """Keras does not say who named them: a name like one of its own counts as one."""
    found = _printed(
        "import keras; before = keras.layers.Dense(1, name='dense_7')\n"
        "from tfdist.backend.keras.layer_names import is_made_up\n"
        "after = keras.layers.Dense(1, name='dense_7')\n"
        "print(is_made_up(before), is_made_up(after), is_made_up(keras.layers.Dense(1)))"
    )
    assert found == ["True", "False", "True"]


@pytest.mark.timeout(300)
def test_tfdist_may_be_imported_before_keras():
    """Its rooms come later here: names are known from `import tfdist` on."""
    found = _printed(
        "import tfdist, keras\n"
        "layers = keras.layers.Dense(1, name='dense_7'), keras.layers.Dense(1)\n"
        "from tfdist.backend.keras.layer_names import is_made_up\n"
        "print(*map(is_made_up, layers))"
    )
    assert found == ["False", "True"]


def test_a_keras_that_has_moved_is_told(monkeypatch):
    from tfdist.backend.keras import layer_names

    def moved(self, name=None, *, more=None):
        pass

    monkeypatch.setattr(layer_names.Operation, "__init__", moved)
    with pytest.raises(ImportError, match=r"This version of tfdist requires .* of Keras"):
        layer_names.watch()
