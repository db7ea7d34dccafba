"""Trains on a TPU, under the strategy that TensorFlow has for it.

    python examples/tpu.py            # on the TPU's own machine
    python examples/tpu.py my-tpu     # by the name of a Cloud TPU

One process has all cores of a TPU, so no launcher starts this script. The model computes in bfloat16, batches
are of one size, and many steps run between two looks of Keras. Where there is no TPU it says so in one line.
Needs scikit-learn: pip install 'tfdist[data]'.
"""

import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

try:
    # First of all: to start a TPU clears what TensorFlow has made before.
    strategy = tfdist.strategies.tpu(sys.argv[1] if len(sys.argv) > 1 else "local")
except tfdist.TfdistError as error:
    sys.exit(f"{error}. `python examples/train_digits.py` trains without one.")
keras.config.set_dtype_policy("mixed_bfloat16")
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.data[:1400].astype("float32") / 16, digits.target[:1400]
# 64 rows for each core; a batch that is not full is left out.
batch_size = 64 * strategy.num_replicas_in_sync
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1400, seed=0)
data = data.batch(batch_size, drop_remainder=True)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=len(data),
    )
history = model.fit(data, epochs=8, verbose=2).history
print(
    f"Accuracy {history['accuracy'][-1]:.2%}, loss {history['loss'][-1]:.4f}, "
    f"on {strategy.num_replicas_in_sync} core(s)."
)
