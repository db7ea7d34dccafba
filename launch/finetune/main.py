"""`tfdist-finetune`: fine-tune a language model of KerasHub on text.

    tfdist-finetune --preset=gpt2-local/ --dataset=text:notes.txt --lora_rank=8
    tfdist-run -np 2 -- tfdist-finetune --preset=llama3-local/ --tensor=2 --lora_rank=8 \
        --quantize=int8 --output=tuned/

The preset is a folder written by KerasHub's `save_to_preset`; each rank reads only its shards.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from absl import flags

from tfdist.launch.flags import command
from tfdist.launch.flags.checkpoint import CheckpointFlags
from tfdist.launch.flags.command import UsageError
from tfdist.launch.flags.mesh import Layout, MeshOptions
from tfdist.launch.flags.optimizer import OptimizerFlags, counted_for, read_recompute
from tfdist.launch.flags.options import define_flags, names
from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.flags.values import FlagDefiner, folder, refuse_ignored
from tfdist.launch.train.corpus import check_source, read_tokens
from tfdist.launch.train.fitting import expected_errors, speed_callback, warmup_cosine
from tfdist.launch.train.world import World, WorldFlags
from tfdist.utils.checks import one_line

_VALUES = flags.FlagValues()
_DEFINE = FlagDefiner(_VALUES)
_MOST = 1 << 20
#: The name of the adapter in the folder of `--output`.
_ADAPTER = "adapter.lora.h5"

_PRESET = _DEFINE.string("preset", None, "Folder of a KerasHub preset, with its tokenizer")
_DATASET = _DEFINE.string("dataset", "pydoc", "text:FILE, tfds:NAME, tfds:NAME/FEATURE or pydoc")
_DATA_DIR = _DEFINE.string("data_dir", None, "Folder of the TFDS datasets")
_LORA = _DEFINE.integer(
    "lora_rank", 0, "Rank of LoRA adapters; 0: all weights", lower_bound=0, upper_bound=_MOST
)
_BIASES = _DEFINE.boolean(
    "train_biases", False, "Train biases of layers with adapters too; KerasHub cannot load them"
)
_QUANTIZE = _DEFINE.enum(
    "quantize", "none", ["none", "int8", "int4"], "Quantization of the frozen weights"
)
_BLOCK_SIZE = _DEFINE.integer(
    "block_size",
    128,
    "Inputs that share a scale with int4",
    lower_bound=1,
    upper_bound=_MOST,
)
_SEQ_LENGTH = _DEFINE.integer(
    "seq_length", 128, "Tokens per window of text", lower_bound=1, upper_bound=_MOST
)
_BATCH_SIZE = _DEFINE.integer(
    "batch_size", 8, "Windows per step on all ranks", lower_bound=1, upper_bound=_MOST
)
_EPOCHS = _DEFINE.integer("epochs", 1, "Epochs to train", lower_bound=1)
_LEARNING_RATE = _DEFINE.float(
    "learning_rate", 2e-4, "Highest learning rate", lower_bound=1e-9, upper_bound=1000.0
)
_LOSS_CHUNK = _DEFINE.integer(
    "loss_chunk",
    1024,
    "Tokens whose logits are in memory at a time; 0: all",
    lower_bound=0,
    upper_bound=_MOST,
)
_PROMPT = _DEFINE.string("prompt", None, "Prompt for a sample of the tuned model")
_OUTPUT = _DEFINE.string("output", None, f"Folder of the result: {_ADAPTER}, or a preset")
_SEED = _DEFINE.integer(
    "seed", 0, "Seed of adapters and data order", lower_bound=0, upper_bound=2**32 - 1
)
_THREADS = _DEFINE.integer(
    "threads", 0, "Threads per rank; 0: TensorFlow's choice", lower_bound=0, upper_bound=4096
)
_VERBOSE = _DEFINE.integer(
    "verbose", 2, "0: silent, 1: progress bar, 2: one line per epoch", lower_bound=0, upper_bound=2
)
_RECOMPUTE = _DEFINE.string(
    "recompute",
    "none",
    "none, selective, sqrt, every_layer, optimal, or bytes to store: budget:2GiB",
)
_OPTIMIZER = OptimizerFlags(_DEFINE, "adamw", has_own_policy=True)
_CHECKPOINTS = CheckpointFlags(_DEFINE)
_MESH = define_flags(MeshOptions, _VALUES)
_WORLD = WorldFlags(_DEFINE, _MESH)


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Global batches of windows: inputs of the task, and the next tokens."""

    train: Any
    validation: Any
    steps: int
    tokens: int


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


