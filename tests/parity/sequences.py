"""Text, series and films: recurrent, convolutional and attention models with masks."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.parity.feeding import Feed, Result, adam, rng, run, scope, sgd, start

__all__ = [
    "bidirectional_text",
    "character_seq2seq",
    "convolutional_lstm",
    "named_entities",
    "next_token_transformer",
    "raw_text_convnet",
    "seq2seq_by_teacher",
    "stacked_cells",
    "stateful_rnn",
    "time_distributed",
    "timeseries",
    "transformer_classifier",
    "transformer_seq2seq",
]


def tokens(rows: int, length: int = 6, words: int = 12):
    """Sequences of 1 to `length` words, filled up with zeros."""
    random = rng()
    ids = random.integers(1, words, (rows, length))
    lengths = random.integers(1, length + 1, rows)
    return np.where(np.arange(length) < lengths[:, None], ids, 0)


def labels(rows: int, classes: int = 2):
    return np.random.default_rng(5).integers(0, classes, rows)


def compiled(optimizer, loss="sparse_categorical_crossentropy", metrics=("accuracy",), **options):
    return lambda: {
        "optimizer": optimizer(),
        "loss": loss() if callable(loss) else loss,
        "metrics": list(metrics),
        **options,
    }


def bidirectional_text(strategy, feed: Feed) -> Result:
    def build():
        inputs = keras.Input((None,), dtype="int32")
        x = layers.Embedding(12, 4, mask_zero=True)(inputs)
        x = layers.Bidirectional(layers.LSTM(3, return_sequences=True))(x)
        x = layers.Bidirectional(layers.GRU(3))(x)
        return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))

    y = labels(feed.rows)[:, None].astype("float32")
    return run(strategy, feed, build, compiled(adam, "binary_crossentropy"), tokens(feed.rows), y)


def raw_text_convnet(strategy, feed: Feed) -> Result:
    """Strings in, `TextVectorization` in the data set and inside of the model."""
    words = np.array(["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree"])
    random = rng()
    text = np.array(
        [" ".join(random.choice(words, random.integers(2, 7))) for _ in range(feed.rows)]
    )
    vectorize = layers.TextVectorization(max_tokens=12, output_sequence_length=8)
    vectorize.adapt(text)

    def build():
        inputs = keras.Input((8,), dtype="int64")
        x = layers.Embedding(12, 4)(inputs)
        x = layers.Conv1D(4, 3, padding="valid", activation="relu", strides=2)(
            layers.Dropout(0.0)(x)
        )
        x = layers.GlobalMaxPooling1D()(x)
        return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))

    y = labels(feed.rows)[:, None].astype("float32")
    ids = np.asarray(vectorize(text))
    return run(strategy, feed, build, compiled(sgd, "binary_crossentropy"), ids, y)


def seq2seq_by_teacher(strategy, feed: Feed) -> Result:
    """Encoder's states into the decoder, which is shown the right answer one step late."""

    def build():
        source, target = keras.Input((None, 5)), keras.Input((None, 7))
        _, *states = layers.LSTM(4, return_state=True)(source)
        x, _, _ = layers.LSTM(4, return_sequences=True, return_state=True)(
            target, initial_state=states
        )
        return keras.Model([source, target], layers.Dense(7, activation="softmax")(x))

    random = rng()
    source = np.eye(5, dtype="float32")[random.integers(0, 5, (feed.rows, 6))]
    answer = np.eye(7, dtype="float32")[random.integers(0, 7, (feed.rows, 5))]
    late = np.concatenate([np.zeros_like(answer[:, :1]), answer[:, :-1]], axis=1)
    optimizer = lambda: keras.optimizers.RMSprop(1e-3)  # noqa: E731
    return run(
        strategy,
        feed,
        build,
        compiled(optimizer, "categorical_crossentropy"),
        (source, late),
        answer,
    )


