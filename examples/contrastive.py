"""A loss that compares the rows of a batch with each other, on one process or on many ranks.

    python examples/contrastive.py
    tfdist-run -np 2 -- python examples/contrastive.py

Supervised contrastive learning (Khosla et al. 2020) pulls the embeddings of digits of one kind together.
A rank has only some of a batch's rows, so the loss gathers those of all ranks first; its gradient flows
back to each. Both commands end with the same loss up to float rounding. Needs scikit-learn, which carries
the images: pip install 'tfdist[data]'.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.images[..., None].astype("float32") / 16, digits.target


def contrastive_loss(labels, embeddings, temperature=0.2):
    labels = strategy.gather(tf.reshape(labels, [-1]), axis=0)
    embeddings = tf.math.l2_normalize(strategy.gather(embeddings, axis=0), axis=1)
    logits = tf.linalg.matmul(embeddings, embeddings, transpose_b=True) / temperature
    itself = tf.eye(tf.shape(logits)[0])
    alike = tf.cast(labels[:, None] == labels[None], tf.float32) - itself
    return -tf.reduce_sum(alike * tf.nn.log_softmax(logits - 1e9 * itself)) / tf.reduce_sum(alike)


with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(32),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3), contrastive_loss)

history = model.fit(x, y, batch_size=100, epochs=4, verbose=2)
if strategy.is_chief:
    print(f"Loss {history.history['loss'][-1]:.4f}, on {strategy.mesh.size} rank(s).")
