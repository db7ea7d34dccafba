"""`tfdist-train`: train a reference model on a dataset, on the ranks that were started.

    tfdist-run -np 2 -- tfdist-train --model=convnet --dataset=digits --epochs=15
    tfdist-run -np 2 -- tfdist-train --model=gpt --tensor=2 --epochs=1
    tfdist-run -np 8 -- tfdist-train --model=gpt --pipeline=2 --tensor=2 --data=2

Images, text and clicks have separate modules; this module has the code that they share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time

from tfdist.launch.flags import command
from tfdist.launch.flags.local_sgd import LocalSGDOptions
from tfdist.launch.flags.mesh import MeshOptions
from tfdist.launch.flags.monitor import MonitorOptions
from tfdist.launch.flags.optimizer import OptimizerOptions
from tfdist.launch.flags.options import define_flags, names
from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.train import language
from tfdist.launch.train.curves import draw
from tfdist.launch.train.fitting import (
    add_recompute,
    expected_errors,
    pipelined,
    speed_callback,
    summary,
)
from tfdist.launch.train.options import TrainOptions
from tfdist.launch.train.tasks import Data, Settings, Task
from tfdist.launch.train.world import OF_RANKS

_FLAGS = define_flags(TrainOptions)


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


def _check(_: list[str]) -> tuple[TrainOptions, Task, Settings]:
    options = _FLAGS.read()
    return options, *options.check()


def _main(checked: tuple[TrainOptions, Task, Settings]) -> None:
    given, task, settings = checked
    # Imported only after the flags are checked, because the import takes seconds.
    with quiet_start():
        import keras
        import tensorflow as tf

        import tfdist

        tf.config.list_physical_devices()

    # --- Ranks ---------------------------------------------------------------------------------
    if given.threads:
        tf.config.threading.set_intra_op_parallelism_threads(given.threads)
    if given.world.deterministic:
        tf.config.experimental.enable_op_determinism()
    on = given.world.make(settings.layout, given.mesh)
    replicas, batch_size = given.replicas_and_batch(task.batch_size, settings.layout, on)
    settings = dataclasses.replace(
        settings, batch_size=batch_size, whole_batches=on.is_tpu, is_chief=on.is_chief
    )
    if on.is_tpu:
        keras.config.set_dtype_policy("mixed_bfloat16")
    else:
        given.optimizer.set_policy()
    keras.utils.set_random_seed(settings.seed)

    # --- Data: every rank reads the global batches and keeps its own rows -----------------------
    data = task.load(settings)

    # --- Model ---------------------------------------------------------------------------------
    rate = tfdist.learning_rate.ScaledWarmup(
        learning_rate=task.schedule(settings.learning_rate, settings.epochs * data.steps),
        replicas=replicas,
        rule=given.lr_scaling,
        warmup_steps=round(given.warmup_epochs * data.steps),
    )
    if given.plan is not None and on.is_chief:
        print(given.planned.words)
    with on.strategy.scope():
        model = _build(given, task, settings, data, on.data)
        steps = min(on.steps_per_execution, data.steps)
        with given.optimizer.expected_errors():
            task.compile(
                model,
                rate,
                given.make_optimizer,
                steps_per_execution=steps,
                **given.optimizer.compile_options,
            )

    if on.is_tpu:
        print(f"{steps} steps per call of Keras; batch callbacks are called once per call.")
    callbacks = [speed := speed_callback(data.items), *task.callbacks()]
    if on.is_tpu or given.world.has_servers:
        callbacks.append(keras.callbacks.TerminateOnNaN())
    else:
        callbacks.append(tfdist.callbacks.TerminateOnNonFinite())
    if given.world.has_servers:
        callbacks += given.checkpoints.backups()
    else:
        callbacks += [*given.checkpoints.callbacks(batch_size), *given.monitor.callbacks()]

    begun = time.monotonic()
    # --- Training ------------------------------------------------------------------------------
    with (
        expected_errors(given.checkpoints.workdir, settings.dataset),
        given.optimizer.expected_errors(),
    ):
        history = model.fit(
            data.train,
            validation_data=data.validation,
            epochs=settings.epochs,
            callbacks=callbacks,
            verbose=given.verbose,
            shuffle=False,
        )
    last = {name: values[-1] for name, values in history.history.items()}
    if given.optimizer.averages:
        # `fit` has replaced the weights by their moving average after its last logs.
        after = model.evaluate(data.validation, verbose=0, return_dict=True)
        last |= {f"val_{name}": value for name, value in after.items()}
    shown = task.show(model)
    if on.is_chief:
        cost = None if on.is_tpu else tfdist.addons.slow_links.compression_statistics(model)
        if cost is not None and cost.pays:  # Otherwise `fit` has logged that it does not pay.
            print(cost)
        print(summary(history.history, time.monotonic() - begun))
        if given.plot is not None and history.history:
            title = f"{settings.model} on {settings.dataset}, {on.words}"
            draw(history.history, os.path.expanduser(given.plot), title)
            print(f"Curves: {given.plot}")
        if shown is not None:
            print(f"{settings.model} writes:\n{shown}")
        print(f"{task.verdict(last)}; {speed.items_per_second:,.0f} {task.item}/s on {on.words}.")


def _build(given: TrainOptions, task: Task, settings: Settings, data: Data, replicas: int):
    """Build the model, with recompute and a pipeline if requested."""
    from tfdist.pipeline import deferred_weights

    layout = settings.layout
    with deferred_weights() if layout.pipeline > 1 else contextlib.nullcontext():
        model = task.build(settings)
    policy = given.recompute if given.plan is None else given.planned.recompute
    if policy == "none" and layout.pipeline == 1:
        return model
    # Only models with one input support either.
    rows = -(-settings.batch_size // (replicas * layout.num_microbatches))
    shape = data.train.element_spec[0].shape[1:]
    add_recompute(model, policy, rows, shape)
    return pipelined(model, layout, shape)


PROGRAM = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-train [flags]",
    summary="Trains a reference model on the ranks that tfdist-run or horovodrun starts.",
    check=_check,
    folded={
        "for gpt": language.NAMES,
        "for the training": [
            *("seed", "deterministic", "lr_scaling", "warmup_epochs", "steps_per_execution"),
            *("verbose", *names(OptimizerOptions), "recompute"),
        ],
        "for files, links, reports": [
            *("data_dir", "plot", "save_every", "keep", "elastic", "zero_stage"),
            *("communication_dtype", "compression"),
            *names(LocalSGDOptions),
            *names(MonitorOptions),
        ],
        "for the ranks": [
            "plan",
            *names(MeshOptions, without=["zero_stage"]),
            "threads",
            *OF_RANKS,
        ],
    },
)


if __name__ == "__main__":
    run()
