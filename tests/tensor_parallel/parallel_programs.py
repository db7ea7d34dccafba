"""Stock Keras models that are trained whole, and split by `parallelize`, alike."""

from __future__ import annotations

import contextlib
import dataclasses

import keras
import numpy as np
import tensorflow as tf


def parallelize(*args, **kwargs):
    """tfdist's, imported where it is called: some processes that look at this file cannot."""
    from tfdist.tensor_parallel import parallelize as split

    return split(*args, **kwargs)


def report_on(model):
    from tfdist.tensor_parallel import report

    return report(model)


def layout_of(variable):
    from tfdist.sharding.layout import layout_of as layout

    return layout(variable)


STEPS, BATCH, ROWS, TIME, VOCABULARY = 6, 8, 20, 6, 13  # The last batch has four rows.


@dataclasses.dataclass
class Outcome:
    losses: list[float]
    evaluation: list[float]
    predictions: np.ndarray
    weights: dict[str, np.ndarray]
    slots: dict[str, np.ndarray]
    report: object = None


def scope(mesh: dict | None):
    """The scope of a strategy over this rank's engine, or none."""
    if mesh is None:
        return contextlib.nullcontext()
    from tfdist import Mesh
    from tfdist.testing import strategy

    return strategy(Mesh(**mesh)).scope()


