"""A recommender whose embedding tables are divided over the ranks: DLRM on clicks of a known rule.

    python examples/recommender.py
    tfdist-run -np 2 -- python examples/recommender.py

Each rank holds a part of the tables, looks up what others ask of it, and updates that part alone. The result
is that of one process up to float rounding. The data are drawn by a rule, so it is known how small a loss
the rule itself has.
"""

import keras
from keras import losses

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

SIZES = [600, 200, 50]  # Users, items and countries, say.
train, clicks, floor = tfdist.addons.recommenders.make_clicks(12_000, 4, SIZES, seed=1)

with strategy.scope():
    model = tfdist.addons.recommenders.dlrm(4, SIZES, embedding_dim=8)
    model.compile(keras.optimizers.Adam(0.01), losses.BinaryCrossentropy(from_logits=True))

if strategy.is_chief:
    for layer in model.layers:
        if isinstance(layer, tfdist.addons.recommenders.ShardedEmbedding):
            print(layer.report())

history = model.fit(train, clicks, batch_size=200, epochs=3, verbose=2)
if strategy.is_chief:
    print(f"The rule's own loss is {floor:.4f}; a constant guess has 0.69.")
    print(f"Loss {history.history['loss'][-1]:.4f} on {strategy.mesh.size} rank(s).")
