"""Wrote the files here, at commit e9f7190, before modules moved: `python write.py FOLDER`."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

# As modules were then.
from tfdist import layers, learning_rate, models, optimizers

folder = sys.argv[1]
keras.utils.set_random_seed(5)
tokens = keras.Input((6,), dtype="int32", name="tokens")
x = layers.VocabParallelEmbedding(11, 8, name="embedding")(tokens)
x = layers.PositionEmbedding(6, name="positions")(x)
x = layers.TransformerDecoderBlock(2, 16, name="block")(x)
x = layers.LayerNormalization(name="norm")(x)
x = layers.MixtureOfExperts(2, 8, name="experts")(x)
x = layers.ParallelMLP(16, name="mlp")(x)
x = layers.ColumnParallelDense(12, name="column")(x)
x = layers.RowParallelDense(8, name="row")(x)
x = layers.Dropout(0.1, name="dropout")(x)
y = layers.VocabParallelHead(11, name="head")(x)
text = keras.Model(tokens, y)
text.compile(
    optimizers.OneBitAdam(
        learning_rate.ScaledWarmup(learning_rate=1e-3, replicas=4, warmup_steps=10), freeze_step=4
    ),
    layers.VocabParallelCrossEntropy(11),
)
np.save(f"{folder}/text.npy", text.predict(np.arange(12).reshape(2, 6) % 11, verbose=0))
text.save(f"{folder}/text.keras")

clicks = models.dlrm(2, [7, 5], embedding_dim=4, bottom_widths=[4], top_widths=[3])
clicks.compile("sgd", "mse")
clicks.save(f"{folder}/clicks.keras")

for name, kind in (
    ("diloco", optimizers.DiLoCo),
    ("local_sgd", optimizers.LocalSGD),
    ("slowmo", optimizers.SlowMo),
):
    model = keras.Sequential([keras.Input((3,)), layers.ColumnParallelDense(2)])
    model.compile(kind(keras.optimizers.SGD(0.1), sync_every=2), "mse")
    model.save(f"{folder}/{name}.keras")

attention = layers.ParallelMultiHeadAttention(2, 4, name="attention")
Path(folder, "attention.json").write_text(json.dumps(keras.layers.serialize(attention)))
