"""Training with a loss that takes its logits in chunks, on one process and on any mesh."""

from __future__ import annotations

import keras
import numpy as np

from benchmarks.measuring import peak_above
from tests.models.gpt_programs import build, scope, whole
from tests.tensor_parallel.parallel_programs import gpt2

VOCABULARY, TIME = 61, 16


def train(mesh: dict | None, chunk_size: int | None, rows: int, policy="float32", **options):
    """Losses, an evaluation, predictions and weights; and how often the loss was made in chunks.

    Args:
        mesh: As for `gpt_programs.scope`.
        chunk_size: That of the loss; None for Keras' own loss.
        rows: Of the data, in batches of 4.
        policy: The dtypes of layers.
        options: For the GPT, or `hub` for the GPT-2 of KerasHub.
    """
    from tfdist import layers
    from tfdist.layers import losses

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(0)
    x, y = (random.integers(0, VOCABULARY, (rows, TIME), "int32") for _ in range(2))
    weights = random.random((rows, TIME)).astype("float32")
    # Before the scope of its model, where many scripts make it.
    if chunk_size is not None:
        loss = layers.VocabParallelCrossEntropy(VOCABULARY, chunk_size=chunk_size)
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    calls, original = [], losses.chunked_cross_entropy

    def counted(*args):
        calls.append(args[0].columns)
        return original(*args)

    losses.chunked_cross_entropy = counted
    keras.config.set_dtype_policy(policy)
    try:
        with scope(mesh):
            if options.pop("hub", False):
                model, x = hub_model(x)
            else:
                model = build(VOCABULARY, **options)
            # Of itself a task of KerasHub has a metric, which takes whole logits.
            optimizer = keras.optimizers.SGD(0.3, momentum=0.9)
            model.compile(optimizer, loss, weighted_metrics=None)
        history = model.fit(
            x, y, sample_weight=weights, batch_size=4, epochs=2, verbose=0, shuffle=False
        )
        evaluation = model.evaluate(x, y, batch_size=4, verbose=0)
        in_steps = list(calls)
        predictions = model.predict(x, batch_size=4, verbose=0)
    finally:
        losses.chunked_cross_entropy = original
        keras.config.set_dtype_policy("float32")
    assert calls == in_steps
    values = [history.history["loss"], [evaluation], predictions, *whole(model.weights).values()]
    return [np.asarray(value) for value in values], set(in_steps)


def hub_model(x):
    """The GPT-2 of KerasHub with its head, split, and its inputs."""
    from tfdist.tensor_parallel import parallelize

    model = gpt2(True, VOCABULARY, TIME)
    parallelize(model)
    return model, {"token_ids": x, "padding_mask": np.ones_like(x)}


def peak_bytes(chunk_size: int | None) -> int:
    """What a step adds to the peak of this process's memory: 2,048 tokens of 32,768 classes."""
    from tfdist import layers

    size = 32768
    tokens = np.zeros((8, 256), "int32")
    inputs = keras.Input((256,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(size, 16)
    model = keras.Model(inputs, embedding(embedding(inputs), reverse=True))
    model.compile("sgd", layers.VocabParallelCrossEntropy(size, chunk_size=64), jit_compile=False)
    model.fit(tokens[:1], tokens[:1], verbose=0)
    model.compile(
        "sgd", layers.VocabParallelCrossEntropy(size, chunk_size=chunk_size), jit_compile=False
    )
    return peak_above(lambda: model.fit(tokens, tokens, batch_size=8, verbose=0))[0]
