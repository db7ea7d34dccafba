"""What the programs that train have in common around `fit`."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence

from tfdist.launch.command import Failure, UsageError
from tfdist.runtime.process_memory import peak_bytes
from tfdist.utils.checks import one_line


def warmup_cosine(rate: float, steps: int):
    """Up from zero in a twentieth of the steps, then a cosine down to a tenth of the rate."""
    import keras

    warmup = max(steps // 20, 1)
    return keras.optimizers.schedules.CosineDecay(
        0.0, max(steps - warmup, 1), alpha=0.1, warmup_target=rate, warmup_steps=warmup
    )


@contextlib.contextmanager
def expected_errors(workdir: str | None, dataset: str) -> Iterator[None]:
    """Says in one line what can be expected to fail in `fit`: checkpoints, the loss, the data, servers."""
    import tensorflow as tf

    from tfdist.addons.asynchronous import ParameterServerError
    from tfdist.checkpoint import CheckpointError

    try:
        yield
    except CheckpointError as error:
        raise UsageError(f"--workdir={workdir}: {error}") from error
    except ParameterServerError as error:
        raise Failure(str(error)) from error
    except FloatingPointError as error:
        raise Failure(str(error)) from error
    except tf.errors.DataLossError as error:
        raise UsageError(
            f"--dataset={dataset}: a file is damaged: {_record_of(error.message)}."
        ) from error


def _record_of(message: str) -> str:
    """Which record of a file TensorFlow found damaged, of all that it says of its graph."""
    found = re.search(r"[\w ]*\b(corrupted|truncated) record[^\n\[]*", message)
    return found[0].strip() if found else one_line(message)


def summary(history: Mapping[str, Sequence[float]], seconds: float) -> str:
    """What a training came to, in a line: how long it took, its best epoch, and a rank's memory.

    Args:
        history: What `fit` logged, by name, a number for each epoch.
        seconds: How long it took.
    """
    minutes, rest = divmod(round(seconds), 60)
    took = f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
    epochs = len(history.get("loss", ()))
    said = [f"Trained {epochs} epoch{'s' * (epochs != 1)} in {took}"]
    if losses := history.get("val_loss"):
        best = min(range(len(losses)), key=losses.__getitem__)
        said.append(f"best validation loss {losses[best]:.4f} in epoch {best + 1}")
    peak = peak_bytes() / (1 << 20)
    return "; ".join([*said, f"peak memory of this rank {peak:,.0f} MiB"]) + "."


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
