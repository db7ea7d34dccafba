"""The public callables of tfdist, with a call of each that is right, and one argument made wrong.

What is tried comes from `__all__` and from the signatures: a new argument is tried as soon as it is
there. The tables here hold only what no signature tells.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

import tests.addons.hub.chat
import tfdist
from tests.public import public_objects
from tests.values.bad_values import bad_for
from tfdist.addons.hub.chat.rows import Row
from tfdist.collectives.local import LocalEngine
from tfdist.extend import LayerSplit
from tfdist.pipeline.simulation import simulate

#: What is not public, and checks its arguments all the same.
INNER = [
    "tfdist.runtime.save_interval.young_daly",
    "tfdist.addons.datasets.loading.rank_split",
    "tfdist.addons.datasets.loading.read_config",
    "tfdist.addons.monitoring.memory.PeakMemory",
    "tfdist.addons.monitoring.memory.bytes_in_use",
    "tfdist.addons.monitoring.model_sync.verify_model_sync",
    "tfdist.testing.faults.FlipBit",
    "tfdist.watchdog.watchdog.Watchdog",
    "tfdist.watchdog.watchdog.startup_guard",
    "tfdist.pipeline.chain.Chain",
    "tfdist.pipeline.partition.make_partition",
    "tfdist.strategies.parallel.ParallelStrategy",
]

__all__ = ["INNER", "LEGAL", "Case", "argument_names", "cases", "public_callables"]


def _model() -> keras.Model:
    layers = [keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model


def _gpt() -> keras.Model:
    return tfdist.models.gpt(8, num_layers=1, width=8, num_heads=2, max_length=4)


def _new_task() -> Any:
    backbone = keras_hub.models.GPT2Backbone(16, 1, 1, 8, 8, max_sequence_length=8)
    return keras_hub.models.GPT2CausalLM(backbone)


_task = functools.cache(_new_task)


@functools.cache
def _adapted_task() -> keras.Model:
    task = _new_task()
    task.backbone.enable_lora(2)
    tfdist.addons.hub.train_only_adapters(task)
    return task


@functools.cache
def _tokenizer() -> Any:
    folder = Path(tests.addons.hub.chat.__file__).parent
    return tfdist.addons.hub.ChatTokenizer(folder, template="{{ messages }}")


class _TwoRanks(LocalEngine):
    """The first of two ranks, which hears only itself."""

    def __init__(self):
        super().__init__()
        self.mesh = tfdist.Mesh().resolve(size=2, rank=0)


class _Split(LayerSplit):
    """Of a layer without weights."""

    kinds = ("own",)

    def weights(self, layer, kind):
        return {}

    def call(self, layer, kind, group, original, *args, **kwargs):
        return original(*args, **kwargs)


def _chain() -> Any:
    return tfdist.pipeline.chain.Chain(_model())


#: What an argument without a default gets, by its annotation.
_BY_KIND: dict[str, Callable[[], Any]] = {
    "int": lambda: 4,
    "float": lambda: 0.5,
    "Engine": LocalEngine,
    "Group": lambda: LocalEngine().group(),
    "keras.Model": _model,
    "keras.layers.Layer": _model,
    "Chain": _chain,
    "Sequence[int]": lambda: (8, 8, 1),
    "Mapping[str, str]": dict,
    "Model": lambda: tfdist.addons.planner.MLP([4, 2]),
    "Machine": lambda: tfdist.addons.planner.machine("a100"),
    "JobTimes": lambda: tfdist.addons.planner.JobTimes(checkpoint=1e9, storage=1e9, write=1e9),
    "Sequence[float]": lambda: (1.0, 2.0, 4.0, 1.0, 2.0, 4.0),
    "Estimate": lambda: tfdist.addons.planner.estimate(
        tfdist.addons.planner.MLP([4, 2]),
        tfdist.addons.planner.machine("a100"),
        tfdist.addons.planner.Layout(),
        global_batch=1,
    ),
    "Layout": lambda: tfdist.addons.planner.Layout(),
    "Callable": lambda: len,
    "tuple[int, ...]": lambda: (0,),
    "np.ndarray": lambda: np.arange(20),
}

#: The same by its name, where that tells more: "argument", or "callable.argument".
_BY_NAME: dict[str, Callable[[], Any]] = {
    "tensor": lambda: np.zeros([2, 2], np.float32),
    "value": dict,
    "like": lambda: np.zeros([2, 2], np.float32),
    "variable": lambda: _model().weights[0],
    "filepath": lambda: "model.keras",
    "split": lambda: "train",
    "what": lambda: "a test",
    "timer.name": lambda: "augment",
    "add_split_weight.shape": lambda: (4, 2),
    "add_split_weight.dim": lambda: 1,
    "add_split_weight.name": lambda: "kernel",
    "add_split_weight.initializer": lambda: "zeros",
    "add_split_weight.axis": lambda: "tensor",
    "axis_group.axis": lambda: "tensor",
    "check_engine.make_engine": lambda: LocalEngine,
    "check_schedule.schedule": lambda: tfdist.pipeline.make_schedule("1f1b", 2, 4),
    "save_timeline.run": lambda: simulate(tfdist.pipeline.make_schedule("1f1b", 2, 4)),
    "register_split.layer_class": lambda: keras.layers.Softmax,
    "register_split.split": _Split,
    "register_strategy.name": lambda: "Other",
    "register_strategy.detect": lambda: lambda: False,
    "register_strategy.make": lambda: lambda mesh, **options: None,
    "strategy": tfdist.strategies.LocalStrategy,
    "replicas": lambda: 2,
    "Trackio.project": lambda: "digits",
    "row_dataset.source": lambda: [{"a": 1.0, "b": 2.0}] * 4,
    "row_dataset.columns": lambda: ("a", "b"),
    "row_dataset.transform": lambda: lambda row: row,
    "inner": keras.optimizers.Adam,
    "prompt_tokens": lambda: [1, 2],
    **{
        f"blockwise_attention.{name}": lambda: np.zeros([1, 2, 4, 8], np.float32)
        for name in ("query", "key", "value")
    },
    "generate.model": _gpt,
    "ShardedEmbedding.features": lambda: [
        tfdist.addons.recommenders.FeatureConfig(
            "id", tfdist.addons.recommenders.TableConfig("table", 4, 2)
        )
    ],
    "describe.model": _model,
    "amdahl.ranks": lambda: 4.0,
    "gustafson.ranks": lambda: 4.0,
    "from_config.config": lambda: {
        "num_layers": 1,
        "hidden_dim": 4,
        "num_heads": 1,
        "vocabulary_size": 4,
        "max_sequence_length": 4,
    },
    "machine.device": lambda: "a100",
    "make_schedule.name": lambda: "1f1b",
    "DynamicSharding.items": lambda: 8,
    "load.name": lambda: "digits",
    "load_for_rank.name": lambda: "digits",
    "load_text.name": lambda: "pydoc",
    "rank_split.index": lambda: 1,
    "make_partition.num_ranks": lambda: 2,
    "PipelineModel.model": _model,
    "Chain.model": _model,
    "ScaledWarmup.learning_rate": lambda: 0.5,
    "LearningRateScheduleCallback.multiplier": lambda: 0.5,
    "to": lambda: 1,
    "source": lambda: 1,
    "send.group": lambda: _TwoRanks().group(),
    "recv.group": lambda: _TwoRanks().group(),
    "run_ranks.function": lambda: len,
    "over_batch.function": lambda: keras.losses.mse,
    "mean_of_rows.function": lambda: keras.losses.mse,
    "set_aggregation.aggregation": lambda: "max",
    "ChatTokenizer.folder": lambda: Path(tests.addons.hub.chat.__file__).parent,
    "GRPO.model": _task,
    "export_peft.model": _adapted_task,
    "train_only_adapters.model": _adapted_task,
    "separate_documents.task": _task,
    "verify_export.model": _task,
    "tokenizer": _tokenizer,
    "reward": lambda: len,
    "optimizer": keras.optimizers.SGD,
    "chat_batches.rows": lambda: [Row((1, 2), (False, True), "file:1")],
    "directory": lambda: "checkpoints",
    "path": lambda: "checkpoints",
    "preset": lambda: "preset",
    "save.model": _model,
    "restore.model": _model,
    "step": lambda: 1,
    "save_seconds": lambda: 1.0,
    "failure_seconds": lambda: 3600.0,
}

#: Arguments with a default that get another value, without which others would not be looked at.
_GIVEN: dict[str, dict[str, Callable[[], Any]]] = {
    "HorovodStrategy": {"engine": LocalEngine},
    "MultiWorkerStrategy": {"engine": LocalEngine},
    "parallelize": {"plan": dict},
}

#: Arguments that an annotation says too little of.
_KINDS: dict[str, str] = {
    "tensor": "Tensor",
    "like": "Tensor",
    "splits": "Splits | None",
    "initializer": "Initializer",
    "add_split_weight.regularizer": "Initializer | None",
    "add_split_weight.constraint": "Initializer | None",
    "kernel_initializer": "Initializer",
    "output_initializer": "Initializer | None",
    "router_initializer": "Initializer",
    "dtype": "Dtype | None",
    "cls": "type | None",
    "reduction": "str",
    "VocabParallelCrossEntropy.reduction": "str | None",
    "VocabParallelCrossEntropy.name": "str | None",
    "PreferenceLoss.name": "str | None",
    "reward": "Callable",
    "blockwise_attention.mask": "None",
    "blockwise_attention.query_offset": "None",
    "blockwise_attention.document_starts": "None",
    "testing.engine.mesh": "Mesh | None",
    "testing.strategy.mesh": "Mesh | None",
}

_ANY_NAME = {"number as text", "word"}
_ZERO = {"zero", "zero point"}
_WEIGHTS = ("balance_loss", "z_loss", "bias_rate")
#: Values that are right though the annotation does not say so, by the names of `EVERY`; a star in an
#: argument's name stands for anything. All else in `EVERY` has to be refused.
LEGAL: dict[str, set[str]] = {
    "*.name": _ANY_NAME,
    "*.dropout": _ZERO,
    "*.attention_dropout": _ZERO,
    "*.verbose": {"zero"},
    "tfdist.addons.optimizers.Muon.matrices": {"dict"},
    "tfdist.addons.slow_links.DiLoCo.overlap": {"zero"},
    "tfdist.addons.slow_links.OneBitAdam.learning_rate": {"zero point"},
    **{
        f"tfdist.addons.slow_links.*.{name}": _ZERO
        for name in ("outer_momentum", "slow_momentum", "mixing")
    },
    "*.seed": {"zero"},
    "*.shuffle_seed": {"zero"},
    "*.watchdog_seconds": _ZERO,
    "*.zero_stage": {"zero"},
    "tfdist.collectives.*.axis": {"zero", "minus one"},
    "tfdist.extend.*_region.axis": {"zero", "minus one"},
    "tfdist.extend.add_split_weight.dim": {"zero", "minus one"},
    "*.gradient_stages": {"empty list"},
    "tfdist.Mesh.data": {"minus one"},
    "tfdist.addons.compat.horovod.BestModelCheckpoint.monitor": _ANY_NAME,
    "tfdist.addons.compat.horovod.BestModelCheckpoint.initial_value_threshold": {
        *_ZERO,
        "minus one",
        "minus half",
    },
    "tfdist.addons.compat.horovod.BroadcastGlobalVariablesCallback.root_rank": {"zero"},
    "tfdist.addons.compat.horovod.LearningRateScheduleCallback.multiplier": _ZERO,
    "tfdist.addons.compat.horovod.LearningRateScheduleCallback.start_epoch": {"zero"},
    "tfdist.addons.compat.horovod.LearningRateWarmupCallback.warmup_epochs": _ZERO,
    "tfdist.learning_rate.ScaledWarmup.warmup_steps": {"zero"},
    "*.row_dataset.source": {"list of text", "list of nan", "list of minus one"},
    "*.row_dataset.columns": {"list of text"},
    "tfdist.addons.ray.RayReport.directory": {"newline", *_ANY_NAME},
    "tfdist.addons.trackers.*.config": {"dict"},
    "tfdist.addons.trackers.Trackio.project": _ANY_NAME,
    "*.save_timeline.path": {"newline", *_ANY_NAME},
    "tfdist.checkpoint.*.directory": {"newline", *_ANY_NAME},
    "tfdist.callbacks.Checkpointer.directory": {"newline", *_ANY_NAME},
    "tfdist.checkpoint.*.path": {"newline", *_ANY_NAME},
    "tfdist.checkpoint.*.step": {"zero"},
    "tfdist.checkpoint.*.state": {"dict"},
    "tfdist.collectives.broadcast.root": {"zero"},
    "tfdist.collectives.*_object.value": {"*"},
    "tfdist.collectives.broadcast_object.root": {"zero"},
    "tfdist.addons.slow_links.*.start_step": {"zero"},
    "tfdist.addons.slow_links.TopK.momentum_correction": _ZERO,
    "tfdist.addons.slow_links.TopK.warmup_steps": {"zero"},
    "tfdist.addons.recommenders.make_clicks.rule_seed": {"zero"},
    "tfdist.addons.unequal_ranks.DynamicSharding.items": {"list of text"},
    "tfdist.addons.datasets.*.data_dir": {"newline", *_ANY_NAME},
    "tfdist.addons.datasets.loading.rank_split.index": {"zero"},
    "tfdist.addons.datasets.loading.rank_split.split": _ANY_NAME,
    # Also a template without anything of Jinja.
    "tfdist.addons.hub.ChatTokenizer.template": {
        *("empty text", "blank", "zero byte", "newline"),
        *_ANY_NAME,
    },
    **{f"tfdist.addons.hub.GRPO.{name}": _ZERO for name in ("beta", "epsilon", "epsilon_high")},
    "tfdist.addons.hub.PreferenceLoss.label_smoothing": _ZERO,
    "tfdist.addons.hub.chat_batches.pad": {"zero"},
    "tfdist.addons.hub.*.path": {"newline", *_ANY_NAME},
    "tfdist.layers.Dropout.rate": _ZERO,
    **{f"tfdist.experts.MixtureOfExperts.{name}": _ZERO for name in _WEIGHTS},
    "tfdist.layers.blockwise_attention.scale": {*_ZERO, "minus one", "minus half"},
    # Of shape [], for all scores alike.
    "tfdist.layers.blockwise_attention.mask": {"true"},
    "tfdist.models.TransformerDecoderBlock.epsilon": _ZERO,
    "tfdist.models.TransformerDecoderBlock.*_stddev": _ZERO,
    # What the model takes; nobody looks at it where the tensor axis is 1.
    "tfdist.parallelize.sample": {"*"},
    "tfdist.models.convnet.filters": {"empty list"},
    "tfdist.addons.recommenders.dlrm.*_widths": {"empty list"},
    "tfdist.models.mlp.widths": {"empty list"},
    "tfdist.models.generate.prompt_tokens": {"zero"},
    "tfdist.models.generate.num_tokens": {"zero"},
    "tfdist.models.generate.temperature": _ZERO,
    "tfdist.addons.asynchronous.ParameterServerStrategy.max_staleness": {"zero"},
    "tfdist.addons.asynchronous.ParameterServerStrategy.backup_ranks": {"zero"},
    "tfdist.addons.asynchronous.ParameterServerStrategy.delay_compensation": _ZERO,
    "tfdist.testing.faults.FlipBit.bit": {"zero"},
    "tfdist.testing.faults.FlipBit.rank": {"zero"},
    "tfdist.testing.faults.FlipBit.step": {"zero"},
    "tfdist.testing.faults.FlipBit.variable": _ANY_NAME,
    "tfdist.addons.planner.goodput.goodput.restart_seconds": _ZERO,
    "tfdist.addons.planner.simulate_step.jitter": _ZERO,
    "tfdist.addons.planner.simulate_step.slow_ranks": {"zero"},
    "tfdist.addons.planner.laws.amdahl.parallel": {*_ZERO},
    "tfdist.addons.planner.laws.gustafson.parallel": {*_ZERO},
    "tfdist.callbacks.MemoryReporter.path": {"newline", *_ANY_NAME},
    **{
        f"tfdist.callbacks.Monitor.{name}": {"newline", *_ANY_NAME}
        for name in ("json", "tensorboard", "trace")
    },
    "tfdist.callbacks.Monitor.prometheus_port": {"zero"},
    "tfdist.addons.monitoring.memory_report.step_peak": {"zero"},
    "tfdist.watchdog.watchdog.startup_guard.what": _ANY_NAME,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call with one bad value.

    Attributes:
        callable: Its name, with that of its module.
        argument: The argument.
        value_name: The value's, in `EVERY`.
        value: The value.
        call: Makes the call.
    """

    callable: str
    argument: str
    value_name: str
    value: Any
    call: Callable[[], Any]

    @property
    def is_legal(self) -> bool:
        """Whether the table says that the value is right."""
        return bool(self.legal_by())

    def legal_by(self) -> list[str]:
        """The entries of the table that say so."""
        name = f"{self.callable}.{self.argument}"
        return [
            pattern
            for pattern, values in LEGAL.items()
            if fnmatch.fnmatchcase(name, pattern) and values & {"*", self.value_name}
        ]


