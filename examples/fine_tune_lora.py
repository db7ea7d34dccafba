"""Fine-tunes a Llama of KerasHub with LoRA, its layers split over the ranks.

    python examples/fine_tune_lora.py
    tfdist-run -np 2 -- python examples/fine_tune_lora.py

A small backbone, made from its configuration, learns the reference of Python first. Adapters then teach it the
same in capitals, and only these are trained and saved, in a file of KerasHub's. Nothing is downloaded; a preset
is read by `tfdist.load_preset`, each rank its part. The result is that of one process up to float rounding. Needs
KerasHub.
"""

import tempfile
from pathlib import Path

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfdist

strategy = tfdist.strategies.auto(tfdist.Mesh(data=1, tensor=-1))
keras.utils.set_random_seed(0)


def windows(text):
    """Batches of 64 bytes, as the model takes them, each with the bytes that follow those in it."""

    def as_inputs(tokens, targets):
        return {"token_ids": tokens, "padding_mask": tf.ones_like(tokens)}, targets

    found = tfdist.addons.datasets.language_model_windows(text, 64)
    return found.take(256).map(as_inputs).batch(16)


def compile_model():
    """Anew for each training: the optimizer's state is that of the weights that are trained."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Adam divides by its epsilon where gradients vanish: a small one blows rounding up.
    model.compile(keras.optimizers.AdamW(1e-2, epsilon=1e-4), loss, weighted_metrics=None)


text = tfdist.addons.datasets.load_text("pydoc").train
capitals = np.frombuffer(text.tobytes().upper(), np.uint8)

with strategy.scope():
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=128,
    )
    model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None, compile=False)
    model = tfdist.parallelize(model)
    compile_model()
model.fit(windows(text), epochs=3, verbose=2, shuffle=False)

with strategy.scope():
    model.backbone.enable_lora(4)
    compile_model()
before = model.evaluate(windows(capitals), verbose=0)
history = model.fit(windows(capitals), epochs=3, verbose=2, shuffle=False)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "adapter.lora.h5"
    model.backbone.save_lora_weights(str(file))  # Every rank calls it; the chief writes.
    if strategy.is_chief:
        print(f"The adapter has {file.stat().st_size:,} bytes.")
if strategy.is_chief:
    loss = history.history["loss"][-1]
    print(f"Loss {loss:.4f}, before {before:.4f}, on {strategy.mesh.size} rank(s).")