class Gated(keras.layers.Layer):
    """A block of a user's own: two columns, a product, a whole weight between, and a row."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        rule = keras.regularizers.L2(0.01)
        self.gate = keras.layers.Dense(width, "sigmoid", kernel_regularizer=rule, name="gate")
        self.up = keras.layers.Dense(width, name="up")
        self.drop = keras.layers.Dropout(0.0, name="drop")
        self.down = keras.layers.Dense(6, kernel_regularizer=rule, name="down")

    def build(self, shape):
        rule = keras.regularizers.L2(0.1)
        self.rate = self.add_weight(shape=(), initializer="ones", regularizer=rule, name="rate")
        self.gate.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))
        self.built = True

    def call(self, x):
        return x + self.down(self.drop(self.gate(x) * self.up(x) * self.rate))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.blocks = [Gated(8, name=f"block_{n}") for n in range(2)]
        self.head = keras.layers.Dense(5, name="head")

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp():
    x = inputs = keras.Input((6,), name="x")
    x = keras.layers.Dense(16, "gelu", name="up")(x)
    x = keras.layers.Dense(6, "tanh", name="down")(x)
    outputs = keras.layers.Dense(5, name="head")(x)
    return keras.Model(inputs, outputs)


MLP = {"up/.*": "column", "down/kernel": "row", "head/kernel": "vocabulary"}
SUBCLASSED = {
    ".*/(gate|up)/.*": "column",
    ".*/down/kernel": "row",
    ".*/down/bias": "replicate",
}


def transformer(grouped: bool = False, dropout: float = 0.0):
    """Token ids, 0 is padding, to logits; of stock layers alone."""
    tokens = keras.Input((TIME,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(VOCABULARY, 8, mask_zero=True, name="table")(tokens)
    if grouped:
        attention = keras.layers.GroupQueryAttention(4, 4, 2, name="attention")
    else:
        attention = keras.layers.MultiHeadAttention(4, 4, dropout=dropout, name="attention")
    # Attention takes the masked tensor itself, which is used again after it.
    x = keras.layers.Add()([x, attention(x, x, use_causal_mask=True)])
    y = keras.layers.LayerNormalization(name="norm")(x)
    y = keras.layers.Dense(16, name="up")(y)
    y = keras.layers.Activation("gelu")(y)
    y = keras.layers.Dropout(dropout, name="drop")(y)
    x = keras.layers.Add()([x, keras.layers.Dense(8, name="down")(y)])
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY, name="head")(x))


TRANSFORMER = {
    "table/embeddings": "vocabulary",
    "attention/(query|key|value)/.*": "column",
    "attention/attention_output/kernel": "row",
    "up/kernel": "column",
    "down/kernel": "row",
    "head/kernel": "vocabulary",
}


def gpt2(causal_lm: bool = False, vocabulary: int = VOCABULARY, time: int = TIME):
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=vocabulary,
        num_layers=2,
        num_heads=4,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=time,
        dropout=0.0,
    )
    if causal_lm:
        # By itself it compiles with a metric, which Keras keeps when it is compiled without.
        return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None, compile=False)
    return backbone


def llama():
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        tie_word_embeddings=False,
    )
    return keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)


def qwen3():
    """Its queries and keys are normalized inside each head, by weights that stay whole."""
    import keras_hub

    return keras_hub.models.Qwen3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        hidden_dim=8,
        intermediate_dim=16,
    )


def vectors():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 6)).astype("float32")
    return x, random.integers(0, 5, ROWS)


def sentences():
    random = np.random.default_rng(0)
    tokens = random.integers(1, VOCABULARY, (ROWS, TIME + 1)).astype("int32")
    tokens[3, 2:] = 0
    return tokens[:, :-1], tokens[:, 1:]


def padded_sentences():
    x, y = sentences()
    return {"token_ids": x, "padding_mask": (x != 0).astype("int32")}, y


def hidden_states():
    x, _ = padded_sentences()
    return x, np.random.default_rng(1).normal(size=(ROWS, TIME, 8)).astype("float32")


def cases() -> dict:
    """By name: what builds the model, the plan, the data and the loss."""
    from tfdist.tensor_parallel import plan

    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {
        "mlp": (mlp, MLP, vectors, entropy),
        "subclassed": (Subclassed, SUBCLASSED, vectors, entropy),
        "transformer": (transformer, TRANSFORMER, sentences, entropy),
        "grouped": (lambda: transformer(True), TRANSFORMER, sentences, entropy),
        "gpt2": (gpt2, plan.GPT2, hidden_states, "mse"),
        "gpt2_lm": (lambda: gpt2(True), plan.GPT2, padded_sentences, entropy),
        "qwen3": (qwen3, plan.LLAMA, hidden_states, "mse"),
        "llama": (llama, plan.LLAMA, padded_sentences, entropy),
    }


def made(name: str, mesh: dict | None, *, split_loss: bool = False, optimizer: str = "sgd"):
    """The model, split where there is a mesh, and compiled; its data and the report."""
    from tfdist import layers

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    build, plan, data, loss = cases()[name]
    x, y = data()
    with scope(mesh):
        model = build()
        if not model.built:
            model(x[:2])
        parallelize(model, plan, sample=first(x, 2))
        report = report_on(model)
        if split_loss:
            loss = layers.VocabParallelCrossEntropy(VOCABULARY)
        rule = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0)
        model.compile(rule if optimizer == "sgd" else "adam", loss, weighted_metrics=None)
    return model, x, y, report


def first(x, rows: int):
    return keras.tree.map_structure(lambda part: tf.constant(part[:rows]), x)


def train(name: str, mesh: dict | None = None, **options) -> Outcome:
    """Six steps; each is an epoch to Keras, so that the history holds the loss of each."""
    model, x, y, report = made(name, mesh, **options)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history = model.fit(data.repeat(), steps_per_epoch=1, epochs=STEPS, verbose=0)
    evaluation = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return Outcome(
        history.history["loss"],
        np.ravel(evaluation).tolist(),
        model.predict(x, batch_size=BATCH, verbose=0),
        whole(model.weights),
        whole(model.optimizer.variables),
        report,
    )


def save(name: str, path: str, mesh: dict):
    """Trains and saves; returns predictions, and those of a new model with the saved weights."""
    model, x, y, _ = made(name, mesh, optimizer="adam")
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.save(path)
    again, *_ = made(name, mesh, optimizer="adam")
    again.load_weights(path)
    assert np.array_equal(again(x), model(x))
    return model(x).numpy(), whole(model.optimizer.variables)


def load(name: str, path: str):
    """What a saved model computes, and its optimizer's state, in plain Keras."""
    if "gpt2" in name:
        import keras_hub  # noqa: F401  (Registers its layers.)
    x, _ = {"mlp": vectors, "transformer": sentences, "gpt2_lm": padded_sentences}[name]()
    model = keras.saving.load_model(path)
    return model(x).numpy(), {
        f"{i}/{v.path}": v.numpy() for i, v in enumerate(model.optimizer.variables)
    }


