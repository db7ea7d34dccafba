"""What the programs that train have in common around `fit`."""

from __future__ import annotations

import re
import time

__all__ = ["record_of", "speed_callback", "warmup_cosine"]


def warmup_cosine(rate: float, steps: int):
    """Up from zero in a twentieth of the steps, then a cosine down to a tenth of the rate."""
    import keras

    warmup = max(steps // 20, 1)
    return keras.optimizers.schedules.CosineDecay(
        0.0, max(steps - warmup, 1), alpha=0.1, warmup_target=rate, warmup_steps=warmup
    )


def record_of(message: str) -> str:
    """Which record of a file TensorFlow found damaged, of all that it says of its graph."""
    found = re.search(r"[\w ]*\b(corrupted|truncated) record[^\n\[]*", message)
    return found[0].strip() if found else " ".join(message.split())[:200]


def speed_callback(num_items: int):
    """A callback that counts items of training per second, without the first epoch."""
    import keras

    class Speed(keras.callbacks.Callback):
        """Items of training per second, over the epochs after the first, which builds the graph."""

        items_per_second = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            self._begun, self._ended = time.perf_counter(), None

        def on_test_begin(self, logs=None):
            self._ended = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            speed = num_items / ((self._ended or time.perf_counter()) - self._begun)
            self.items_per_second = speed if epoch < 2 else max(speed, self.items_per_second)

    return Speed()
