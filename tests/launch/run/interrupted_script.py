"""What ranks train while they are interrupted: `python interrupted_script.py import|training|saving [folder]`."""

from __future__ import annotations

import sys
import time
from unittest import mock


def main(moment: str, folder: str = "") -> None:
    if moment == "import":
        print("importing", flush=True)

    import keras
    import numpy as np

    import tfdist
    from tfdist.checkpoint.manifest import Manifest

    write_whole = Manifest.write

    def write(manifest, storage):
        """The second checkpoint is never whole: the process is to end while it waits."""
        if manifest.step > 2:
            print("saving", flush=True)
            time.sleep(600)
        write_whole(manifest, storage)

    class Say(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2 and moment == "training":
                print("training", flush=True)

    strategy = tfdist.strategies.auto()
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).random((50, 4), dtype="float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    callbacks: list = [Say()]
    if moment == "saving":
        mock.patch.object(Manifest, "write", write).start()
        # The main thread writes, so that it is there that the signal finds the rank.
        saver = tfdist.callbacks.Checkpointer(folder, every_steps=2, asynchronous=False)
        callbacks.append(saver)
    try:
        model.fit(x, x.sum(axis=1), batch_size=16, epochs=100_000, verbose=0, callbacks=callbacks)
    finally:
        print("last words", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