def public_callables() -> dict[str, Callable]:
    """The functions and classes that users call, by module and name."""
    found: dict[str, Callable] = {"tfdist.Mesh": tfdist.Mesh}
    for name in INNER:
        module_name, _, attribute = name.rpartition(".")
        found[name] = getattr(importlib.import_module(module_name), attribute)
    # `tfdist.callbacks` holds what other rooms have, so it comes last.
    names = sorted(
        public_objects().items(), key=lambda item: item[0].startswith("tfdist.callbacks.")
    )
    for name, value in names:
        if _is_called_by_users(value) and value not in found.values():
            found[name] = value
    return found


def _is_called_by_users(value: Any) -> bool:
    if inspect.isfunction(value):
        return True
    if value is tfdist.checkpoint.saving.Save:
        return False  # What `Saver.begin` returns.
    # Records are read, errors are caught, and what is abstract or another library's is not made.
    return (
        inspect.isclass(value)
        and not dataclasses.is_dataclass(value)
        and not issubclass(value, BaseException)
        and not inspect.isabstract(value)
        and getattr(value.__init__, "__module__", "").startswith("tfdist")
    )


def argument_names(name: str, value: Callable) -> dict[str, inspect.Parameter]:
    """The arguments of a callable; the options of a strategy are those of its base."""
    found = dict(inspect.signature(value).parameters)
    options = found.get("options")
    if options is not None and options.kind is inspect.Parameter.VAR_KEYWORD:
        base = inspect.signature(tfdist.strategies.options.StrategyOptions).parameters
        found |= {key: each for key, each in base.items() if key not in found}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {key: each for key, each in found.items() if each.kind not in variadic}


