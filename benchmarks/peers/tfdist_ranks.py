"""tfdist, on any mesh and engine."""

from __future__ import annotations

import importlib
from types import ModuleType

import keras
import tensorflow as tf

import tfdist
from tfdist import layers, models, strategies
from tfdist.pipeline import PipelineModel, deferred_weights
from tfdist.recompute import recompute

from .serving import FitTraining, Settings, Training, global_batch

STRATEGIES = {
    "horovod": strategies.HorovodStrategy,
    "tensorflow": strategies.MultiWorkerStrategy,
    "local": strategies.LocalStrategy,
}


def _module(name: str, former: str) -> ModuleType:
    """A module of an add-on; `former` at commits before the add-ons, for `--against`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return importlib.import_module(former)


dlrm = _module("tfdist.addons.recommenders", "tfdist.models").dlrm
memory_report = _module("tfdist.addons.monitoring", "tfdist.monitoring").memory_report


def prepare(settings: Settings) -> Training:
    """Builds this rank's part of the model."""
    options = dict(settings.options)
    engine = options.pop("engine")
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    tf.config.threading.set_inter_op_parallelism_threads(_operations_at_once(engine, settings))
    pipeline = options.pop("pipeline", None)
    mesh = tfdist.Mesh(**options.pop("mesh", {}))
    experts = options.pop("experts", {})
    policy = options.pop("recompute", None)
    jit_compile = options.pop("jit_compile", "auto")
    keras.utils.set_random_seed(0)
    strategy = STRATEGIES[engine](mesh, **options)
    with strategy.scope():
        if pipeline is None:
            model = _model(settings, tied=True, **experts)
        else:
            with deferred_weights():
                model = _model(settings, tied=False)
            model = PipelineModel(model, **pipeline)
        if policy is not None:
            recompute(model, policy)
        model.compile(_optimizer(settings), _loss(settings), jit_compile=jit_compile)
    data = tf.data.Dataset.from_tensors(global_batch(settings)).repeat()
    return FitTraining(model, data, _clock, _parameters(model, strategy))


def _operations_at_once(engine: str, settings: Settings) -> int:
    """What is quickest: with two, a collective of TensorFlow's waits while others compute.

    Direct messages wait without a thread. In a pipeline a second one sends what the next stage waits
    for while this one goes on; in one process with two threads small operations of the GPT run beside
    large ones, where convolutions would only be in each other's way.
    """
    in_pipeline = "pipeline" in settings.options
    is_one_gpt = (engine, settings.model) == ("local", "gpt")
    return 2 if engine == "tensorflow" or in_pipeline or is_one_gpt else 1


def _model(settings: Settings, tied: bool, **experts) -> keras.Model:
    sizes = settings.sizes
    if settings.model == "gpt":
        return models.gpt(
            sizes["vocabulary"],
            num_layers=sizes["layers"],
            width=sizes["width"],
            num_heads=sizes["heads"],
            max_length=sizes["tokens"],
            tied_head=tied,
            **experts,
        )
    if settings.model == "dlrm":
        return dlrm(
            sizes["dense"],
            [sizes["vocabulary"]] * sizes["tables"],
            embedding_dim=sizes["width"],
            bottom_widths=(sizes["hidden"],),
            top_widths=(2 * sizes["hidden"], sizes["hidden"]),
        )
    if settings.model == "mlp":
        return models.mlp(
            (sizes["features"],), sizes["classes"], widths=[sizes["hidden"]] * sizes["layers"]
        )
    side = sizes["side"]
    model = models.convnet((side, side, 3), sizes["classes"])
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            # PyTorch has no other on CPUs.
            layer.synchronized = False
    return model


def _parameters(model: keras.Model, strategy) -> int:
    """How many are trained, over all ranks: a rank of a pipeline knows those of its stages."""
    own = memory_report(model).row("parameters").whole or 0
    whole = tfdist.collectives.all_reduce(
        tf.constant(own, tf.int64), strategy.group("pipeline"), name="bench/parameters"
    )
    return int(whole) // tf.float32.size


def _optimizer(settings: Settings):
    return keras.optimizers.SGD(0.1) if settings.model == "dlrm" else "adam"


def _loss(settings: Settings):
    if settings.model == "dlrm":
        return keras.losses.BinaryCrossentropy(from_logits=True)
    if settings.model == "gpt":
        return layers.VocabParallelCrossEntropy(settings.sizes["vocabulary"])
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _clock(note):
    return keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: note())
