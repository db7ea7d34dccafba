"""tfdist, with a model of KerasHub and its adapters, on any mesh and engine."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfdist
from tfdist import layers
from tfdist.backend.keras.functional import initialize_weights
from tfdist.pipeline import deferred_weights
from tfdist.sharding.layout import global_shape

from .hub_models import compile_task, make_task, training_of
from .serving import Settings, Training
from .tfdist_ranks import STRATEGIES


def prepare(settings: Settings) -> Training:
    """Builds this rank's part of the model, which never stands whole, as `load_preset` does."""
    options, sizes = settings.options, settings.sizes
    engine = options["engine"]
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    # Collectives of TensorFlow wait in a thread; direct messages do not.
    tf.config.threading.set_inter_op_parallelism_threads(2 if engine == "tensorflow" else 1)
    mesh = tfdist.Mesh(**options["mesh"])
    keras.utils.set_random_seed(0)
    strategy = STRATEGIES[engine](mesh, zero_stage=options["zero_stage"])
    with strategy.scope():
        with deferred_weights():
            task = make_task(sizes)
        if strategy.group(*mesh.weight_axes).size > 1:
            tfdist.parallelize(task)
        initialize_weights(task.variables)
        task.backbone.enable_lora(sizes["rank"])
        compile_task(task, layers.VocabParallelCrossEntropy(sizes["vocabulary"]))
    return training_of(task, settings, global_shape)