def character_seq2seq(strategy, feed: Feed) -> Result:
    """Additions of numbers, character by character: encode, repeat, decode."""

    def build():
        return keras.Sequential(
            [
                keras.Input((5, 12)),
                layers.LSTM(6),
                layers.RepeatVector(3),
                layers.LSTM(6, return_sequences=True),
                layers.Dense(12, activation="softmax"),
            ]
        )

    random = rng()
    characters = "0123456789+ "
    table = {c: i for i, c in enumerate(characters)}
    pairs = random.integers(0, 99, (feed.rows, 2))
    one_hot = np.eye(12, dtype="float32")
    x = np.stack([one_hot[[table[c] for c in f"{a}+{b}".ljust(5)]] for a, b in pairs])
    y = np.stack([one_hot[[table[c] for c in f"{a + b}".ljust(3)]] for a, b in pairs])
    return run(strategy, feed, build, compiled(adam, "categorical_crossentropy"), x, y)


class TransformerBlock(layers.Layer):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.att = layers.MultiHeadAttention(heads, width // heads)
        self.ffn = keras.Sequential([layers.Dense(inner, activation="relu"), layers.Dense(width)])
        self.norm1, self.norm2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.supports_masking = True

    def call(self, x, causal=False):
        x = self.norm1(x + self.att(x, x, use_causal_mask=causal))
        return self.norm2(x + self.ffn(x))


class TokenAndPosition(layers.Layer):
    def __init__(self, length: int, words: int, width: int, mask_zero: bool = False):
        super().__init__()
        self.token = layers.Embedding(words, width, mask_zero=mask_zero)
        self.position = layers.Embedding(length, width)

    def compute_mask(self, inputs, mask=None):
        return self.token.compute_mask(inputs)

    def call(self, x):
        return self.token(x) + self.position(ops.arange(0, ops.shape(x)[-1]))


def transformer_classifier(strategy, feed: Feed) -> Result:
    def build():
        inputs = keras.Input((6,))
        x = TransformerBlock(4, 2, 8)(TokenAndPosition(6, 12, 4)(inputs))
        x = layers.Dense(6, activation="relu")(layers.GlobalAveragePooling1D()(x))
        return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))

    return run(strategy, feed, build, compiled(adam), tokens(feed.rows), labels(feed.rows))


def named_entities(strategy, feed: Feed) -> Result:
    """A label for each token, and a loss of the user's own that leaves out the padding."""

    def non_padding_loss(y_true, y_pred):
        loss = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=False)
        return loss * ops.cast(y_true > 0, "float32")

    def build():
        inputs = keras.Input((None,), dtype="int32")
        x = TransformerBlock(4, 2, 8)(TokenAndPosition(6, 12, 4, mask_zero=True)(inputs))
        return keras.Model(inputs, layers.Dense(5, activation="softmax")(x))

    x = tokens(feed.rows)
    y = np.where(x > 0, 1 + x % 4, 0)
    return run(strategy, feed, build, compiled(adam, lambda: non_padding_loss), x, y)


def next_token_transformer(strategy, feed: Feed) -> Result:
    """A small GPT: two outputs, of which one has no loss, and ids that repeat."""

    def build():
        inputs = keras.Input((6,), dtype="int32")
        x = TransformerBlock(4, 2, 8)(TokenAndPosition(6, 12, 4)(inputs), causal=True)
        return keras.Model(inputs, [layers.Dense(12)(x), x])

    losses = lambda: [keras.losses.SparseCategoricalCrossentropy(from_logits=True), None]  # noqa: E731
    x = tokens(feed.rows)
    y = np.roll(x, -1, axis=1)

    start()
    with scope(strategy):
        model = build()
        model.compile(adam(), loss=losses())
    history = feed.fit(model, x, (y, np.zeros((feed.rows, 6, 4), "float32")))
    predictions = model.predict(x, batch_size=4, verbose=0)
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)}
    return Result(weights, history.history, {}, [np.asarray(part) for part in predictions])


def transformer_seq2seq(strategy, feed: Feed) -> Result:
    """Translation: a dict of inputs, masks of both sides, cross attention, masked accuracy."""

    def build():
        source = keras.Input((None,), dtype="int64", name="encoder_inputs")
        target = keras.Input((None,), dtype="int64", name="decoder_inputs")
        encoded = TransformerBlock(4, 2, 8)(TokenAndPosition(6, 12, 4, mask_zero=True)(source))
        x = TransformerBlock(4, 2, 8)(
            TokenAndPosition(6, 12, 4, mask_zero=True)(target), causal=True
        )
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, encoded))
        outputs = layers.Dense(12, activation="softmax")(layers.Dropout(0.0)(x))
        return keras.Model({"encoder_inputs": source, "decoder_inputs": target}, outputs)

    target = tokens(feed.rows)[::-1].copy()
    x = {"encoder_inputs": tokens(feed.rows), "decoder_inputs": target}
    loss = lambda: keras.losses.SparseCategoricalCrossentropy(ignore_class=0)  # noqa: E731
    optimizer = lambda: keras.optimizers.RMSprop(1e-3)  # noqa: E731
    return run(strategy, feed, build, compiled(optimizer, loss), x, np.roll(target, -1, axis=1))