def logits_seen(name: str, mesh: dict) -> set[int]:
    """The sizes of the last dim of what the loss gets in steps of training and evaluation."""
    model, x, y, _ = made(name, mesh, split_loss=True)
    seen, stock = set(), model.loss.call

    def call(y_true, y_pred):
        # Keras also calls a loss once by itself, outside of any step.
        if getattr(tf.distribute.get_replica_context(), "step", None) is not None:
            seen.add(y_pred.shape[-1])
        return stock(y_true, y_pred)

    model.loss.call = call
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return seen


def between(mesh: dict) -> dict:
    """What dropout draws, and the weights whose gradients are parts."""

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(mesh):
        model = transformer(dropout=0.5)
        model = keras.Model(
            model.inputs, keras.layers.Dropout(0.5, name="drop_whole")(model.output)
        )
        parallelize(model, TRANSFORMER)
        block = Subclassed()
        parallelize(block, SUBCLASSED, sample=np.ones((2, 6), "float32"))
    dropouts = {name: model.get_layer(name) for name in ("drop", "drop_whole")}
    dropouts["attention"] = model.get_layer("attention")._dropout_layer
    masks = {name: drop(tf.ones([9, 9]), training=True) for name, drop in dropouts.items()}
    return {
        "masks": {name: mask.numpy() for name, mask in masks.items()},
        "partial": [
            weight.path.partition("/")[2]
            for weight in block.weights
            if layout_of(weight).partial_over is not None
        ],
    }


def sums_of_attention(mesh: dict) -> dict[str, int]:
    """How many all-reduces self-attention takes: forward alone, and with its gradients."""

    with scope(mesh):
        x = inputs = keras.Input((TIME, 8))
        attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
        model = keras.Model(inputs, attention(x, x))
        plan = {".*/(query|key|value)/.*": "column", ".*/attention_output/kernel": "row"}
        parallelize(model, plan)
    counts = {}
    for what in ("forward", "both"):

        @tf.function
        def function(x, what=what):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x)
            if what == "forward":
                return y
            return tape.gradient(y, [x, *(v.value for v in model.trainable_variables)])

        graph = function.get_concrete_function(tf.TensorSpec([2, TIME, 8])).graph
        kinds = [operation.type for operation in graph.get_operations()]
        # Between two ranks a sum is one message each way.
        counts[what] = kinds.count("TfdistSend")
    return counts


def around(mesh: dict) -> dict:
    """Mixed precision, a model on top of a split one, and ranks that start from other values."""
    from tfdist.testing import engine

    result = {}
    x, _ = sentences()
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with scope(mesh):
            model = transformer()
            expected = np.array(model(x), "float32")
            parallelize(model, TRANSFORMER)
    finally:
        keras.config.set_dtype_policy("float32")
    result["mixed"] = np.array(model(x), "float32"), expected
    with scope(mesh):
        keras.utils.set_random_seed(5 + engine().rank)
        model = mlp()
        parallelize(model, MLP)
        inputs = keras.Input((6,))
        outer = keras.Model(inputs, keras.layers.Dense(3)(model(inputs)))
    result["symbolic"] = outer.output_shape
    keras.utils.set_random_seed(5)
    result["alike"] = model(vectors()[0]).numpy(), mlp()(vectors()[0]).numpy()
    return result


def report_of(name: str, mesh: dict):
    return made(name, mesh)[3]


def whole(variables) -> dict[str, np.ndarray]:
    from tfdist.sharding import whole_value

    return {f"{i}/{v.path}": whole_value(v).numpy() for i, v in enumerate(variables)}
