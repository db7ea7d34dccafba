"""Fine-tunes a Llama of KerasHub with LoRA, its layers split over the ranks.

    python examples/fine_tune_lora.py
    tfdist-run -np 2 -- python examples/fine_tune_lora.py

The backbone is small and made from its configuration, with random weights: nothing is downloaded. That of a
preset is read by `tfdist.load_preset`, each rank its part. Only the adapters are trained, and what is saved
are files of KerasHub. The result is that of one process up to float rounding. Needs KerasHub.
"""

import tempfile
from pathlib import Path

import keras
import keras_hub

import tfdist

strategy = tfdist.strategies.auto(tfdist.Mesh(data=1, tensor=-1))
keras.utils.set_random_seed(0)

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
    model.backbone.enable_lora(4)
    model.compile(
        keras.optimizers.AdamW(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=None,
    )

report = tfdist.tensor_parallel.report(model)
if strategy.is_chief:
    print(report)

# Windows of 64 bytes, each with the bytes that follow those in it.
text = tfdist.datasets.load_text("pydoc").train
windows = tfdist.datasets.language_model_windows(text, 64).take(256)


def as_inputs(tokens, targets):
    """What the model takes: all tokens count."""
    return {"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)}, targets


history = model.fit(windows.map(as_inputs).batch(16), epochs=2, verbose=2)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "adapter.lora.h5"
    model.backbone.save_lora_weights(str(file))  # Every rank calls it; the chief writes.
    if strategy.is_chief:
        print(f"The adapter has {file.stat().st_size:,} bytes.")
if strategy.is_chief:
    print(f"Loss {history.history['loss'][-1]:.4f} on {strategy.mesh.size} rank(s).")
