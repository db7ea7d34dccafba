"""tfdist, with a model of KerasHub and its adapters, on any mesh and engine."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

import tfdist
from tfdist import layers
from tfdist.addons.hub.chat.data import chat_batches
from tfdist.addons.hub.chat.rows import Row
from tfdist.addons.hub.documents import separate_documents
from tfdist.backend.keras.functional import initialize_weights
from tfdist.pipeline import deferred_weights
from tfdist.sharding.layout import global_shape

from .hub_models import compile_task, make_task, training_of
from .serving import Settings, Training, conversations
from .tfdist_ranks import STRATEGIES


def prepare(settings: Settings) -> Training:
    """Builds this rank's part of the model, which never stands whole, as `load_preset` does."""
    options, sizes = settings.options, settings.sizes
    engine = options["engine"]
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    # Collectives of TensorFlow wait in a thread; direct messages do not. In one process with two threads,
    # small operations run beside large ones.
    waits = engine in ("tensorflow", "local")
    tf.config.threading.set_inter_op_parallelism_threads(2 if waits else 1)
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
        found = None
        model, reduction = task, "sum_over_batch_size"
        if options["measure"] == "conversations":
            found, model, reduction = _packed(sizes), separate_documents(task), "sum"
        compile_task(model, layers.VocabParallelCrossEntropy(sizes["vocabulary"], reduction))
    return training_of(model, settings, global_shape, found)


def _packed(sizes: Mapping[str, int]):
    """Packed conversations without end, and the number of their batches."""
    rows = [
        Row(tuple(ids.tolist()), tuple(trained.tolist()), "a conversation")
        for ids, trained in conversations(sizes)
    ]
    found = chat_batches(rows, sizes["packed"], length=sizes["tokens"], packing=True, updates=1)
    return found.dataset.repeat(), found.steps