def cases() -> Iterator[Case]:
    """Each public argument with each value that its annotation does not allow."""
    for full_name, value in public_callables().items():
        name = full_name.rpartition(".")[2]
        parameters = argument_names(name, value)
        given = dict(_GIVEN.get(name, {}))
        for key, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty:
                # Made once, when it is first needed: a call that is refused leaves it as it was.
                given[key] = functools.cache(_example(name, parameter))
        for key, parameter in parameters.items():
            for value_name, bad in bad_for(_kind(full_name, parameter)).items():

                def call(value=value, given=given, key=key, bad=bad):
                    arguments = {other: make() for other, make in given.items() if other != key}
                    result = value(**arguments, **{key: bad})
                    if hasattr(result, "__enter__") and hasattr(result, "gen"):
                        with result:
                            pass
                    return result

                yield Case(full_name, key, value_name, bad, call)


def _kind(full_name: str, parameter: inspect.Parameter) -> str:
    _, room, name = full_name.rsplit(".", 2) if full_name.count(".") > 1 else ("", "", full_name)
    for key in (f"{room}.{name}.{parameter.name}", f"{name}.{parameter.name}", parameter.name):
        if key in _KINDS:
            return _KINDS[key]
    return parameter.annotation if isinstance(parameter.annotation, str) else ""


def _example(name: str, parameter: inspect.Parameter) -> Callable[[], Any]:
    for key in (f"{name}.{parameter.name}", parameter.name):
        if key in _BY_NAME:
            return _BY_NAME[key]
    if parameter.annotation in _BY_KIND:
        return _BY_KIND[parameter.annotation]
    raise LookupError(
        f"Say in `_BY_NAME` what `{name}` gets as `{parameter.name}` ({parameter.annotation})."
    )
