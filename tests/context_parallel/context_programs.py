"""Attention and training on a context axis, on ranks and in one process."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.models.gpt_programs import scope, whole


def tensors(batch=2, heads=4, key_heads=4, time=16, size=8, seed=0, dtype="float32"):
    """Query, key, value and the gradient of the output, of the whole sequence."""
    random = np.random.default_rng(seed)
    shapes = [(batch, heads, time, size), *[(batch, key_heads, time, size)] * 2]
    return [random.standard_normal(shape).astype(dtype) for shape in [*shapes, shapes[0]]]


def mask_of(kind: str | None, batch: int, time: int):
    """None, a padding mask of keys [batch, 1, time], or one of pairs [batch, time, time]."""
    if kind is None:
        return None
    random = np.random.default_rng(7)
    if kind == "keys":
        lengths = random.integers(1, time + 1, batch)
        lengths[0] = 1
        return (np.arange(time) < lengths[:, None])[:, None]
    seen = random.random((batch, time, time)) < 0.5
    seen[:, 2] = False  # A query that sees nothing.
    return seen


def plain(mask=None, causal=False, **shapes):
    """Output and gradients by the formula, in float64."""
    query, key, value, of_out = (tf.constant(x, tf.float64) for x in tensors(**shapes))
    repeats = query.shape[1] // key.shape[1]
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        keys, values = tf.repeat(key, repeats, 1), tf.repeat(value, repeats, 1)
        scores = tf.matmul(query, keys, transpose_b=True) / query.shape[-1] ** 0.5
        time = query.shape[2]
        seen = tf.ones_like(scores, tf.bool)
        if causal:
            seen &= tf.linalg.band_part(tf.ones([time, time], tf.bool), -1, 0)
        mask = mask_of(mask, query.shape[0], time)
        if mask is not None:
            seen &= mask[:, None]
        some = tf.reduce_any(seen, -1, keepdims=True)
        weights = tf.nn.softmax(tf.where(seen, scores, -1e30))
        out = tf.matmul(tf.where(some, weights, 0.0), values)
    gradients = tape.gradient(out, [query, key, value], output_gradients=of_out)
    return [np.asarray(x) for x in (out, *gradients)]


def on_rank(kind: str, causal: bool, mask=None, *, eager=False, dtype="float32", **shapes):
    """This rank's part of output and gradients, and the places of its tokens."""
    from tfdist import Mesh
    from tfdist.context_parallel import context_attention
    from tfdist.step.token_split import TokenSplit
    from tfdist.testing import engine

    given = tensors(**shapes)
    batch, _, time, size = given[0].shape
    group = engine(Mesh(data=1, context=-1)).group("context")
    is_even = time % (2 * group.size) == 0
    whole = TokenSplit(group.size, group.rank, time)
    own = [whole.take(tf.cast(x, dtype), 2) for x in given]
    mask = mask_of(mask, batch, time)
    if mask is not None:
        mask = tf.constant(mask)
        mask = whole.take(mask, 2 if mask.shape[1] == 1 else 1)

    def step(total, mask, *own):
        split = TokenSplit(group.size, group.rank, time if is_even else total)
        query, key, value, of_out = own
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            out = context_attention(
                query,
                key,
                value,
                split,
                group,
                kind=kind,
                causal=causal,
                mask=mask,
                scale=size**-0.5,
                name="attention",
            )
        gradients = tape.gradient(out, [query, key, value], output_gradients=of_out)
        return out, *gradients

    if not eager:
        step = tf.function(step, autograph=False)
    found = step(tf.constant(time), mask, *own)
    return whole.positions().numpy(), [tf.cast(x, tf.float32).numpy() for x in found]


def joined(results) -> list[np.ndarray]:
    """The parts of all ranks, in the order of the sequence."""
    order = np.argsort(np.concatenate([places for places, _ in results]))
    parts = zip(*(arrays for _, arrays in results), strict=True)
    return [np.concatenate(of_all, axis=2)[:, :, order] for of_all in parts]


VOCABULARY = 31


def text(rows: int, time: int):
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, (rows, time + 1))
    follows = (tokens[:, :-1] * 3 + 1) % VOCABULARY
    return tokens[:, :-1].astype("int32"), follows


