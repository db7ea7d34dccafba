"""Whether the ranks still hold the same: a checksum of all that is replicated."""

from __future__ import annotations

import collections
import zlib

import keras
import numpy as np

from tfdist import checks
from tfdist.collectives.objects import all_gather_object
from tfdist.context import strategy_of
from tfdist.errors import TfdistError
from tfdist.layers.states import layer_states
from tfdist.local_steps import local_optimizer
from tfdist.monitoring.report import rank_words
from tfdist.sharding.layout import layout_of, replicated_variables

__all__ = ["ModelSyncError", "VerifyModelSync", "verify_model_sync"]


class ModelSyncError(TfdistError, RuntimeError):
    """A replicated variable differs between ranks."""


def verify_model_sync(model: keras.Model) -> None:
    """Compares the replicated variables of a model and its optimizer over ranks; all call it.

    Whole variables are the same on all ranks of the data and the tensor axis, slices of split ones
    along the data axis. ZeRO's shards are no two ranks' alike and are left out, as are the moving
    averages that layers keep of their own rank's batches. Under an optimizer of `tfdist.optimizers`
    the parameters of the last sync and the outer optimizer's state are compared; right after a sync the
    ranks' own parameters, too.

    Args:
        model: A built model, under a strategy of tfdist.

    Raises:
        ModelSyncError: Names the variables, and the ranks that hold others than most do; on all
            ranks.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    strategy = strategy_of(model)
    if strategy is None or strategy.mesh.size == 1:
        return
    own: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    local = {id(variable) for variable in layer_states(model)}
    apart = local_optimizer(model)
    compared = replicated_variables(model)
    if apart is not None and not apart.is_apart:
        trained = [variable for variable, _ in apart.global_variables]
        mesh = strategy.mesh
        compared += [
            (variable, layout_of(variable).replicated_axes(mesh, after_sync=True))
            for variable in trained
        ]
    for variable, axes in compared:
        if id(variable) in local:
            continue
        data = np.ascontiguousarray(variable.numpy())
        ranks = tuple(strategy.group(*axes).ranks)
        own.setdefault(ranks, []).append(
            (variable.path, zlib.crc32(data.view(np.uint8).ravel().data))
        )
    found = all_gather_object(own, strategy.group(), name="model-sync")
    said = []
    for ranks in sorted({group for each in found for group in each if len(group) > 1}):
        sums = [found[rank][ranks] for rank in ranks]
        for of_variable in zip(*sums, strict=True):
            counted = collections.Counter(checksum for _, checksum in of_variable)
            if len(counted) > 1:
                said.append(_difference(of_variable[0][0], ranks, of_variable, counted))
    if said:
        more = f" and {len(said) - 5} more" if len(said) > 5 else ""
        raise ModelSyncError(f"Ranks have come apart: {'; '.join(said[:5])}{more}.")


def _difference(name: str, ranks, sums, counted: collections.Counter) -> str:
    (most, number), *_ = counted.most_common(1)
    if 2 * number <= len(ranks):
        return f"`{name}` differs between {rank_words(ranks)}"
    others = [rank for rank, (_, checksum) in zip(ranks, sums, strict=True) if checksum != most]
    return f"`{name}` is another on {rank_words(others)}"


class VerifyModelSync(keras.callbacks.Callback):
    """Calls `verify_model_sync` every so many training steps.

    Args:
        every_steps: How many. Reading and comparing takes about a second for each gigabyte.
    """

    # What it does, it does at the beginning of a step.
    async_safe = True

    def __init__(self, every_steps: int = 100):
        super().__init__()
        self._every_steps = checks.integer("every_steps", every_steps, minimum=1)
        self._begun = 0

    def on_train_batch_begin(self, batch, logs=None):
        """Compares, where it is time."""
        if self._begun and self._begun % self._every_steps == 0:
            verify_model_sync(self.model)
        self._begun += 1

    def on_train_end(self, logs=None):
        """Compares once more."""
        verify_model_sync(self.model)
