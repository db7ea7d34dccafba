"""Keeps the best model."""

from __future__ import annotations

import keras

from tfdist.utils import checks

__all__ = ["BestModelCheckpoint"]


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` that keeps only the best model.

    Horovod's estimators set the path later; here it is an argument. Under a tfdist strategy it goes into
    the list of callbacks on every rank, and only the chief writes.

    Args:
        filepath: The path of the file, which ends in `.keras`, or in `.weights.h5` with
            `save_weights_only`.
        monitor: The name of the log by which models are compared.
        verbose: 1 prints a line at each save.
        save_weights_only: Whether to leave out the architecture and the optimizer.
        mode: "min", "max", or "auto" to guess from the name of the log.
        save_freq: "epoch", or a number of batches.
        initial_value_threshold: The value that the first saved model must improve on, or None.

    Raises:
        ValueError: As for `keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        filepath,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ):
        filepath = checks.path("filepath", filepath)
        checks.boolean("save_weights_only", save_weights_only)
        ending = ".weights.h5" if save_weights_only else ".keras"
        if not filepath.endswith(ending):
            raise checks.refuse("filepath", filepath, f"a path that ends in {ending!r}")
        checks.text("monitor", monitor)
        checks.integer("verbose", verbose, minimum=0, maximum=2)
        checks.one_of("mode", mode, ("auto", "min", "max"))
        if save_freq != "epoch":
            checks.integer("save_freq", save_freq, minimum=1, also="'epoch'")
        checks.number("initial_value_threshold", initial_value_threshold, optional=True)
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )
