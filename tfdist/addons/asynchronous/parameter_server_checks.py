"""What `ParameterServerStrategy` refuses: models, and arguments that contradict each other."""

from __future__ import annotations

import keras


def check_model(model: keras.Model, num_servers: int, *, speculative: bool) -> None:
    """Checks that servers can train a model.

    Args:
        model: The model, compiled.
        num_servers: How many servers there are.
        speculative: Whether backups redo batches.

    Raises:
        ValueError: It is compiled for XLA.
        NotImplementedError: Its optimizer does not go with servers, or it makes several steps at once.
    """
    if model.jit_compile:
        raise ValueError(
            "XLA cannot compile calls of parameter servers. Received: compile(jit_compile=True). "
            "Leave `jit_compile` out, or set it to False."
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise NotImplementedError(
            "Parameter servers do not agree on a loss scale. Received: the dtype policy "
            "mixed_float16. Take mixed_bfloat16, which needs none."
        )
    if speculative and model.steps_per_execution > 1:
        raise NotImplementedError(
            "A backup looks after each step what to redo. Received: speculative=True, and "
            f"steps_per_execution={model.steps_per_execution}. Leave `steps_per_execution` out."
        )
    if num_servers == 1:
        return
    optimizer = model.optimizer
    accumulates = optimizer.gradient_accumulation_steps
    if optimizer.use_ema or (optimizer.global_clipnorm and accumulates):
        raise NotImplementedError(
            "An optimizer that looks at all parameters at once takes one server. Received: "
            f"{num_servers} servers, use_ema={optimizer.use_ema}, global_clipnorm="
            f"{optimizer.global_clipnorm}, gradient_accumulation_steps={accumulates}. Take one "
            "server, or leave out use_ema, and global_clipnorm with gradient_accumulation_steps."
        )


def check_backup(
    backup_ranks: int | None,
    speculative: bool,
    workers: int,
    max_staleness: int | None,
    compensation: float,
) -> None:
    """Checks the arguments of backup ranks: those of the strategy, and how many workers there are.

    Raises:
        ValueError: They contradict each other.
    """
    if speculative and not backup_ranks:
        raise ValueError(
            "With `speculative` the last `backup_ranks` workers redo batches of the others: it takes "
            f"`backup_ranks` of 1 or more. Received: speculative=True, backup_ranks={backup_ranks}."
        )
    if backup_ranks is None:
        return
    if backup_ranks >= workers:
        raise ValueError(
            "Of W workers a step takes W - `backup_ranks` gradients, and at least one. Received: "
            f"backup_ranks={backup_ranks}, {workers} worker(s)."
        )
    if max_staleness is not None or compensation:
        raise ValueError(
            "With `backup_ranks` no update is stale: leave out `max_staleness` and "
            f"`delay_compensation`. Received: backup_ranks={backup_ranks}, "
            f"max_staleness={max_staleness}, delay_compensation={compensation}."
        )
