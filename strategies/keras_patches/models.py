"""What is asked of a model before its steps run on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.private import all_layers
from tfdist.sharding.layout import parameter_bytes
from tfdist.step.context import role_of, strategy_of


def strategy_of_ranks(model) -> Any:
    """The model's strategy, if it is tfdist's and there are other ranks.

    Raises:
        ValueError: The ranks hold parts of sequences, and a layer of the model may mix tokens.
    """
    strategy: Any = strategy_of(model)
    if strategy is None or strategy.mesh.size == 1:
        return None
    if strategy.token_group.size > 1:
        from tfdist.data.tokens import check_tokenwise

        # A rank of a pipeline holds some of the layers, and refuses as the others do.
        whole = role_of(model).whole_model or model
        check_tokenwise(whole, all_layers(whole))
    return strategy


def refuse_xla(model, strategy) -> None:
    """Raises ValueError where XLA is to compile steps."""
    if model.jit_compile:
        raise ValueError(
            "XLA cannot compile collectives of "
            f"the {strategy.engine.name} engine. Received: compile(jit_compile=True) on "
            f"{strategy.mesh.size} ranks. Leave `jit_compile` out, or set it to False."
        )


def adopt_optimizers(model, strategy) -> None:
    """Lets optimizers that were made outside of the scope make their variables inside.

    An optimizer notes the strategy that it was made under. One process has one set of variables
    here, so there is nothing that a scope would have changed.
    """
    for value in (model.optimizer, *vars(model).values()):
        while isinstance(value, keras.optimizers.Optimizer):
            value._distribution_strategy = strategy
            value = getattr(value, "inner_optimizer", None)


@contextlib.contextmanager
def out_of_memory(model) -> Iterator[None]:
    """Inside, an error for want of memory gets a note on what takes it, and what helps."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        error.add_note(_out_of_memory(model))
        raise


def _out_of_memory(model) -> str:
    """What a user can do about it."""
    parameters = parameter_bytes(model)
    strategy = strategy_of(model)
    ranks = 1 if strategy is None else strategy.gradient_group.size
    stage = 0 if strategy is None else strategy.zero_stage
    return (
        f"Out of memory: the parameters take {parameters / 2**20:,.0f} MiB, their gradients as much "
        "again, and so does each moment that the optimizer keeps. `zero_stage=3` of the strategy "
        f"gives each of the {ranks} data parallel ranks a part of all three (now "
        f"zero_stage={stage}); `tfdist.recompute.recompute` and smaller batches take fewer bytes of "
        "activations. `tfdist.addons.monitoring.memory_report(model)` has the figures."
    )