def _check(_: list[str]) -> tuple[Layout, dict[str, Any]]:
    if _PRESET.value is None:
        raise UsageError("--preset must be the folder of a KerasHub preset. Received: none.")
    place = Path(_PRESET.value).expanduser()
    if not (place / "config.json").is_file():
        what = "a folder without config.json" if place.is_dir() else "not a folder"
        raise UsageError(
            "--preset must be a folder written by KerasHub's `save_to_preset`. Received: "
            f"--preset={_PRESET.value}, which is {what}."
        )
    check_source(_DATASET.value)
    if not _DATASET.value.startswith("tfds:"):
        refuse_ignored(
            _VALUES, (_DATA_DIR,), "requires --dataset=tfds:NAME", f"--dataset={_DATASET.value}"
        )
    elif _DATA_DIR.value is not None:
        folder("data_dir", _DATA_DIR.value)
    if _QUANTIZE.value != "none" and not _LORA.value:
        raise UsageError(
            "--quantize requires --lora_rank, because quantized weights are not trained. Received: "
            f"--quantize={_QUANTIZE.value} --lora_rank=0."
        )
    if not _LORA.value:
        refuse_ignored(_VALUES, (_BIASES,), "requires --lora_rank", "--lora_rank=0")
    if _QUANTIZE.value != "int4":
        refuse_ignored(
            _VALUES, (_BLOCK_SIZE,), "requires --quantize=int4", f"--quantize={_QUANTIZE.value}"
        )
    if _OUTPUT.value is not None:
        folder("output", _OUTPUT.value)
    if _WORLD.is_tpu:
        raise UsageError("tfdist-finetune is not supported on a TPU. Received: --strategy=tpu.")
    layout = _MESH.read().layout()
    _WORLD.check(layout)
    _OPTIMIZER.check(is_tpu=False, has_sync=False)
    read_recompute(_RECOMPUTE.name, _RECOMPUTE.value)
    if layout.context > 1:
        raise UsageError(
            "--context is not supported for models of KerasHub. Received: "
            f"--context={layout.context}. Omit --context, or train --model=gpt with tfdist-train."
        )
    return layout, _CHECKPOINTS.options(is_tpu=False)


