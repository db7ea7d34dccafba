"""`tfdist-train`: train a reference model on a dataset, on the ranks that were started.

    tfdist-run -np 2 -- tfdist-train --model=convnet --dataset=digits --epochs=15
    tfdist-run -np 2 -- tfdist-train --model=gpt --tensor=2 --epochs=1
    tfdist-run -np 8 -- tfdist-train --model=gpt --pipeline=2 --tensor=2 --data=2

Images, text and clicks have separate modules; this module has the code that they share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from typing import Any

from tfdist.launch.flags import command, options
from tfdist.launch.flags.checkpoint import CheckpointFlags
from tfdist.launch.flags.local_sgd import LocalFlags
from tfdist.launch.flags.mesh import Layout, MeshOptions
from tfdist.launch.flags.monitor import MonitorFlags
from tfdist.launch.flags.optimizer import OptimizerFlags, counted_for, read_recompute
from tfdist.launch.flags.options import define_flags, names
from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.flags.values import refuse_ignored
from tfdist.launch.plan.automatic import Automatic, machine_file, number_of_ranks
from tfdist.launch.train.curves import check_plot, draw
from tfdist.launch.train.fitting import expected_errors, speed_callback, summary
from tfdist.launch.train.images import Images
from tfdist.launch.train.language import Language
from tfdist.launch.train.recommendation import Recommendation
from tfdist.launch.train.tasks import DEFINE, VALUES, Data, Settings, Task
from tfdist.launch.train.world import World, WorldFlags
from tfdist.runtime.rendezvous import MEANT_RANKS

_TASKS: tuple[Task, ...] = (Images(), Language(), Recommendation())

_MODEL = DEFINE.enum(
    "model", "convnet", [model for task in _TASKS for model in task.models], "Model to train"
)
_DATASET = DEFINE.string(
    "dataset", None, "digits or from TFDS; gpt: pydoc, text:FILE; dlrm: clicks"
)
_BATCH_SIZE = DEFINE.integer(
    "batch_size",
    None,
    "Samples per step on all ranks [128; gpt: 4; dlrm: 256]",
    lower_bound=1,
    upper_bound=1 << 20,
)
_EPOCHS = DEFINE.integer("epochs", None, "Epochs to train [15; gpt: 5; dlrm: 1]", lower_bound=1)
_LEARNING_RATE = DEFINE.float(
    "learning_rate",
    None,
    "Learning rate per rank [0.001; gpt: 0.003; dlrm: 0.002]",
    lower_bound=1e-9,
    upper_bound=1000.0,
)
_SCALING = DEFINE.enum(
    "lr_scaling", "none", ["none", "linear", "sqrt"], "Scaling of the rate with the ranks"
)
_WARMUP = DEFINE.float(
    "warmup_epochs",
    0.0,
    "Epochs to warm up to the scaled rate",
    lower_bound=0.0,
    upper_bound=10_000.0,
)
_RECOMPUTE = DEFINE.string(
    "recompute",
    "none",
    "none, selective, sqrt, every_layer, optimal, or bytes to store: budget:2GiB",
)
_SEED = DEFINE.integer(
    "seed", 0, "Seed of weights and data order", lower_bound=0, upper_bound=2**32 - 1
)
_DATA_DIR = DEFINE.string("data_dir", None, "Folder of the datasets")
_CHECKPOINTS = CheckpointFlags(DEFINE)
_ELASTIC = DEFINE.enum(
    "elastic", "keep", ["keep", "scale"], "Global batch and rate when the number of ranks changes"
)
_THREADS = DEFINE.integer(
    "threads", 0, "Threads per rank; 0: TensorFlow's choice", lower_bound=0, upper_bound=4096
)
_VERBOSE = DEFINE.integer(
    "verbose", 2, "0: silent, 1: progress bar, 2: one line per epoch", lower_bound=0, upper_bound=2
)
_PLOT = DEFINE.string("plot", None, "File for a plot of the learning curves: curves.png")
_MESH = define_flags(MeshOptions, VALUES)
_PLAN = DEFINE.string("plan", None, "auto[:FILE]: choose the mesh; see tfdist-plan calibrate")
_WORLD = WorldFlags(DEFINE, _MESH)
_LOCAL = LocalFlags(DEFINE)
_OPTIMIZER = OptimizerFlags(DEFINE, "adam, and adamw for gpt")
_MONITOR = MonitorFlags(DEFINE)


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


def _check(_: list[str]) -> tuple[Task, Settings, dict[str, Any]]:
    return (
        *_choose_task(),
        _CHECKPOINTS.options(is_tpu=_WORLD.is_tpu, has_servers=_WORLD.has_servers),
    )


def _main(checked: tuple[Task, Settings, dict[str, Any]]) -> None:
    task, settings, saving = checked
    # Imported only after the flags are checked, because the import takes seconds.
    with quiet_start():
        import keras
        import tensorflow as tf

        import tfdist

        tf.config.list_physical_devices()

    # --- Ranks ---------------------------------------------------------------------------------
    if _THREADS.value:
        tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    if _WORLD.deterministic.value:
        tf.config.experimental.enable_op_determinism()
    on = _WORLD.make(settings.layout)
    replicas, batch_size = _replicas_and_batch(task, settings.layout, on)
    settings = dataclasses.replace(
        settings, batch_size=batch_size, whole_batches=on.is_tpu, is_chief=on.is_chief
    )
    if on.is_tpu:
        keras.config.set_dtype_policy("mixed_bfloat16")
    else:
        _OPTIMIZER.set_policy()
    keras.utils.set_random_seed(settings.seed)

    # --- Data: every rank reads the global batches and keeps its own rows -----------------------
    data = task.load(settings)

    # --- Model ---------------------------------------------------------------------------------
    rate = tfdist.learning_rate.ScaledWarmup(
        learning_rate=task.schedule(settings.learning_rate, settings.epochs * data.steps),
        replicas=replicas,
        rule=_SCALING.value,
        warmup_steps=round(_WARMUP.value * data.steps),
    )
    if _PLAN.value is not None and on.is_chief:
        print(_planned(task).words)
    with on.strategy.scope():
        model = _build(task, settings, data, on.data)
        steps = min(on.steps_per_execution, data.steps)
        stepping = {"steps_per_execution": steps}
        with _OPTIMIZER.expected_errors():
            task.compile(model, rate, _make_optimizer, **stepping, **_OPTIMIZER.compile_options)

    if on.is_tpu:
        print(f"{steps} steps per call of Keras; batch callbacks are called once per call.")
    callbacks = [speed := speed_callback(data.items), *task.callbacks()]
    if on.is_tpu or _WORLD.has_servers:
        callbacks.append(keras.callbacks.TerminateOnNaN())
    else:
        callbacks.append(tfdist.callbacks.TerminateOnNonFinite())
    if _WORLD.has_servers:
        callbacks += _CHECKPOINTS.backups()
    else:
        callbacks += [*_CHECKPOINTS.callbacks(saving, batch_size), *_MONITOR.callbacks()]

    begun = time.monotonic()
    # --- Training ------------------------------------------------------------------------------
    with expected_errors(_CHECKPOINTS.workdir, settings.dataset), _OPTIMIZER.expected_errors():
        history = model.fit(
            data.train,
            validation_data=data.validation,
            epochs=settings.epochs,
            callbacks=callbacks,
            verbose=_VERBOSE.value,
            shuffle=False,
        )
    last = {name: values[-1] for name, values in history.history.items()}
    if _OPTIMIZER.averages:
        # `fit` has replaced the weights by their moving average after its last logs.
        after = model.evaluate(data.validation, verbose=0, return_dict=True)
        last |= {f"val_{name}": value for name, value in after.items()}
    shown = task.show(model)
    if on.is_chief:
        cost = None if on.is_tpu else tfdist.addons.slow_links.compression_statistics(model)
        if cost is not None and cost.pays:  # Otherwise `fit` has logged that it does not pay.
            print(cost)
        print(summary(history.history, time.monotonic() - begun))
        if _PLOT.value is not None and history.history:
            title = f"{settings.model} on {settings.dataset}, {on.words}"
            draw(history.history, os.path.expanduser(_PLOT.value), title)
            print(f"Curves: {_PLOT.value}")
        if shown is not None:
            print(f"{settings.model} writes:\n{shown}")
        print(f"{task.verdict(last)}; {speed.items_per_second:,.0f} {task.item}/s on {on.words}.")


def _choose_task() -> tuple[Task, Settings]:
    """The task of `--model`, and the flags that all tasks share; reject flags of other tasks."""
    task = next(task for task in _TASKS if _MODEL.value in task.models)
    for other in _TASKS:
        given = [flag.name for flag in other.flags if other is not task and flag.present]
        if given:
            raise command.UsageError(
                f"--{given[0]} requires --model={'|'.join(other.models)}. "
                f"Received: --model={_MODEL.value}."
            )
    layout = _MESH.read().layout() if _PLAN.value is None else _planned(task).layout
    settings = Settings(
        model=_MODEL.value,
        dataset=_DATASET.value or task.dataset,
        batch_size=_BATCH_SIZE.value or task.batch_size,
        epochs=_EPOCHS.value or task.epochs,
        learning_rate=_LEARNING_RATE.value or task.learning_rate,
        seed=_SEED.value,
        layout=layout,
        data_dir=_DATA_DIR.value,
    )
    if _SCALING.value == "none":
        refuse_ignored(VALUES, (_WARMUP,), "requires --lr_scaling", "--lr_scaling=none")
    _WORLD.check(settings.layout)
    _LOCAL.check(
        settings.model,
        zero_stage=settings.layout.zero_stage,
        is_tpu=_WORLD.is_tpu,
        has_servers=_WORLD.has_servers,
        divides_tables=task.divides_tables,
    )
    _OPTIMIZER.check(is_tpu=_WORLD.is_tpu, has_sync=_LOCAL.is_given)
    read_recompute(_RECOMPUTE.name, _RECOMPUTE.value)
    check_plot(_PLOT.name, _PLOT.value)
    _MONITOR.check(is_in_step=not (_WORLD.is_tpu or _WORLD.has_servers))
    task.check(settings)
    return task, settings


def _make_optimizer(own: str, rate, **arguments):
    """The optimizer of the task or the flags, wrapped for local steps and loss scaling."""
    return _OPTIMIZER.scaled(_LOCAL.around(_OPTIMIZER.make(own, rate, **arguments)))


@functools.cache
def _planned(task: Task) -> Automatic:
    """The layout that `--plan` chooses; reject flags that set it manually."""
    given = f"--plan={_PLAN.value}"
    why = "cannot be combined with --plan, which chooses it"
    options.refuse_ignored(_MESH.read(), names(MeshOptions), why, given)
    refuse_ignored(VALUES, (_RECOMPUTE,), why, given)
    machine_file(_PLAN.value)
    if not isinstance(task, Language):
        raise command.UsageError(
            f"--plan requires --model=gpt. Received: {given} --model={_MODEL.value}."
        )
    if _WORLD.is_tpu or _WORLD.has_servers:
        raise command.UsageError(
            "--plan is not supported on a TPU or with parameter servers. Received: "
            f"{given} with one of them."
        )
    ranks = number_of_ranks()
    batch = (_BATCH_SIZE.value or task.batch_size) * _OPTIMIZER.accumulation
    limits = _OPTIMIZER.planned("AdamW")
    limits |= _WORLD.planned(limits["dtype"])
    if _LOCAL.is_given:
        limits["zero_stages"] = (0,)
    return task.planned(_PLAN.value, batch, ranks, limits)


def _replicas_and_batch(task: Task, layout: Layout, on: World) -> tuple[int, int]:
    """The replicas that the learning rate is scaled for, and the global batch.

    An elastic job may run on more or fewer ranks than requested by `tfdist-run -np`.
    """
    data = on.data
    meant = int(os.environ.get(MEANT_RANKS, on.size)) * data // on.size
    if on.is_tpu:
        batch_size = _BATCH_SIZE.value or -(-task.batch_size // data) * data
        if batch_size % data:
            raise command.UsageError(
                f"--batch_size must be a multiple of the {data} cores of the TPU. Received: "
                f"--batch_size={batch_size}."
            )
        return data, batch_size
    if _WORLD.has_servers:
        return 1, layout.batch_size(_BATCH_SIZE.value, task.batch_size, 1)
    if _ELASTIC.value == "keep":
        return meant, layout.batch_size(_BATCH_SIZE.value, task.batch_size, data)
    batch_size = layout.batch_size(_BATCH_SIZE.value, task.batch_size, meant)
    if batch_size * data % meant:
        raise command.UsageError(
            f"--batch_size must be a multiple of the requested data axis of {meant} with --elastic=scale. "
            f"Received: --batch_size={batch_size}."
        )
    return data, batch_size * data // meant


def _build(task: Task, settings: Settings, data: Data, replicas: int):
    """Build the model, with recompute and a pipeline if requested."""
    from tfdist.pipeline import PipelineModel, deferred_weights
    from tfdist.recompute import recompute

    layout = settings.layout
    with deferred_weights() if layout.pipeline > 1 else contextlib.nullcontext():
        model = task.build(settings)
    policy = _RECOMPUTE.value if _PLAN.value is None else _planned(task).recompute
    if arguments := read_recompute(_RECOMPUTE.name, policy):
        rows = -(-settings.batch_size // (replicas * layout.num_microbatches))
        shape = data.train.element_spec[0].shape[1:]
        try:
            recompute(model, **counted_for(arguments, rows, shape))
        except ValueError as error:
            raise command.UsageError(f"--recompute={policy} is not supported: {error}") from error
    if layout.pipeline == 1:
        return model
    try:
        model = PipelineModel(
            model,
            num_microbatches=layout.num_microbatches,
            schedule=layout.schedule,
            chunks=layout.chunks,
            cut=layout.cut,
            input_shape=data.train.element_spec[0].shape[1:],
        )
    except ValueError as error:
        raise command.UsageError(
            f"--pipeline={layout.pipeline} is not supported: {error}"
        ) from error
    if model.distribute_strategy.is_chief:
        print(model.partition.table())
    return model


PROGRAM = command.Program(
    _main,
    VALUES,
    usage="tfdist-train [flags]",
    summary="Trains a reference model on the ranks that tfdist-run or horovodrun starts.",
    check=_check,
    folded={
        "for gpt": [flag.name for flag in Language.flags],
        "for the training": [
            flag.name
            for flag in (
                _SEED,
                _WORLD.deterministic,
                _SCALING,
                _WARMUP,
                _WORLD.steps_per_execution,
                _VERBOSE,
                *_OPTIMIZER.every,
                _RECOMPUTE,
            )
        ],
        "for files, links, reports": [
            *("data_dir", "plot", "save_every", "keep", "elastic", "zero_stage"),
            *(
                flag.name
                for flag in (
                    _WORLD.communication_dtype,
                    _WORLD.compression,
                    *_LOCAL.every,
                    *_MONITOR.every,
                )
            ),
        ],
        "for the ranks": [
            "plan",
            *names(MeshOptions, without=["zero_stage"]),
            *(flag.name for flag in (_THREADS, *_WORLD.of_ranks)),
        ],
    },
)


if __name__ == "__main__":
    run()
