"""A Dense layer of 512 units that is whole on each rank, or split over them by columns or by rows.

    python examples/split_dense.py
    tfdist-run -np 2 -- python examples/split_dense.py

All ranks stand on the tensor axis: each has all rows of a batch, and a part of the split kernels. The
three models begin with the same weights and end with the same loss up to float rounding. Needs
scikit-learn, which carries the images: pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto(tfdist.Mesh(data=1, tensor=-1))

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target


def plain():
    """512 units on each rank."""
    return [keras.layers.Dense(512, activation="relu")]


def column():
    """Each rank has 512 / N columns of the kernel; the parts of the output are joined behind it."""
    return [tfdist.layers.ColumnParallelDense(512, activation="relu", gather_output=True)]


def row():
    """Each rank has 64 / N rows of the kernel, and its part of the inputs; the results are summed."""
    return [
        tfdist.layers.RowParallelDense(512, input_is_parallel=False),
        keras.layers.Activation("relu"),
    ]


losses = {}
for build in (plain, column, row):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), *build(), keras.layers.Dense(10)])
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(x, y, batch_size=100, epochs=4, verbose=0)
    losses[build.__name__] = history.history["loss"][-1]
    if strategy.is_chief:
        shape = tuple(model.layers[0].kernel.shape)
        print(f"{build.__name__:6}  kernel on this rank {shape}  loss {losses[build.__name__]:.4f}")

if strategy.is_chief:
    found = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    print(f"Losses: {found}, on {strategy.mesh.size} rank(s).")
