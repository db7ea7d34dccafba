"""What is traced on a rank with the stand-in for a GPU; each runs in a process of its own."""

from __future__ import annotations

from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.gpu.loopback import loopback
from tests.gpu_like.placement import Step, function_of
from tests.gpu_like.stand_in import DEVICE, pretend
from tfdist import Mesh
from tfdist.backend import devices
from tfdist.backend.clock.stamps import Stamps, stamping
from tfdist.backend.graph.products import Product
from tfdist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    recv,
    reduce_scatter,
    send,
)
from tfdist.collectives.engine import Engine
from tfdist.collectives.run import over_host
from tfdist.collectives.tensorflow import TensorFlowEngine
from tfdist.gradients.reduce import reduce_gradients
from tfdist.layers import attention
from tfdist.layers.chunked_loss import chunked_cross_entropy
from tfdist.pipeline.runtime import PipelineRuntime
from tfdist.step.gradient_options import GradientOptions


def strategy_on(axes: dict, **options):
    """A strategy of rank 0 of a mesh, whose other ranks are a loopback, with the stand-in for a GPU."""
    pretend()
    return tfdist.strategies.HorovodStrategy(engine=loopback(**axes), watchdog_seconds=0, **options)


def traced(strategy, model, x, y) -> tf.Graph:
    """The graph of a training step, as `fit` makes it, without the loop of Keras around it."""

    @tf.function(autograph=False)
    def step(*data):
        return strategy.run(model.train_step, args=(data,))

    specs = [tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in (x, y)]
    return step.get_concrete_function(*specs).graph


