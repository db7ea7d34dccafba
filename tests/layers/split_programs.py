"""Models of split layers whose losses are more than a function of outputs, or that are used in unusual ways."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.tensor_parallel.parallel_programs import scope, whole

WORDS, TIME = 13, 6


def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, WORDS, (8, TIME))


def trained(model, x, y, loss, **options) -> tuple[list, dict]:
    model.compile(keras.optimizers.SGD(0.05), loss, **options)
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    return history.history["loss"], whole(model.weights)


def penalized(mesh: dict | None, sequence_parallel: bool = False):
    """Losses and weights with a penalty on every weight: split, whole, and whole with partial gradients."""
    from tfdist import layers

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    way = {"sequence_parallel": sequence_parallel}
    l1, l2 = keras.regularizers.L1(0.2), keras.regularizers.L2(0.3)
    rules = {"kernel_regularizer": l2, "bias_regularizer": l1}
    with scope(mesh):
        inputs = keras.Input((TIME,), dtype="int32")
        x = layers.VocabParallelEmbedding(WORDS, 8, embeddings_regularizer=l2, **way)(inputs)
        y = layers.LayerNormalization(gamma_regularizer=l2, beta_regularizer=l1, **way)(x)
        y = layers.ColumnParallelDense(8, **rules, **way)(y)
        y = layers.RowParallelDense(8, **rules, **way)(y)
        outputs = layers.VocabParallelHead(WORDS, **way)(x + y)
        model = keras.Model(inputs, outputs)
        return trained(model, ids(), ids(), layers.VocabParallelCrossEntropy(WORDS))


def shared_head(mesh: dict | None):
    """Losses and weights of a model that uses its head twice: inside, where it needs all logits, and last."""
    from tfdist import layers

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(mesh):
        inputs = keras.Input((TIME,), dtype="int32")
        x = layers.VocabParallelEmbedding(WORDS, 8)(inputs)
        head = layers.VocabParallelHead(WORDS)
        highest = keras.ops.max(head(x), axis=-1, keepdims=True)
        model = keras.Model(inputs, head(keras.ops.tanh(highest) * x))
        return trained(model, ids(), ids(), layers.VocabParallelCrossEntropy(WORDS))


def logits_in_a_pipeline(mesh: dict) -> list[int]:
    """The sizes of the last dim of what a loss gets in steps of a pipeline whose head shares its table."""
    import tfdist
    from tfdist.step.context import current_step

    seen = []

    class Seeing(tfdist.layers.VocabParallelCrossEntropy):
        def call(self, y_true, y_pred):
            # Keras also calls a loss once by itself, outside of any step.
            if current_step() is not None:
                seen.append(y_pred.shape[-1])
            return super().call(y_true, y_pred)

    with scope(mesh):
        model = tfdist.models.gpt(WORDS, num_layers=2, width=8, num_heads=2, max_length=TIME)
        model = tfdist.pipeline.PipelineModel(model, num_microbatches=2, input_shape=(TIME,))
        model.compile("sgd", Seeing(WORDS))
    model.fit(ids(), ids(), batch_size=8, verbose=0)
    return sorted(set(seen))


def with_an_id(mesh: dict | None, where: str, value: int, chunk_size: int | None = None):
    """Losses and weights with one other id among the inputs or the labels, or the name of the error."""
    from tfdist import layers

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    data = {"inputs": ids(), "labels": ids()}
    data[where][0, 2] = value
    with scope(mesh):
        inputs = keras.Input((TIME,), dtype="int32")
        x = layers.VocabParallelEmbedding(WORDS, 8)(inputs)
        model = keras.Model(inputs, layers.VocabParallelHead(WORDS)(x))
        loss = layers.VocabParallelCrossEntropy(WORDS, chunk_size=chunk_size)
    try:
        return trained(model, data["inputs"], data["labels"], loss)
    except tf.errors.InvalidArgumentError as error:
        return type(error).__name__


def hessian_of_the_loss(mesh: dict | None) -> list[np.ndarray]:
    """The Hessian of the loss times a direction, of each weight."""
    from tfdist import layers
    from tfdist.sharding.layout import layout_of

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(mesh):
        group = tf.distribute.get_strategy().group("tensor") if mesh else None
        loss = layers.VocabParallelCrossEntropy(2 * WORDS, dtype="float64", reduction="sum")
        head = layers.VocabParallelHead(2 * WORDS, dtype="float64")
        head.build((8, TIME, 5))
    random = np.random.default_rng(0)
    x, along = random.normal(size=(8, TIME, 5)), random.normal(size=(5, 2 * WORDS))
    part = layout_of(head.kernel).slice
    along = tf.constant(along if part is None else part.slice_of(along))
    x, kernel = tf.constant(x), tf.convert_to_tensor(head.kernel.value)

    @tf.function
    def product():
        with tf.GradientTape() as outer:
            outer.watch([x, kernel])
            with tf.GradientTape() as inner:
                inner.watch([x, kernel])
                if group is None:
                    logits = tf.matmul(x, kernel)
                else:
                    from tfdist.collectives.mappings import column_parallel_matmul

                    logits = column_parallel_matmul(x, kernel, group)
                value = loss(ids(), logits)
            first = inner.gradient(value, [x, kernel])
            dot = tf.reduce_sum(first[1] * along)
        return outer.gradient(dot, [x, kernel])

    of_x, of_kernel = product()
    return [of_x.numpy(), (of_kernel if part is None else part.all_gather(of_kernel)).numpy()]


def refused(mesh: dict) -> dict[str, str]:
    """By feature of Keras, what a split layer says of it."""
    from tfdist import layers

    def lora(layer, *shape):
        def enable():
            layer.build(shape)
            layer.enable_lora(2)

        return enable

    rule = keras.regularizers.L2(0.1)
    with scope(mesh):
        cases = {
            "column": lora(layers.ColumnParallelDense(8), 2, 6),
            "row": lora(layers.RowParallelDense(8), 2, 6),
            "embedding": lora(layers.VocabParallelEmbedding(WORDS, 8), 2, TIME),
            "lora_rank": lambda: layers.VocabParallelEmbedding(WORDS, 8, lora_rank=2),
            "activity": lambda: layers.LayerNormalization(
                sequence_parallel=True, activity_regularizer=rule
            ),
        }
        found = {}
        for name, case in cases.items():
            try:
                case()
                found[name] = ""
            except ValueError as error:
                found[name] = str(error)
        return found