def _main(checked: tuple[Layout, dict[str, Any]]) -> None:
    layout, saving = checked
    with quiet_start():
        import keras
        import tensorflow as tf

        import tfdist

        tf.config.list_physical_devices()

    # --- Ranks ---------------------------------------------------------------------------------
    if _THREADS.value:
        tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    on = _WORLD.make(layout)
    batch_size = layout.batch_size(
        _BATCH_SIZE.value if _BATCH_SIZE.present else None, _BATCH_SIZE.value, on.data
    )
    keras.utils.set_random_seed(_SEED.value)

    # --- Data: every rank reads the global batches and keeps its own rows -----------------------
    preprocessor = _preprocessor()
    windows = _windows(preprocessor.tokenizer, batch_size)

    # --- Model ---------------------------------------------------------------------------------
    with on.strategy.scope():
        task = _load()
        _recompute(task, layout, batch_size // on.data)
        model = task if layout.pipeline == 1 else _pipeline(task, layout, on)
        rate = warmup_cosine(_LEARNING_RATE.value, _EPOCHS.value * windows.steps)
        loss = tfdist.layers.VocabParallelCrossEntropy(
            task.output.shape[-1], chunk_size=_LOSS_CHUNK.value or None
        )
        # The default metric of a task requires whole logits.
        options = {"weighted_metrics": None} if model is task else {}
        with _OPTIMIZER.expected_errors():
            optimizer = _OPTIMIZER.make("AdamW", rate, weight_decay=0.01, global_clipnorm=1.0)
            model.compile(
                _OPTIMIZER.scaled(optimizer),
                loss,
                steps_per_execution=min(on.steps_per_execution, windows.steps),
                **options,
                **_OPTIMIZER.compile_options,
            )
    if on.is_chief:
        print(_sizes(task, on), flush=True)

    # --- Training ------------------------------------------------------------------------------
    speed = speed_callback(windows.steps * batch_size * _SEQ_LENGTH.value)
    callbacks = [speed, tfdist.callbacks.TerminateOnNonFinite()]
    callbacks += _CHECKPOINTS.callbacks(saving, batch_size)
    with expected_errors(_CHECKPOINTS.workdir, _DATASET.value), _OPTIMIZER.expected_errors():
        before = model.evaluate(windows.validation, verbose=0)
        history = model.fit(
            windows.train,
            validation_data=windows.validation,
            epochs=_EPOCHS.value,
            callbacks=callbacks,
            verbose=_VERBOSE.value,
            shuffle=False,
        )

    # --- Result --------------------------------------------------------------------------------
    task.preprocessor = preprocessor
    lines = []
    if _PROMPT.value is not None:
        text = task.generate(_PROMPT.value, max_length=_SEQ_LENGTH.value)
        lines.append(f"{task.name} writes:\n{text}")
    if _OUTPUT.value is not None:
        lines.append(f"Saved: {_save(task)}")
    loss = history.history["val_loss"][-1]
    if _OPTIMIZER.averages:  # They replace the weights at the end of `fit`.
        loss = model.evaluate(windows.validation, verbose=0)
    lines.append(
        f"Validation loss {loss:.4f}, perplexity {_perplexity(before)} before and "
        f"{_perplexity(loss)} after, on {windows.tokens:,} tokens of {_DATASET.value}; "
        f"{speed.items_per_second:,.0f} tokens/s on {on.words}."
    )
    if on.is_chief:
        print("\n".join(lines))


def _preprocessor():
    try:
        import keras_hub
    except ImportError as error:
        raise UsageError(
            "tfdist-finetune requires KerasHub, which is not installed: pip install keras-hub."
        ) from error
    try:
        return keras_hub.models.CausalLMPreprocessor.from_preset(
            _PRESET.value, sequence_length=_SEQ_LENGTH.value
        )
    except Exception as error:
        # The classes that a preset names may raise any exception.
        raise UsageError(
            f"The tokenizer of --preset={_PRESET.value} cannot be read: {one_line(error)}"
        ) from error


def _windows(tokenizer, batch_size: int) -> _Windows:
    import tensorflow as tf

    from tfdist.addons.datasets import language_model_windows

    length = _SEQ_LENGTH.value
    train, validation = read_tokens(_DATASET.value, tokenizer, _DATA_DIR.value)

    def cut(name, tokens, seed):
        try:
            found = language_model_windows(tokens, length, shuffle_seed=seed)
        except ValueError as error:
            raise UsageError(
                f"--seq_length={length} is not supported for the {name} part of {_DATASET.value}: {error}"
            ) from error
        mask = tf.ones([length], tf.int32)
        return found.map(lambda x, y: ({"token_ids": x, "padding_mask": mask}, y))

    trained, tested = cut("train", train, _SEED.value), cut("validation", validation, None)
    steps = int(trained.cardinality()) // batch_size
    if not steps:
        raise UsageError(
            f"--batch_size must be at most the {int(trained.cardinality())} training windows of {length} "
            f"tokens of {_DATASET.value}. Received: --batch_size={batch_size}."
        )
    return _Windows(
        trained.batch(batch_size, drop_remainder=True).prefetch(2),
        tested.batch(batch_size).cache(),
        steps,
        int(tested.cardinality()) * length,
    )


def _load():
    """Load the task, with a quantized base and adapters if requested."""
    import keras

    import tfdist

    options = {} if _OPTIMIZER.policy is None else {"dtype": _OPTIMIZER.policy}
    try:
        task = tfdist.load_preset(_PRESET.value, preprocessor=None, compile=False, **options)
        backbone = task.backbone
        if _QUANTIZE.value != "none":
            # Embeddings are excluded, because Keras' gradients of quantized reverse embeddings are wrong.
            products = (keras.layers.Dense, keras.layers.EinsumDense)
            config = None
            if _QUANTIZE.value == "int4":
                config = keras.quantizers.Int4QuantizationConfig(block_size=_BLOCK_SIZE.value)
            backbone.quantize(
                _QUANTIZE.value, config=config, filters=lambda layer: isinstance(layer, products)
            )
        if _LORA.value:
            backbone.enable_lora(_LORA.value)
            for variable in [] if _BIASES.value else backbone.trainable_variables:
                # KerasHub trains biases, but does not save them in adapter files.
                variable.trainable = variable.name.startswith("lora_")
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(
            f"--preset={_PRESET.value} could not be loaded: {one_line(error)}"
        ) from error
    inputs = task.input
    if not isinstance(inputs, dict) or set(inputs) != {"token_ids", "padding_mask"}:
        raise UsageError(
            f"--preset={_PRESET.value} must be a model with the inputs token_ids and padding_mask. "
            f"Received: inputs {sorted(inputs) if isinstance(inputs, dict) else inputs}."
        )
    longest = getattr(backbone, "max_sequence_length", None)
    if longest is not None and _SEQ_LENGTH.value > longest:
        raise UsageError(
            f"--seq_length must be at most {longest}, the number of the model's position embeddings. "
            f"Received: --seq_length={_SEQ_LENGTH.value}."
        )
    return task


def _recompute(task, layout: Layout, rows: int) -> None:
    from tfdist.recompute import recompute

    if not (arguments := read_recompute(_RECOMPUTE.name, _RECOMPUTE.value)):
        return
    rows = -(-rows // layout.num_microbatches)
    try:
        recompute(task, **counted_for(arguments, rows, (_SEQ_LENGTH.value,)))
    except ValueError as error:
        raise UsageError(f"--recompute={_RECOMPUTE.value} is not supported: {error}") from error


def _pipeline(task, layout: Layout, on: World):
    from tfdist.pipeline import PipelineModel

    try:
        model = PipelineModel(
            task,
            num_microbatches=layout.num_microbatches,
            schedule=layout.schedule,
            chunks=layout.chunks,
            cut=layout.cut,
            input_shape=(_SEQ_LENGTH.value,),
        )
    except ValueError as error:
        raise UsageError(f"--pipeline={layout.pipeline} is not supported: {error}") from error
    if on.is_chief:
        print(model.partition.table())
    return model


def _save(task) -> str:
    place = Path(str(_OUTPUT.value)).expanduser()
    if not _LORA.value:
        task.save_to_preset(str(place))
        return str(place)
    place.mkdir(parents=True, exist_ok=True)
    task.backbone.save_lora_weights(str(place / _ADAPTER))
    return str(place / _ADAPTER)


def _sizes(task, on: World) -> str:
    from tfdist.sharding.layout import global_shape

    trained, every = (
        sum(math.prod(global_shape(variable)) for variable in variables)
        for variables in (task.trainable_variables, task.variables)
    )
    return f"{task.name}: {trained:,} of {every:,} weights are trained, on {on.words}."


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.3f}" if loss < 700 else "inf"


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-finetune --preset=FOLDER [flags]",
    summary="Fine-tunes a language model of KerasHub on the ranks that tfdist-run or horovodrun starts.",
    check=_check,
    folded={
        "for the steps": [
            flag.name
            for flag in (
                _SEED,
                _LOSS_CHUNK,
                _BIASES,
                _BLOCK_SIZE,
                _RECOMPUTE,
                *_OPTIMIZER.every,
                _WORLD.steps_per_execution,
            )
        ],
        "for checkpoints": [_CHECKPOINTS.save_every.name, _CHECKPOINTS.keep.name],
        "for memory and links": [
            "zero_stage",
            _WORLD.communication_dtype.name,
            _WORLD.compression.name,
        ],
        "for the ranks": [
            *names(MeshOptions, without=["zero_stage"]),
            *(flag.name for flag in (_THREADS, *_WORLD.of_ranks)),
        ],
    },
)


if __name__ == "__main__":
    run()
