"""A language model whose feed-forward parts are mixtures of experts, divided over the ranks.

    python examples/experts.py
    tfdist-run -np 2 -- python examples/experts.py

Each token goes through 2 of 4 experts. With two ranks each holds two experts of a block, and tokens travel
to those that they are routed to. The rows of a batch are divided as on a data axis, and the result is that
of one process up to float rounding. The text, the reference of Python, comes with Python.
"""

import keras

import tfdist

strategy = tfdist.strategies.auto(tfdist.Mesh(data=1, expert=-1))
keras.utils.set_random_seed(0)

# Windows of 64 bytes, each with the bytes that follow those in it.
text = tfdist.addons.datasets.load_text("pydoc").train
windows = tfdist.addons.datasets.language_model_windows(text, 64).take(320)

with strategy.scope():
    model = tfdist.models.gpt(
        256, num_layers=2, width=32, num_heads=4, max_length=64, num_experts=4, top_k=2
    )
    model.compile(
        keras.optimizers.AdamW(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )

load = tfdist.addons.monitoring.ExpertLoad()
history = model.fit(windows.batch(32), epochs=2, verbose=2, shuffle=False, callbacks=[load])
counts = tfdist.addons.monitoring.parameter_counts(model)
if strategy.is_chief:
    print(f"Parameters, and those that a token meets: {counts}")
    loss = history.history["loss"][-1]
    print(f"Loss {loss:.4f} on {strategy.mesh.size} rank(s).")
