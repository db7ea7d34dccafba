"""Checks of `ParameterServerStrategy`: unsupported models, and contradictory arguments."""

from __future__ import annotations

import keras


def check_model(model: keras.Model, num_servers: int, *, speculative: bool) -> None:
    """Checks that a model can be trained with parameter servers.

    Args:
        model: The model, compiled.
        num_servers: The number of servers.
        speculative: Whether backups redo batches.

    Raises:
        ValueError: The model is compiled for XLA.
        NotImplementedError: Its optimizer or its `steps_per_execution` is not supported with servers.
    """
    if model.jit_compile:
        raise ValueError(
            "XLA cannot compile calls of parameter servers. Received: compile(jit_compile=True). "
            "Remove `jit_compile`, or set it to False."
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise NotImplementedError(
            "Parameter servers do not support loss scaling. Received: the dtype policy "
            "mixed_float16. Use mixed_bfloat16, which does not need it."
        )
    if speculative and model.steps_per_execution > 1:
        raise NotImplementedError(
            "speculative=True requires steps_per_execution=1. Received: speculative=True, and "
            f"steps_per_execution={model.steps_per_execution}. Remove `steps_per_execution`."
        )
    if num_servers == 1:
        return
    optimizer = model.optimizer
    accumulates = optimizer.gradient_accumulation_steps
    if optimizer.use_ema or (optimizer.global_clipnorm and accumulates):
        raise NotImplementedError(
            "An optimizer that uses all parameters at once requires a single server. Received: "
            f"{num_servers} servers, use_ema={optimizer.use_ema}, global_clipnorm="
            f"{optimizer.global_clipnorm}, gradient_accumulation_steps={accumulates}. Use one "
            "server, or remove use_ema, and global_clipnorm with gradient_accumulation_steps."
        )


def check_backup(
    backup_ranks: int | None,
    speculative: bool,
    workers: int,
    max_staleness: int | None,
    compensation: float,
) -> None:
    """Checks the arguments of backup ranks against each other and against the number of workers.

    Raises:
        ValueError: The arguments contradict each other.
    """
    if speculative and not backup_ranks:
        raise ValueError(
            "speculative=True requires `backup_ranks` of 1 or more: the last `backup_ranks` workers redo "
            f"batches of the others. Received: speculative=True, backup_ranks={backup_ranks}."
        )
    if backup_ranks is None:
        return
    if backup_ranks >= workers:
        raise ValueError(
            "`backup_ranks` must be smaller than the number of workers. Received: "
            f"backup_ranks={backup_ranks}, {workers} worker(s)."
        )
    if max_staleness is not None or compensation:
        raise ValueError(
            "`backup_ranks` cannot be combined with `max_staleness` or `delay_compensation`: no "
            f"update is stale. Received: backup_ranks={backup_ranks}, "
            f"max_staleness={max_staleness}, delay_compensation={compensation}."
        )
