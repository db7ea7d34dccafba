"""A GPT and attention on rows of several documents, and with each document in a row of its own."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.models.gpt_programs import scope

WORDS, TIME = 29, 24
#: The lengths of the documents of each row; what is left of a row is padding.
ROWS = [[5, 12, 7], [24], [1, 2, 3, 10], [11, 11]]
STEPS = 4


def documents() -> list[np.ndarray]:
    """The tokens of each document."""
    random = np.random.default_rng(0)
    return [random.integers(1, WORDS, length) for row in ROWS for length in row]


def arrays(rows: list[list[int]], time: int) -> dict[str, np.ndarray]:
    """Rows of documents: tokens, starts, the next tokens of the same document and their weights."""
    found = {name: np.zeros([len(rows), time], "int32") for name in ("tokens", "starts", "targets")}
    weights = np.zeros([len(rows), time], "float32")
    texts = iter(documents())
    for at, lengths in enumerate(rows):
        begin = 0
        for length in lengths:
            text = next(texts)
            part = slice(begin, begin + length)
            found["tokens"][at, part], found["starts"][at, part] = text, begin
            found["targets"][at, begin : begin + length - 1] = text[1:]
            weights[at, begin : begin + length - 1] = 1
            begin += length
        found["starts"][at, begin:] = begin
    return {**found, "weights": weights}


def train(
    mesh: dict | None, *, packed: bool, pipeline: bool = False, steps: int = STEPS, **options
):
    """Losses and weights of some steps of SGD on all documents, by the mean over their tokens."""
    from tfdist import models
    from tfdist.layers import VocabParallelCrossEntropy
    from tfdist.pipeline import PipelineModel
    from tfdist.sharding import whole_value

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    rows = ROWS if packed else [[length] for row in ROWS for length in row]
    data = arrays(rows, TIME)
    sizes = {"num_layers": 2, "width": 16, "num_heads": 4, "max_length": TIME}
    with scope(mesh):
        model = models.gpt(WORDS, documents=packed, **{**sizes, **options})
        if pipeline:
            model = PipelineModel(model, num_microbatches=2, input_shape=(TIME,))
        loss = VocabParallelCrossEntropy(WORDS, reduction="sum")
        model.compile(keras.optimizers.SGD(0.5), loss)
    x = {"tokens": data["tokens"], "document_starts": data["starts"]} if packed else data["tokens"]
    weights = data["weights"] / data["weights"].sum()
    history = model.fit(
        x,
        data["targets"],
        sample_weight=weights,
        batch_size=len(rows),
        epochs=steps,
        shuffle=False,
        verbose=0,
    )
    variables = getattr(model, "chain_model", model).trainable_variables
    # The sum of a batch is divided by nothing, and `fit` reports it for each row of the batch.
    return history.history["loss"], [whole_value(each).numpy() for each in variables]


def logits(changed: int | None = None, **options) -> np.ndarray:
    """Logits of the first row, with the tokens of one of its documents changed."""
    from tfdist import models

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    data = arrays(ROWS, TIME)
    tokens, starts = data["tokens"][:1].copy(), data["starts"][:1]
    if changed is not None:
        inside = starts[0] == np.unique(starts[0])[changed]
        tokens[0, inside] = tokens[0, inside] % (WORDS - 1) + 1
    sizes = {"num_layers": 2, "width": 16, "num_heads": 4, "max_length": TIME}
    model = models.gpt(WORDS, documents=True, **{**sizes, **options})
    return np.asarray(model({"tokens": tokens, "document_starts": starts}))[0]


def blocks(time: int, block, heads: int = 4, key_heads: int = 2):
    """Output and gradients of attention by blocks, by starts and by an explicit mask."""
    from tfdist.context_parallel.blockwise import blockwise_attention

    random = np.random.default_rng(2)
    shapes = [(2, heads, time, 8), (2, key_heads, time, 8), (2, key_heads, time, 8)]
    given = [tf.constant(random.normal(size=shape), "float32") for shape in shapes]
    of_out = tf.constant(random.normal(size=shapes[0]), "float32")
    cuts = [np.sort(random.choice(time, 3, replace=False)) for _ in range(2)]
    starts = np.zeros([2, time], "int32")
    for row, places in enumerate(cuts):
        for place in places:
            starts[row, place:] = place
    mask = (np.arange(time) >= starts[:, :, None])[:, None]
    found = []
    for options in ({"document_starts": starts}, {"mask": mask}):

        @tf.function(autograph=False)
        def step(query, key, value, options=options):
            with tf.GradientTape() as tape:
                tape.watch([query, key, value])
                out = blockwise_attention(
                    query, key, value, causal=True, block_size=block, **options
                )
            return out, *tape.gradient(out, [query, key, value], output_gradients=of_out)

        found.append([each.numpy() for each in step(*given)])
    return found
