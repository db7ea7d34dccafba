"""Checks and preparation of a model before its steps run on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.private import all_layers
from tfdist.sharding.layout import parameter_bytes
from tfdist.step.context import role_of, strategy_of
from tfdist.step.local_steps import all_optimizers


def strategy_of_ranks(model) -> Any:
    """The model's strategy, if it is one of tfdist with several ranks; otherwise None.

    Raises:
        ValueError: Ranks hold parts of sequences, and a layer of the model may mix tokens.
    """
    strategy: Any = strategy_of(model)
    if strategy is None or strategy.mesh.size == 1:
        return None
    if strategy.token_group.size > 1:
        from tfdist.data.tokens import check_tokenwise

        # All ranks of a pipeline must raise, also if only one of them holds the layer.
        whole = role_of(model).whole_model or model
        check_tokenwise(whole, all_layers(whole))
    return strategy


def adopt_optimizers(model, strategy) -> None:
    """Lets optimizers that were created outside the scope create their variables inside.

    An optimizer stores the strategy in whose scope it was created. The scope makes no other difference here.
    """
    for optimizer in all_optimizers(model):
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer._distribution_strategy = strategy


@contextlib.contextmanager
def out_of_memory(model) -> Iterator[None]:
    """Adds a note on the use of memory, and how to reduce it, to an out-of-memory error."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        error.add_note(_out_of_memory(model))
        raise


def _out_of_memory(model) -> str:
    """The note for an out-of-memory error."""
    parameters, strategy = parameter_bytes(model), strategy_of(model)
    ranks = 1 if strategy is None else strategy.gradient_group.size
    stage = 0 if strategy is None else strategy.zero_stage
    return (
        f"Out of memory: the parameters use {parameters / 2**20:,.0f} MiB, their gradients the same, and "
        "so does each moment of the optimizer. `zero_stage=3` of the strategy shards all three over the "
        f"{ranks} data parallel ranks (now zero_stage={stage}); `tfdist.recompute.recompute` and smaller "
        "batches reduce the memory of activations. Details: "
        "`tfdist.addons.monitoring.memory_report(model)`."
    )
