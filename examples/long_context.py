"""A language model on sequences of 1024 tokens, each of them divided over the ranks.

    python examples/long_context.py
    tfdist-run -np 2 -- python examples/long_context.py

All ranks have the same rows of a batch, and other tokens of every row: two chunks each, an early and a late
one, so that causal attention costs all the same. Keys and values travel round a ring. The result is that of
one process up to float rounding. The text, the reference of Python, comes with Python.
"""

import keras

import tfdist

strategy = tfdist.strategies.auto(tfdist.Mesh(data=1, context=-1))
keras.utils.set_random_seed(0)

LENGTH = 1024
text = tfdist.addons.datasets.load_text("pydoc").train
windows = tfdist.addons.datasets.language_model_windows(text, LENGTH).take(24)

with strategy.scope():
    model = tfdist.models.gpt(
        256, num_layers=1, width=32, num_heads=2, max_length=LENGTH, context_attention="ring"
    )
    # Computes the logits of 256 tokens at a time, so that they do not fill the memory.
    loss = tfdist.layers.VocabParallelCrossEntropy(256, chunk_size=256)
    model.compile(keras.optimizers.AdamW(5e-3), loss)

history = model.fit(windows.batch(2), epochs=3, verbose=2, shuffle=False)
if strategy.is_chief:
    tokens = LENGTH // strategy.mesh.size
    loss = history.history["loss"][-1]
    print(f"{tokens} of {LENGTH} tokens of a row on this rank.")
    print(f"Loss {loss:.4f} on {strategy.mesh.size} rank(s).")
