"""Helpers for `fit` that the training programs share."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence

from tfdist.addons.monitoring.process_memory import peak_bytes
from tfdist.launch.flags.command import Failure, UsageError
from tfdist.launch.flags.mesh import Layout
from tfdist.launch.flags.optimizer import counted_for, read_recompute
from tfdist.utils.checks import one_line


def warmup_cosine(rate: float, steps: int):
    """Linear warm-up over a twentieth of the steps, then cosine decay to a tenth of the rate."""
    import keras

    warmup = max(steps // 20, 1)
    return keras.optimizers.schedules.CosineDecay(
        0.0, max(steps - warmup, 1), alpha=0.1, warmup_target=rate, warmup_steps=warmup
    )


def add_recompute(model, policy: str, rows: int, input_shape: Sequence[int | None]) -> None:
    """Apply the policy of `--recompute` to a model.

    Args:
        model: The model, not yet compiled.
        policy: The value of the flag.
        rows: Rows of a micro-batch on a rank.
        input_shape: The shape of a row.

    Raises:
        UsageError: The model does not support the policy.
    """
    from tfdist.recompute import recompute

    if not (arguments := read_recompute("recompute", policy)):
        return
    try:
        recompute(model, **counted_for(arguments, rows, input_shape))
    except ValueError as error:
        raise UsageError(f"--recompute={policy} is not supported: {error}") from error


def pipelined(model, layout: Layout, input_shape: Sequence[int | None]):
    """The model, in a pipeline if the layout has one, whose partition the chief prints.

    Args:
        model: The model, built under the strategy.
        layout: The layout of the ranks.
        input_shape: The shape of a row.

    Raises:
        UsageError: The model cannot be split so.
    """
    from tfdist.pipeline import PipelineModel

    if layout.pipeline == 1:
        return model
    try:
        model = PipelineModel(
            model,
            num_microbatches=layout.num_microbatches,
            schedule=layout.schedule,
            chunks=layout.chunks,
            cut=layout.cut,
            input_shape=input_shape,
        )
    except ValueError as error:
        raise UsageError(f"--pipeline={layout.pipeline} is not supported: {error}") from error
    if model.distribute_strategy.is_chief:
        print(model.partition.table())
    return model


@contextlib.contextmanager
def expected_errors(workdir: str | None, dataset: str) -> Iterator[None]:
    """Convert expected errors of `fit` into one-line errors: checkpoints, loss, data, servers."""
    import tensorflow as tf

    from tfdist.addons.asynchronous import ParameterServerError
    from tfdist.checkpoint import CheckpointError

    try:
        yield
    except CheckpointError as error:
        raise UsageError(f"--workdir={workdir} cannot be used: {error}") from error
    except ParameterServerError as error:
        raise Failure(str(error)) from error
    except FloatingPointError as error:
        raise Failure(str(error)) from error
    except tf.errors.DataLossError as error:
        raise UsageError(
            f"--dataset={dataset} could not be read, a file is corrupt: {_record_of(error.message)}."
        ) from error


def _record_of(message: str) -> str:
    """The part of TensorFlow's message that names the corrupt record."""
    found = re.search(r"[\w ]*\b(corrupted|truncated) record[^\n\[]*", message)
    return found[0].strip() if found else one_line(message)


def summary(history: Mapping[str, Sequence[float]], seconds: float) -> str:
    """A one-line summary of a training run: duration, best epoch, and peak memory of this rank.

    Args:
        history: The logs of `fit`: by name, a number for each epoch.
        seconds: Duration of the training.
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
    """Create a callback that measures training items per second, without the first epoch."""
    import keras

    class Speed(keras.callbacks.Callback):
        """Training items per second in the fastest epoch after the first, which builds the graph."""

        items_per_second = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            self._begun, self._ended = time.perf_counter(), None

        def on_test_begin(self, logs=None):
            self._ended = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            speed = num_items / ((self._ended or time.perf_counter()) - self._begun)
            self.items_per_second = speed if epoch < 2 else max(speed, self.items_per_second)

    return Speed()
