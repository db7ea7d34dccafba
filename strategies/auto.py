"""`auto`: the strategy for the launcher that started this process."""

from __future__ import annotations

import importlib
import importlib.util

import tensorflow as tf
from absl import logging

from tfdist.mesh import Mesh
from tfdist.runtime.horovod_variables import has_nccl, started_by_horovod
from tfdist.runtime.plugins import load_plugins
from tfdist.runtime.tf_config import read_tf_config, started_by_tf_config
from tfdist.strategies.options import checked_options
from tfdist.strategies.parallel import script_name
from tfdist.strategies.registry import registered
from tfdist.utils.lazy import require_addon


def auto(mesh: Mesh | None = None, **options) -> tf.distribute.Strategy:
    """Returns the strategy for the launcher that started this process; the log states which, and why.

    Strategies that packages have registered (`tfdist.extend.register_strategy`) come first, among them
    `tfdist.addons.asynchronous.ParameterServerStrategy` if TF_CONFIG contains parameter servers, as after
    `tfdist-run --ps=`.

    Then: `HorovodStrategy` if Horovod's launcher started the process; `MultiWorkerStrategy` for a TF_CONFIG;
    for ranks that mpirun or srun started, `HorovodStrategy` if Horovod is installed (on GPUs: with NCCL),
    otherwise `MultiWorkerStrategy`; otherwise `LocalStrategy`.

    Args:
        mesh: The mesh of the ranks; all ranks are on the data axis by default.
        **options: Those of `StrategyOptions`.

    Raises:
        ValueError: Horovod's variables and TF_CONFIG contradict each other, the mesh does not match the
            number of ranks, or the strategy does not support an option.
        ImportError: TF_CONFIG contains parameter servers, and tfdist.addons.asynchronous is not installed.
        TypeError: An option is unknown, or an engine was passed.
    """
    if "engine" in options:
        raise TypeError(
            "auto does not accept engine=: the launcher determines the engine. Received: "
            f"engine={options['engine']!r}. Start the ranks with `tfdist-run --engine=tensorflow` (or "
            "`horovod`), or create a HorovodStrategy or a MultiWorkerStrategy."
        )
    load_plugins()
    config = read_tf_config()
    if config is not None and config.servers:
        require_addon("asynchronous", "A TF_CONFIG with parameter servers")
    for each in registered():
        if each.detect():
            logging.info("tfdist: %s, which has detected this launch.", each.name)
            return each.make(mesh, **options)
    checked_options(mesh, None, options)
    kind, reason = _detected()
    logging.info("tfdist: %s, because %s.", kind, reason)
    if kind == "LocalStrategy":
        _warn_of_idle_gpus()
    # The engine of a strategy is imported with its class.
    return getattr(importlib.import_module("tfdist.strategies"), kind)(mesh, **options)


def _detected() -> tuple[str, str]:
    """The name of the strategy for this launch, and the reason for it."""
    horovod, workers = started_by_horovod(), started_by_tf_config()
    if horovod and workers and horovod != workers:
        raise ValueError(
            "Horovod's variables and TF_CONFIG must not contradict each other. Received: rank "
            f"{horovod[0]} of {horovod[1]} from Horovod, rank {workers[0]} of {workers[1]} from TF_CONFIG. "
            "Unset TF_CONFIG to use Horovod, or start the process without horovodrun or mpirun."
        )
    if horovod:
        return "HorovodStrategy", "a launcher of Horovod set rank {} of {}".format(*horovod)
    if workers:
        return "MultiWorkerStrategy", "TF_CONFIG contains rank {} of {}".format(*workers)
    from tfdist.runtime.schedulers import started_by_scheduler

    found = started_by_scheduler()
    if found is None:
        return "LocalStrategy", "no launcher has set its variables"
    has_horovod = importlib.util.find_spec("horovod") is not None
    if has_horovod and tf.config.list_physical_devices("GPU"):
        has_horovod = has_nccl()
    kind = "HorovodStrategy" if has_horovod else "MultiWorkerStrategy"
    return kind, f"{found.launcher} started rank {found.rank} of {found.size}"


def _warn_of_idle_gpus() -> None:
    """Logs how to use all GPUs of this host, if one process would leave some idle."""
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) > 1:
        logging.warning(
            "tfdist: this process computes on 1 of %d GPUs; `tfdist-run -np auto -- python %s` starts a "
            "rank on each.",
            len(gpus),
            script_name(),
        )
