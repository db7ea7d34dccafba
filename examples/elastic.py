"""A training that goes on when ranks come, go or die, with the loss of one that was never disturbed.

    python examples/elastic.py
    tfdist-run -np 2 -- python examples/elastic.py

    echo localhost:1 > hosts
    tfdist-run -np 2 --min_np=1 --host_discovery_script='cat hosts' -- python examples/elastic.py saved
    echo localhost:2 > hosts    # in another terminal: it saves, and goes on with two ranks

`tfdist-run` asks the script which hosts there are. When their slots change it tells the ranks to save, ends
them, and starts as many as there is room for; when one dies it starts the others again. The script below does
nothing for that but to save into a folder that all starts share. The global batch stays 100 on any number of
ranks. Needs scikit-learn: pip install 'tfdist[data]'.
"""

import sys
import tempfile
import time

import keras
from sklearn.datasets import load_digits

import tfdist

EPOCHS = 6
strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.data[:1400].astype("float32") / 16, digits.target[:1400]

with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)

# All ranks save into one folder. Without one of the user's this start is the only one.
folder = sys.argv[1] if len(sys.argv) > 1 else None
if folder is None:
    made = tempfile.mkdtemp() if strategy.is_chief else None
    folder = tfdist.collectives.broadcast_object(made, strategy.group())
found = tfdist.checkpoint.latest(folder)
if strategy.is_chief:
    print(f"Starts on {strategy.mesh.size} rank(s) from {found or 'the beginning'}.")

callbacks = [tfdist.callbacks.Checkpointer(folder, every_steps=5)]
if len(sys.argv) > 1:
    # So that there is time to change the hosts.
    callbacks.append(
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.2))
    )
history = model.fit(x, y, batch_size=100, epochs=EPOCHS, verbose=0, callbacks=callbacks)
if strategy.is_chief:
    print(f"Loss {history.history['loss'][-1]:.4f} on {strategy.mesh.size} rank(s).")
