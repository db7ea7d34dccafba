"""`auto`: the strategy that fits how this process was started."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

import tensorflow as tf
from absl import logging

from tfdist.mesh import Mesh
from tfdist.runtime.horovod_variables import started_by_horovod
from tfdist.runtime.plugins import load_plugins
from tfdist.runtime.tf_config import read_tf_config, started_by_tf_config
from tfdist.strategies.parallel import check_options
from tfdist.strategies.registry import registered
from tfdist.utils.lazy import require_addon


def auto(mesh: Mesh | None = None, **options) -> tf.distribute.Strategy:
    """Returns the strategy of the launcher that started this process; the log says which, and why.

    First those that packages have registered (`tfdist.extend.register_strategy`), among them
    `tfdist.addons.asynchronous.ParameterServerStrategy` where TF_CONFIG names parameter servers, as
    `tfdist-run --ps=` has it.

    Horovod's where its launcher started the process, else the workers' of TF_CONFIG; of ranks that
    mpirun or srun started Horovod's where it is installed, else the workers'; else the local one.

    Args:
        mesh: How the ranks are laid out; all on the data axis by default.
        **options: Those of `ParallelStrategy`.

    Raises:
        ValueError: Horovod's variables and TF_CONFIG speak of different worlds, the mesh does not fill
            the world, or a strategy cannot do what the options ask for.
        ImportError: TF_CONFIG names parameter servers, and tfdist.addons.asynchronous is not installed.
        TypeError: An option is unknown, or an engine was given.
    """
    if "engine" in options:
        raise TypeError(
            "auto takes the engine of the launcher, and no engine= of its own. Start the ranks by "
            "`tfdist-run --engine=tensorflow` (or `horovod`), or make a HorovodStrategy or a "
            f"MultiWorkerStrategy. Received: engine={options['engine']!r}."
        )
    load_plugins()
    config = read_tf_config()
    if config is not None and config.servers:
        require_addon("asynchronous", "A TF_CONFIG that names parameter servers")
    for each in registered():
        if each.detect():
            logging.info("tfdist: %s, which has detected this launch.", each.name)
            return each.make(mesh, **options)
    check_options(mesh, None, **options)
    horovod, workers = started_by_horovod(), started_by_tf_config()
    if horovod and workers and horovod != workers:
        raise ValueError(
            "Two launchers contradict each other: Horovod's variables say rank "
            f"{horovod[0]} of {horovod[1]}, TF_CONFIG says rank {workers[0]} of {workers[1]}. "
            "Unset TF_CONFIG to use Horovod, or start the process without horovodrun or mpirun."
        )
    if horovod:
        logging.info(
            "tfdist: HorovodStrategy, for a launcher of Horovod set rank %d of %d.", *horovod
        )
        return _kind("HorovodStrategy")(mesh, **options)
    if workers:
        logging.info("tfdist: MultiWorkerStrategy, for TF_CONFIG says rank %d of %d.", *workers)
        return _kind("MultiWorkerStrategy")(mesh, **options)
    from tfdist.runtime.schedulers import started_by_scheduler

    scheduled = started_by_scheduler()
    if scheduled:
        has_horovod = importlib.util.find_spec("horovod") is not None
        kind = "HorovodStrategy" if has_horovod else "MultiWorkerStrategy"
        logging.info(
            "tfdist: %s, for %s started rank %d of %d.",
            kind,
            scheduled.launcher,
            scheduled.rank,
            scheduled.size,
        )
        return _kind(kind)(mesh, **options)
    logging.info("tfdist: LocalStrategy, for no launcher has set its variables.")
    _notice_idle_gpus()
    return _kind("LocalStrategy")(mesh, **options)


def _kind(name: str) -> type[tf.distribute.Strategy]:
    """The class of a strategy, whose engine is imported with it."""
    return getattr(importlib.import_module("tfdist.strategies"), name)


def _notice_idle_gpus() -> None:
    """Says how all GPUs of this host are put to work, where one process would leave some idle."""
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) > 1:
        script = os.path.basename(sys.argv[0] or "")
        logging.warning(
            "tfdist: this process computes on 1 of %d GPUs; `tfdist-run -np auto -- python %s` starts a "
            "rank on each.",
            len(gpus),
            script if script.endswith(".py") else "train.py",
        )