def gpt(strategy, *, length: int = 64, policy: str | None = None, **options):
    """A small GPT with dropout, compiled, and a batch."""
    options = {"dropout": 0.1, "attention_dropout": 0.0} | options
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy(policy or before)
        with strategy.scope():
            model = tfdist.models.gpt(
                64, num_layers=2, width=32, num_heads=4, max_length=length, **options
            )
            if strategy.mesh.shape.get("pipeline", 1) > 1:
                model = tfdist.pipeline.PipelineModel(
                    model, num_microbatches=2, input_shape=(length,)
                )
            loss = tfdist.layers.VocabParallelCrossEntropy(64)
            model.compile(keras.optimizers.AdamW(1e-3, global_clipnorm=1.0), loss)
    finally:
        keras.config.set_dtype_policy(before)
    # A rank of the context axis has its own tokens of each row.
    ids = np.zeros((4, length // strategy.mesh.shape.get("context", 1)), np.int32)
    return model, ids, ids


def waits(axes: dict, model: dict | None = None, **options) -> list[str]:
    """The waits of a GPT's training step, for whose end the path waits."""
    strategy = strategy_on(axes, **options)
    with mock.patch.object(PipelineRuntime, "_forms", forms):
        step = Step(traced(strategy, *gpt(strategy, **(model or {}))))
    return sorted({str(each) for each in step.gating()})


def forms(runtime: PipelineRuntime, programs: dict) -> dict:
    """The forms of all gradients, where a loopback does not know other ranks' stages: these have dense ones."""
    found: dict = {}
    for stage in range(runtime.partition.num_stages):
        trained = runtime._trained(stage)
        own = programs.get(stage)
        of = (
            zip(own.gradients, own.same_rows, strict=True)
            if own
            else [(["dense"], False)] * len(trained)
        )
        for variable, (names, same) in zip(trained, of, strict=True):
            found.setdefault(id(variable), {})[stage] = len(names), same
    return found


def waits_of_tables() -> list[str]:
    """The same of a model with sharded tables."""
    strategy = strategy_on({"data": 2})
    recommenders = tfdist.addons.recommenders
    with strategy.scope():
        table = recommenders.TableConfig("words", 100, 8, combiner="sum", placement="rows")
        ids = keras.Input((5,), dtype="int32", name="words")
        feature = recommenders.FeatureConfig("words", table, padding_id=0)
        vectors = recommenders.ShardedEmbedding([feature])({"words": ids})["words"]
        model = keras.Model(ids, keras.layers.Dense(1)(vectors))
        model.compile("sgd", "mse")
    step = Step(traced(strategy, model, np.zeros((4, 5), np.int32), np.zeros((4, 1), np.float32)))
    return sorted({str(each) for each in step.gating()})


def operations(graph: tf.Graph) -> list[tf.Operation]:
    """All operations of a graph and of the functions in it."""
    found, seen = [], set()
    waiting = [graph]
    while waiting:
        one = waiting.pop()
        for op in one.get_operations():
            found.append(op)
            for attribute in op.op_def.attr:
                if attribute.type == "func" and op.get_attr(attribute.name).name not in seen:
                    seen.add(op.get_attr(attribute.name).name)
                    waiting.append(function_of(one, op, attribute.name))
    return found


def shapes_of(length: int, policy: str | None = None, **options) -> list[tuple]:
    """For each operation of a GPT's training step its kind, the dtype of its output, and its rank."""
    strategy = strategy_on({"data": 2})
    model, x, y = gpt(strategy, length=length, policy=policy, **options)
    found = []
    for op in operations(traced(strategy, model, x, y)):
        if op.outputs:
            out = op.outputs[0]
            found.append((op.type, out.dtype.name, out.shape.rank, op.name))
    return found


def of_one_step(axes: dict, has_gpu: bool, model: dict, whole: bool = True, **options) -> list:
    """The loss of a GPT's training step, and its variables after it, from the same weights and ids."""
    strategy = strategy_on(axes, **options)
    pretend(has_gpu)
    fits = attention.fits_whole
    attention.fits_whole = lambda *sizes: has_gpu and whole
    long, attention._LONG = attention._LONG, 32
    try:
        keras.utils.set_random_seed(1)
        made, x, _ = gpt(strategy, dropout=0.0, **model)
        x = np.random.default_rng(0).integers(0, 64, x.shape).astype("int32")
        step = tf.function(lambda x: strategy.run(made.train_step, args=((x, x),)), autograph=False)
        logs = step(tf.constant(x))
    finally:
        attention.fits_whole, attention._LONG = fits, long
    return [float(logs["loss"]), *(variable.numpy() for variable in made.trainable_variables)]


def normalization(policy: str) -> list[tuple[str, str]]:
    """The kinds and dtypes of what a BatchNormalization of images runs in a training step."""
    strategy = strategy_on({"data": 2})
    with strategy.scope():
        images = keras.Input((8, 8, 3))
        y = keras.layers.BatchNormalization(dtype=policy)(images)
        model = keras.Model(images, keras.layers.GlobalAveragePooling2D(dtype=policy)(y))
        model.compile("sgd", "mse")
    x, y = np.zeros((4, 8, 8, 3), np.float32), np.zeros((4, 3), np.float32)
    found = operations(traced(strategy, model, x, y))
    return [
        (op.type, op.inputs[0].dtype.name)
        for op in found
        if "batch_normalization" in op.name
        and (
            op.type.startswith("FusedBatchNorm")
            or (op.type == "Cast" and op.outputs[0].shape.rank == 4)
        )
    ]


def gradient_of_chunks(has_gpu: bool) -> list:
    """The gradient of the chunked loss of logits, and the kinds of operations of its backward pass."""
    strategy = strategy_on({"data": 2})
    pretend(has_gpu)
    draw = np.random.default_rng(0)
    rows = tf.constant(draw.normal(size=(20, 8)), tf.float32)
    kernel = tf.constant(draw.normal(size=(8, 11)), tf.float32)
    labels = tf.constant(draw.integers(0, 11, 20), tf.int64 if has_gpu else tf.int32)

    @tf.function
    def gradients(rows, kernel):
        with tf.GradientTape() as tape:
            tape.watch([rows, kernel])
            product = Product(rows, kernel, False, None)
            loss = chunked_cross_entropy(product, labels, 6, None, 11)
        return tape.gradient(loss, [rows, kernel])

    graph = gradients.get_concrete_function(rows, kernel).graph
    loop = [op for op in graph.get_operations() if "While" in op.type][-1]
    body = function_of(graph, loop, "body")
    kinds = sorted({op.type for op in body.get_operations()})
    with strategy.scope():
        return [*(each.numpy() for each in gradients(rows, kernel)), kinds]


def copied_ahead() -> list[tuple[str, bool]]:
    """By a name of a dataset whether its batches are on the device before the step."""
    strategy = strategy_on({"data": 2})
    rows = 8
    images, labels = np.ones((rows, 4, 4, 1), np.float32), np.arange(rows)
    ids = np.ones((rows, 5), np.int32)
    ragged = tf.ragged.constant([[1.0]] * rows)
    found = []
    for name, arrays in {
        "images": (images, labels),
        "ids": (ids, labels),
        "mixed": ({"a": images, "b": ids}, labels),
        "ragged": (ragged, labels),
        "text": (np.array(["a"] * rows), labels),
    }.items():
        dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
        distributed = strategy.experimental_distribute_dataset(dataset)
        first = tf.nest.flatten(next(iter(distributed)), expand_composites=True)[0]
        found.append((name, DEVICE.strip("/") in first.device))
    return found


def devices_of_variables() -> dict[str, str]:
    """The devices of variables that are made in the scope of a strategy."""
    strategy = strategy_on({"data": 2})
    with strategy.scope():
        found = {"weight": tf.Variable(1.0)}
        with tf.device("/CPU:0"):
            found["named"] = tf.Variable(1)
        found["seed"] = keras.layers.Dropout(0.5).seed_generator.state.value
        found["switch"] = strategy.extended.batch_logs_read

        @tf.function
        def trace():
            if "traced" not in found:
                with tf.device(devices.device_name()), tf.init_scope(), tf.device("/CPU:0"):
                    found["traced"] = tf.Variable(1)

        trace()
    return {name: variable.device for name, variable in found.items()}


def stamped() -> tuple[bool, bool]:
    """Whether a collective waits for the stamp of its begin, and whether the row is on the host."""
    strategy = strategy_on({"data": 2})
    group = strategy.engine.group()

    @tf.function
    def step(x):
        stamps = Stamps()
        with tf.device(devices.device_name()), stamping(stamps):
            y = all_reduce(x * 2.0, group, name="stamped")
            return y, stamps.row()

    graph = step.get_concrete_function(tf.TensorSpec([8])).graph
    (collective,) = [op for op in graph.get_operations() if op.type == "DeepCopy"]
    stamps = [op for op in graph.get_operations() if op.type == "Timestamp"]
    packs = [
        op
        for op in graph.get_operations()
        if op.type == "Pack" and op.outputs[0].dtype == tf.float64
    ]
    return bool(ancestors(collective) & set(stamps)), all("CPU:0" in op.device for op in packs)


def over_the_host() -> list[str]:
    """The devices of a sum beside a step's, as DiLoCo has one."""
    strategy = strategy_on({"data": 2})
    group = strategy.engine.group()

    @tf.function
    def step(x):
        with tf.device(devices.device_name()), over_host():
            return all_reduce(x, group)

    graph = step.get_concrete_function(tf.TensorSpec([8])).graph
    return [op.device for op in graph.get_operations() if op.type == "DeepCopy"]


def gates(has_gpu: bool) -> tuple[bool, bool, int]:
    """Whether a collective waits for the count of its begin, its users for that of its end; and the counts."""
    strategy = strategy_on({"data": 2})
    pretend(has_gpu)
    group = strategy.engine.group()

    @tf.function
    def step(x):
        return all_reduce(x * 2.0, group, name="gates") + 1.0

    graph = step.get_concrete_function(tf.TensorSpec([8])).graph
    (collective,) = [op for op in graph.get_operations() if op.type == "DeepCopy"]
    added = [op for op in graph.get_operations() if op.type == "AssignAddVariableOp"]
    # What is returned waits for everything.
    (user,) = [op for op in graph.get_operations() if op.type == "AddV2"]
    begins = [op for op in added if op in ancestors(collective)]
    ends = [op for op in added if op in ancestors(user)]
    step(tf.ones([8]))
    return bool(begins), len(ends) > len(begins), len(added)


def ancestors(op: tf.Operation) -> set[tf.Operation]:
    """All operations for which one waits."""
    found, waiting = set(), [op]
    while waiting:
        each = waiting.pop()
        for before in [*(tensor.op for tensor in each.inputs), *each.control_inputs]:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


def throttled(has_gpu: bool, mib: int) -> tuple[int, int]:
    """The number of buckets of twelve gradients, and of gradients that wait for a sum."""
    strategy = strategy_on({"data": 2})
    pretend(has_gpu)
    options = GradientOptions()
    group = strategy.engine.group()

    @tf.function
    def step(x):
        tensors = [tf.multiply(x, float(number)) for number in range(12)]
        return tensors, reduce_gradients(tensors, group, "mean", options)

    graph = step.get_concrete_function(tf.TensorSpec([mib << 18])).graph
    collectives = [op for op in graph.get_operations() if op.type == "DeepCopy"]
    made = [op for op in graph.get_operations() if op.type == "Mul"]
    waiting = [op for op in made if ancestors(op) & set(collectives)]
    return len(collectives), len(waiting)


def traced_collectives(communication: str, has_gpu: bool) -> list[tuple]:
    """The nodes of TensorFlow's engine: what was called, the dtype, and each node's kind, device, key, hint, dtype."""
    pretend(has_gpu)
    engine = TensorFlowEngine(Mesh(), communication)
    Engine.__init__(engine, Mesh().resolve(size=2, rank=0))
    group, found = engine.group(), []
    calls = {
        "all_reduce": lambda x: all_reduce(x, group, "max"),
        "sum": lambda x: all_reduce(x, group),
        "all_gather": lambda x: all_gather(x, group),
        "uneven": lambda x: all_gather(x, group, uneven=True),
        "reduce_scatter": lambda x: reduce_scatter(x, group),
        "all_to_all": lambda x: all_to_all(x, group),
        "splits": lambda x: all_to_all(x, group, tf.constant([1, 3]))[0],
        "broadcast": lambda x: broadcast(x, group),
        "send": lambda x: send(x, group, 1),
        "recv": lambda x: recv(x, group, 1),
    }
    for dtype in (
        "bool",
        "int8",
        "uint8",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "complex64",
    ):
        for name, call in calls.items():
            if (dtype == "bool" and name in ("sum", "reduce_scatter")) or (
                dtype == "complex64" and name == "all_reduce"
            ):
                continue  # Refused.

            @tf.function
            def run(x, call=call):
                with tf.device(devices.device_name()):
                    return call(x)

            graph = run.get_concrete_function(tf.TensorSpec([4], dtype)).graph
            for op in operations(graph):
                if op.type.startswith("Collective"):
                    (key,) = [t for t in op.inputs if "group_key" in t.op.name] or [op.inputs[2]]
                    found.append(
                        (
                            name, dtype, op.type, op.device, int(tf.get_static_value(key)),
                            op.get_attr("communication_hint").decode(), op.get_attr("T").name,
                            "_independent_side_effects" in op.node_def.attr,
                        )
                    )  # fmt: skip
    return found


def uses_host() -> dict[str, list[bool]]:
    """Whether TensorFlow's engine has operations of two dtypes over the host, by operation."""
    pretend()
    engine = TensorFlowEngine(Mesh(), "auto")
    return {
        operation: [engine.uses_host(operation, dtype) for dtype in (tf.float32, tf.int32)]
        for operation in ("all_reduce", "all_gather", "broadcast", "send", "receive")
    }