def timeseries(strategy, feed: Feed) -> Result:
    """Windows of a series by Keras' own function, in batches of the feed."""

    def build():
        inputs = keras.Input((4, 2))
        x = layers.GRU(5)(layers.LSTM(4, return_sequences=True)(inputs))
        return keras.Model(inputs, layers.Dense(1)(x))

    series = rng().normal(size=(feed.rows + 3, 2)).astype("float32").cumsum(axis=0)
    windows = keras.utils.timeseries_dataset_from_array(series, None, 4, batch_size=None)
    x = np.stack(list(windows.as_numpy_iterator()))
    y = x[:, -1, :1] * 0.5
    loss = lambda: keras.losses.Huber()  # noqa: E731
    return run(strategy, feed, build, compiled(adam, loss, ["mae"]), x, y)


def convolutional_lstm(strategy, feed: Feed) -> Result:
    """The next frames of films."""

    def build():
        inputs = keras.Input((None, 5, 5, 1))
        x = layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True, activation="relu")(
            inputs
        )
        x = layers.BatchNormalization(synchronized=True)(x)
        x = layers.ConvLSTM2D(2, 1, padding="same", return_sequences=True, activation="relu")(x)
        return keras.Model(inputs, layers.Conv3D(1, 3, activation="sigmoid", padding="same")(x))

    films = rng().uniform(size=(feed.rows, 4, 5, 5, 1)).astype("float32")
    return run(
        strategy,
        feed,
        build,
        compiled(adam, "binary_crossentropy", ()),
        films[:, :-1],
        films[:, 1:],
    )


def stacked_cells(strategy, feed: Feed) -> Result:
    def build():
        inputs = keras.Input((6,), dtype="int32")
        cells = [layers.LSTMCell(3), layers.GRUCell(4, dropout=0.0), layers.SimpleRNNCell(3)]
        x = layers.RNN(layers.StackedRNNCells(cells), unroll=True)(layers.Embedding(12, 3)(inputs))
        return keras.Model(inputs, layers.Dense(3)(x))

    loss = lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # noqa: E731
    return run(strategy, feed, build, compiled(sgd, loss), tokens(feed.rows), labels(feed.rows, 3))


def stateful_rnn(strategy, feed: Feed) -> Result:
    """States of a batch size that is fixed; the next batch goes on where the last one ended."""
    rows = strategy.num_replicas_in_sync if strategy is not None else 1

    def build():
        return keras.Sequential(
            [
                keras.Input((4, 2), batch_size=feed.batch // rows),
                layers.LSTM(3, stateful=True),
                layers.Dense(1),
            ]
        )

    x = rng().normal(size=(feed.rows, 4, 2)).astype("float32")
    start()
    with scope(strategy):
        model = build()
        model.compile(sgd(), "mse")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1])).batch(
        feed.batch, drop_remainder=True
    )
    history = model.fit(data, epochs=2, verbose=0, shuffle=False)
    weights = {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.trainable_weights)}
    return Result(weights, history.history, {}, [])


def time_distributed(strategy, feed: Feed) -> Result:
    """A convnet on each frame, attention over time."""

    def build():
        inputs = keras.Input((3, 6, 6, 1))
        frame = keras.Sequential(
            [keras.Input((6, 6, 1)), layers.Conv2D(2, 3, activation="relu"), layers.Flatten()]
        )
        x = layers.Dense(4)(layers.TimeDistributed(frame)(inputs))
        x = layers.GlobalMaxPooling1D()(layers.Attention(use_scale=True)([x, x]))
        return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))

    x = rng().normal(size=(feed.rows, 3, 6, 6, 1)).astype("float32")
    return run(strategy, feed, build, compiled(sgd), x, labels(feed.rows))