def train(
    mesh: dict | None,
    *,
    time=16,
    rows=14,
    epochs=5,
    weighted=False,
    pipeline=0,
    policy_of_recompute=None,
    accumulate=None,
    **options,
):
    """Twenty steps of SGD: logs, evaluation; weights by their paths, and predictions by "".

    In a pipeline, the weights of this rank's stages.
    """
    from tfdist import layers, models
    from tfdist.pipeline import PipelineModel
    from tfdist.recompute import recompute

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    x, y = text(rows, time)
    policy = options.pop("policy", "float32")
    weights = None
    if weighted:
        weights = np.random.default_rng(1).random(y.shape).astype("float32")
    keras.config.set_dtype_policy(policy)
    try:
        with scope(mesh):
            defaults = {"num_layers": 2, "width": 16, "num_heads": 4, "max_length": time}
            model = models.gpt(VOCABULARY, **{**defaults, **options})
            if policy_of_recompute:
                recompute(model, policy_of_recompute)
            if pipeline:
                model = PipelineModel(model, num_microbatches=pipeline)
            model.compile(
                keras.optimizers.SGD(
                    0.3,
                    momentum=0.9,
                    global_clipnorm=1.0,
                    gradient_accumulation_steps=accumulate,
                ),
                layers.VocabParallelCrossEntropy(VOCABULARY),
                # Logits split over the tensor axis go to no metric.
                metrics=None if (mesh or {}).get("tensor") else ["accuracy"],
            )
        history = model.fit(
            x, y, sample_weight=weights, batch_size=4, epochs=epochs, shuffle=False, verbose=0
        ).history
        history["evaluation"] = model.evaluate(x, y, batch_size=4, verbose=0)
        predictions = model.predict(x, batch_size=4, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    values = zip(model.weights, whole(model.weights).values(), strict=True)
    return history, {**{variable.path: value for variable, value in values}, "": predictions}


def refusals() -> dict[str, str]:
    """What is said where something cannot be done on a context axis."""
    from tfdist import Mesh, layers, models
    from tfdist.testing import strategy

    parallel = strategy(Mesh(data=1, context=-1))
    found = {}

    def note(what: str, function) -> None:
        try:
            with parallel.scope():
                function()
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            found[what] = str(error)
        else:
            found[what] = "nothing was refused"

    def attention(**options):
        return layers.ParallelMultiHeadAttention(3, 4, name="attention", **options)

    def compiled(*more, **options):
        model = models.gpt(VOCABULARY, num_layers=1, width=8, num_heads=2, **options)
        if more:
            model = keras.Sequential([keras.Input((None, 4)), *more])
        model.compile("sgd", layers.VocabParallelCrossEntropy(VOCABULARY))
        return model

    note("dropout", lambda: attention(dropout=0.1))
    note("ulysses", lambda: attention(context_attention="ulysses"))
    note("short", lambda: compiled().fit(*text(2, 1), verbose=0))
    note("positions", lambda: compiled(max_length=8).fit(*text(2, 12), verbose=0))
    mixes = keras.layers.Conv1D(VOCABULARY, 3, padding="same", name="mixes")
    note("mixes", lambda: compiled(mixes).fit(np.zeros((2, 8, 4)), np.zeros((2, 8)), verbose=0))
    return found


def called(mesh: dict | None):
    """Logits of a model that is called by itself."""
    from tfdist import models

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with scope(mesh):
        model = models.gpt(VOCABULARY, num_layers=1, width=8, num_heads=2, max_length=16)
    x, _ = text(2, 5)
    tokens = models.generate(model, x[0], 6, temperature=0)
    return np.concatenate([np.ravel(model(x)), tokens])


def own_loop(mesh: dict | None):
    """Weights and outputs of a loop of one's own, with sequences of several lengths."""
    from tfdist import models

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with scope(mesh):
        strategy = tf.distribute.get_strategy()
        model = models.gpt(VOCABULARY, num_layers=1, width=8, num_heads=2, max_length=16)
        optimizer = keras.optimizers.SGD(0.3)
        optimizer.build(model.trainable_variables)
    counts: list[int] = []

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            # Gradients of ranks are summed, so each counts its tokens by those of all.
            loss = tf.reduce_sum(losses) / counts[-1]
        values = [variable.value for variable in model.trainable_variables]
        gradients = tape.gradient(loss, values)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for time in (8, 13):
        counts.append(3 * time)
        data = tf.data.Dataset.from_tensors(text(3, time))
        for batch in strategy.experimental_distribute_dataset(data):
            tf.function(strategy.run)(step, args=(batch,))
    return np.concatenate([np.ravel(value) for value in whole(model.weights).values()])


def on_batches(mesh: dict | None):
    """Losses and weights of steps by `train_on_batch`, with rows and tokens that do not divide."""
    from tfdist import layers, models

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with scope(mesh):
        model = models.gpt(VOCABULARY, num_layers=1, width=8, num_heads=2, max_length=16)
        model.compile(keras.optimizers.SGD(0.3), layers.VocabParallelCrossEntropy(VOCABULARY))
    losses = []
    for rows, tokens in ((3, 8), (4, 8), (4, 13)):
        losses.append(float(model.train_on_batch(*text(rows, tokens))))
    losses.append(float(model.test_on_batch(*text(3, 7))))
    return np.concatenate([losses, *(np.ravel(value) for value in whole(model.weights).values())])
