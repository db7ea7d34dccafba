"""Private names of Keras are used in two rooms alone, and Keras has each that is used."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from tfdist.backend.keras import attributes, functional, private, variables
from tfdist.backend.keras.attributes import Attribute
from tfdist.backend.keras.patching import check_parameters
from tfdist.strategies import keras_patches
from tfdist.tensor_parallel import attributes as of_layers

ROOT = Path(__file__).parents[3]
ROOMS = (
    ROOT / "tfdist" / "backend" / "keras",
    ROOT / "strategies" / "keras_patches",
    # Patches of Keras that not every training needs.
    ROOT / "tfdist" / "addons" / "cpu_kernels",
    ROOT / "tfdist" / "addons" / "hub",
    ROOT / "tfdist" / "addons" / "optimizers" / "attributes.py",
    ROOT / "tfdist" / "tensor_parallel" / "attention_cores.py",
    ROOT / "tfdist" / "tensor_parallel" / "attributes.py",
)
#: Names of TensorFlow and TRL, which Keras has too: where they stand, and whose they are.
TENSORFLOWS = {
    ("benchmarks/peers/trl_preferences.py", "_metrics"): "of a trainer of TRL",
    ("tfdist/data/read_ahead.py", "_inputs"): "of a tf.data set",
    ("tfdist/data/sharding.py", "_inputs"): "of a tf.data set",
    ("tfdist/backend/graph/rematerialize.py", "_class"): "of a node of a graph",
    ("tfdist/backend/graph/split.py", "_class"): "of a node of a graph",
}


def is_private(name) -> bool:
    return isinstance(name, str) and name.startswith("_") and name[1:2].isalpha()


#: A function, a class, or an attribute that is given a value.
MADE = re.compile(r"(?:def|class) (_[a-z]\w*)|\.(_[a-z]\w*)(?=(?:, [\w.]+)*\s*(?::[^=\n]+)?=(?!=))")


@functools.cache
def private_names() -> frozenset[str]:
    """Those that the modules of Keras make."""
    source = Path(keras.__file__).parent / "src"
    files = [path for path in source.rglob("*.py") if not path.stem.endswith("_test")]
    found = (MADE.findall(path.read_text(encoding="utf-8")) for path in files)
    return frozenset(name for names in found for pair in names for name in pair if name)


@functools.cache
def sources() -> dict[str, ast.Module]:
    rooms = ("tfdist", "strategies", "models", "launch", "benchmarks")
    # Links in `tfdist/` lead to the others.
    files = sorted({path.resolve() for room in rooms for path in (ROOT / room).rglob("*.py")})
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in files
        if not any(path.is_relative_to(room) for room in ROOMS)
    }


@functools.cache
def tfdists_classes() -> dict[str, ast.ClassDef]:
    nodes = (node for tree in sources().values() for node in ast.walk(tree))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def keras_bases(node: ast.ClassDef) -> list[type]:
    """The classes of Keras, or of the room, that a class derives from, by its text."""
    found = []
    for base in node.bases:
        text = ast.unparse(base)
        if text.startswith("keras."):
            found.append(operator.attrgetter(text.removeprefix("keras."))(keras))
        elif text in tfdists_classes() and tfdists_classes()[text] is not node:
            found += keras_bases(tfdists_classes()[text])
        else:
            kinds = [getattr(room, text, None) for room in (private, variables)]
            found += [kind for kind in kinds if isinstance(kind, type)]
    return found


def is_of(node: ast.AST, *names: str) -> bool:
    """Whether a node is an attribute of one of some variables."""
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_attribute and node.value.id in names


def findings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of Keras that a module uses."""
    own, parts = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            taken = {name for base in keras_bases(node) for name in attributes._names_in(base)}
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef) and is_private(inner.name):
                    # In a class of Keras' it replaces Keras' own.
                    if inner.name in taken:
                        yield inner.lineno, inner.name
                elif is_of(inner, "self", "cls") and is_private(inner.attr):
                    own.add(id(inner))
                    if inner.attr in taken:
                        yield inner.lineno, inner.attr
        elif isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(name.name for name in node.names)]
            if any(f"{module}.".startswith("keras.src.") for module in modules):
                yield node.lineno, "keras.src"
            if modules[0] == "keras" and "src" in modules:
                yield node.lineno, "keras.src"
        elif isinstance(node, ast.Attribute):
            if is_of(node, "keras") and node.attr == "src":
                yield node.lineno, "keras.src"
            elif node.attr in private_names() and id(node) not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            yield from ((node.lineno, name) for name in private_names() & {node.value})


def test_private_names_stay_in_their_rooms():
    found = [
        f"{file}:{line}: {name}"
        for file, tree in sources().items()
        for line, name in sorted(findings(tree))
        if (file, name) not in TENSORFLOWS
    ]
    assert not found, "Use or add an accessor of tfdist/backend/keras:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from keras.src.models.functional import Functional", ["keras.src"]),
        ("import keras.src", ["keras.src"]),
        ("from keras import src", ["keras.src"]),
        ("x = keras.src.backend", ["keras.src"]),
        ("x = layer.kernel._value", ["_value"]),
        ("del variable._value", ["_value"]),
        ("self.model._initial_epoch = 3", ["_initial_epoch"]),
        ("getattr(model, '_compile_loss', None)", ["_compile_loss"]),
        ("class A(keras.Model):\n def f(self):\n  return self._loss_tracker", ["_loss_tracker"]),
        ("class A(PipelineModel):\n def f(self):\n  return self._loss_tracker", ["_loss_tracker"]),
        ("class A(keras.Variable):\n def _initialize(self, value): ...", ["_initialize"]),
        ("class A:\n def f(self, x):\n  self._value = 1\n  return x._value", ["_value"]),
        ("class A(keras.layers.Dense):\n def f(self):\n  self._kernel = 1", ["_kernel"]),
        ("class A(keras.Layer):\n def f(self):\n  self._of_tfdist = 1", []),
        ("class A:\n def _initialize(self):\n  self._loss_tracker = self._value", []),
        ("import keras\nx = f'{name}_kernel', layer.kernel, variable.value", []),
    ],
)
def test_the_walk_finds(code, names):
    assert [name for _, name in findings(ast.parse(code))] == names


def all_attributes() -> list[Attribute]:
    modules = [*vars(attributes).values(), *vars(of_layers).values()]
    values = [*modules, *of_layers.projections.values()]
    return list(dict.fromkeys(value for value in values if isinstance(value, Attribute)))


@pytest.mark.parametrize("attribute", all_attributes(), ids=lambda attribute: attribute.name)
def test_an_attribute_that_keras_lacks_is_refused(attribute):
    for owner in attribute.owners:
        gone = f"{attribute.name}_moved"
        with pytest.raises(ImportError, match=rf"`{owner.__name__}\.{gone}`.*Received: nothing"):
            Attribute(gone, owner)


def trained() -> dict[type, object]:
    """An object of each class that has attributes."""
    tokens = keras.Input((4,))
    embedding = keras.layers.Embedding(5, 4)
    inputs = embedding(tokens)
    attention = keras.layers.MultiHeadAttention(2, 2)
    gate = {"use_gate": True} if of_layers.projections["gate"].is_known else {}
    grouped = keras.layers.GroupQueryAttention(2, 2, 1, **gate)
    middle = grouped(attention(inputs, inputs), inputs)
    einsum, dense = keras.layers.EinsumDense("abc,cd->abd", (4, 3)), keras.layers.Dense(2)
    model = keras.Model(tokens, dense(einsum(middle)))
    rmsprop = keras.optimizers.RMSprop(gradient_accumulation_steps=2)
    model.compile(rmsprop, "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    adam = keras.optimizers.Adam()
    adam.build(model.trainable_variables)
    saving = keras.callbacks.ModelCheckpoint("x.keras")
    averaging = keras.callbacks.SwapEMAWeights()
    data = tf.data.Dataset.range(3)
    epochs = private.TFEpochIterator(model.distribute_strategy, x=data)
    layers = (embedding, attention, grouped, einsum, dense)
    for layer in (einsum, dense):
        layer.quantize("int4")
    return {
        **{type(layer): layer for layer in layers},
        keras.Variable: dense.bias,
        keras.Layer: embedding,
        private.TensorFlowTrainer: model,
        private.BaseOptimizer: model.optimizer,
        keras.optimizers.RMSprop: model.optimizer,
        keras.optimizers.Adam: adam,
        keras.callbacks.ModelCheckpoint: saving,
        keras.callbacks.SwapEMAWeights: averaging,
        private.EpochIterator: epochs,
        private.TFEpochIterator: epochs,
        private.LossFunctionWrapper: keras.losses.MeanSquaredError(),
        keras.metrics.MeanMetricWrapper: keras.metrics.MeanSquaredError(),
        private.Node: model.outputs[0],
        private.Operation: dense,
        private.nn: keras.ops.softmax(keras.ops.ones((1, 2))),
    }


def test_objects_of_keras_have_the_attributes():
    objects = trained()
    missing = [
        f"{attribute.name} of {owner.__name__}"
        for attribute in all_attributes()
        for owner in attribute.owners
        if attribute.is_known and not hasattr(objects[owner], attribute.name)
    ]
    assert not missing


def test_values_are_keras_own():
    objects = trained()
    variable, model = objects[keras.Variable], objects[private.TensorFlowTrainer]
    assert attributes.stored_value(variable) is variable.value
    assert attributes.stored_shape(variable) == tuple(variable.shape)
    layer, einsum = objects[keras.Layer], objects[keras.layers.EinsumDense]
    assert of_layers.own_trainable(layer) == layer.weights
    if of_layers.int4_columns.is_known:
        assert of_layers.int4_columns(einsum) == 3
        assert attributes.kernel_of(einsum).shape[-1] == 2  # Three columns in two bytes.
    assert attributes.history(model.outputs[0]).operation is model.layers[-1]
    assert attributes.loss_tracker(model) is model.metrics[0]
    assert attributes.own_metrics(model)() == model.metrics[:2]


def test_a_model_that_is_not_compiled_has_no_metrics_of_its_own():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert attributes.own_metrics(model)() == []


def test_new_memory_may_have_another_shape():
    variable = keras.Variable([1.0, 2.0, 3.0])
    variables.renew(variable, [4.0, 5.0])
    attributes.stored_shape.set(variable, (2,))
    assert variable.shape == (2,)
    assert variable.numpy().tolist() == [4.0, 5.0]
    assert not functional.is_deferred(variable)


def test_a_function_that_keras_lacks_is_refused():
    for owner, name, parameters in private._CALLED:
        check_parameters(owner, name, parameters)
        with pytest.raises(ImportError, match="Received: nothing"):
            check_parameters(owner, f"{name}_moved", parameters)


def test_few_functions_are_patched():
    patches = [patch for module in keras_patches._MODULES for patch in module.PATCHES]
    # The constructor of layers beside them.
    assert len(patches) + 1 <= 47
