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

from tfdist.launch.finetune.options import ADAPTER, BATCH_SIZE, FinetuneOptions
from tfdist.launch.flags import command
from tfdist.launch.flags.command import UsageError
from tfdist.launch.flags.mesh import Layout, MeshOptions
from tfdist.launch.flags.optimizer import PresetOptimizerOptions
from tfdist.launch.flags.options import define_flags, names
from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.train.corpus import read_tokens
from tfdist.launch.train.fitting import (
    add_recompute,
    expected_errors,
    pipelined,
    speed_callback,
    warmup_cosine,
)
from tfdist.launch.train.world import OF_RANKS, World
from tfdist.utils.checks import one_line

_FLAGS = define_flags(FinetuneOptions)


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


def _check(_: list[str]) -> tuple[FinetuneOptions, Layout]:
    options = _FLAGS.read()
    return options, options.check()


def _main(checked: tuple[FinetuneOptions, Layout]) -> None:
    given, layout = checked
    with quiet_start():
        import keras
        import tensorflow as tf

        import tfdist

        tf.config.list_physical_devices()

    # --- Ranks ---------------------------------------------------------------------------------
    if given.threads:
        tf.config.threading.set_intra_op_parallelism_threads(given.threads)
    on = given.world.make(layout, given.mesh)
    batch_size = layout.batch_size(given.batch_size, BATCH_SIZE, on.data)
    keras.utils.set_random_seed(given.seed)

    # --- Data: every rank reads the global batches and keeps its own rows -----------------------
    preprocessor = _preprocessor(given)
    windows = _windows(given, preprocessor.tokenizer, batch_size)

    # --- Model ---------------------------------------------------------------------------------
    with on.strategy.scope():
        task = _load(given)
        rows = -(-(batch_size // on.data) // layout.num_microbatches)
        add_recompute(task, given.recompute, rows, (given.seq_length,))
        model = pipelined(task, layout, (given.seq_length,))
        rate = warmup_cosine(given.learning_rate, given.epochs * windows.steps)
        loss = tfdist.layers.VocabParallelCrossEntropy(
            task.output.shape[-1], chunk_size=given.loss_chunk or None
        )
        # The default metric of a task requires whole logits.
        options = {"weighted_metrics": None} if model is task else {}
        with given.optimizer.expected_errors():
            optimizer = given.optimizer.make("AdamW", rate, weight_decay=0.01, global_clipnorm=1.0)
            model.compile(
                given.optimizer.scaled(optimizer),
                loss,
                steps_per_execution=min(on.steps_per_execution, windows.steps),
                **options,
                **given.optimizer.compile_options,
            )
    if on.is_chief:
        print(_sizes(task, on), flush=True)

    # --- Training ------------------------------------------------------------------------------
    speed = speed_callback(windows.steps * batch_size * given.seq_length)
    callbacks = [speed, tfdist.callbacks.TerminateOnNonFinite()]
    callbacks += given.checkpoints.callbacks(batch_size)
    with (
        expected_errors(given.checkpoints.workdir, given.dataset),
        given.optimizer.expected_errors(),
    ):
        before = model.evaluate(windows.validation, verbose=0)
        history = model.fit(
            windows.train,
            validation_data=windows.validation,
            epochs=given.epochs,
            callbacks=callbacks,
            verbose=given.verbose,
            shuffle=False,
        )

    # --- Result --------------------------------------------------------------------------------
    task.preprocessor = preprocessor
    lines = []
    if given.prompt is not None:
        text = task.generate(given.prompt, max_length=given.seq_length)
        lines.append(f"{task.name} writes:\n{text}")
    if given.output is not None:
        lines.append(f"Saved: {_save(given, task)}")
    loss = history.history["val_loss"][-1]
    if given.optimizer.averages:  # They replace the weights at the end of `fit`.
        loss = model.evaluate(windows.validation, verbose=0)
    lines.append(
        f"Validation loss {loss:.4f}, perplexity {_perplexity(before)} before and "
        f"{_perplexity(loss)} after, on {windows.tokens:,} tokens of {given.dataset}; "
        f"{speed.items_per_second:,.0f} tokens/s on {on.words}."
    )
    if on.is_chief:
        print("\n".join(lines))


def _preprocessor(given: FinetuneOptions):
    try:
        import keras_hub
    except ImportError as error:
        raise UsageError(
            "tfdist-finetune requires KerasHub, which is not installed: pip install keras-hub."
        ) from error
    try:
        return keras_hub.models.CausalLMPreprocessor.from_preset(
            given.preset, sequence_length=given.seq_length
        )
    except Exception as error:
        # The classes that a preset names may raise any exception.
        raise UsageError(
            f"The tokenizer of --preset={given.preset} cannot be read: {one_line(error)}"
        ) from error


def _windows(given: FinetuneOptions, tokenizer, batch_size: int) -> _Windows:
    import tensorflow as tf

    from tfdist.addons.datasets import language_model_windows

    length = given.seq_length
    train, validation = read_tokens(given.dataset, tokenizer, given.data_dir)

    def cut(name, tokens, seed):
        try:
            found = language_model_windows(tokens, length, shuffle_seed=seed)
        except ValueError as error:
            raise UsageError(
                f"--seq_length={length} is not supported for the {name} part of {given.dataset}: {error}"
            ) from error
        mask = tf.ones([length], tf.int32)
        return found.map(lambda x, y: ({"token_ids": x, "padding_mask": mask}, y))

    trained, tested = cut("train", train, given.seed), cut("validation", validation, None)
    steps = int(trained.cardinality()) // batch_size
    if not steps:
        raise UsageError(
            f"--batch_size must be at most the {int(trained.cardinality())} training windows of {length} "
            f"tokens of {given.dataset}. Received: --batch_size={batch_size}."
        )
    return _Windows(
        trained.batch(batch_size, drop_remainder=True).prefetch(2),
        tested.batch(batch_size).cache(),
        steps,
        int(tested.cardinality()) * length,
    )


def _load(given: FinetuneOptions):
    """Load the task, with a quantized base and adapters if requested."""
    import keras

    import tfdist

    options = {} if given.optimizer.policy is None else {"dtype": given.optimizer.policy}
    try:
        task = tfdist.load_preset(str(given.preset), preprocessor=None, compile=False, **options)
        backbone = task.backbone
        if given.quantize != "none":
            # Embeddings are excluded, because Keras' gradients of quantized reverse embeddings are wrong.
            products = (keras.layers.Dense, keras.layers.EinsumDense)
            config = None
            if given.quantize == "int4":
                config = keras.quantizers.Int4QuantizationConfig(block_size=given.block_size)
            backbone.quantize(
                given.quantize, config=config, filters=lambda layer: isinstance(layer, products)
            )
        if given.lora_rank:
            backbone.enable_lora(given.lora_rank)
            for variable in [] if given.train_biases else backbone.trainable_variables:
                # KerasHub trains biases, but does not save them in adapter files.
                variable.trainable = variable.name.startswith("lora_")
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(
            f"--preset={given.preset} could not be loaded: {one_line(error)}"
        ) from error
    inputs = task.input
    if not isinstance(inputs, dict) or set(inputs) != {"token_ids", "padding_mask"}:
        raise UsageError(
            f"--preset={given.preset} must be a model with the inputs token_ids and padding_mask. "
            f"Received: inputs {sorted(inputs) if isinstance(inputs, dict) else inputs}."
        )
    longest = getattr(backbone, "max_sequence_length", None)
    if longest is not None and given.seq_length > longest:
        raise UsageError(
            f"--seq_length must be at most {longest}, the number of the model's position embeddings. "
            f"Received: --seq_length={given.seq_length}."
        )
    return task


def _save(given: FinetuneOptions, task) -> str:
    place = Path(str(given.output)).expanduser()
    if not given.lora_rank:
        task.save_to_preset(str(place))
        return str(place)
    place.mkdir(parents=True, exist_ok=True)
    task.backbone.save_lora_weights(str(place / ADAPTER))
    return str(place / ADAPTER)


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
    _FLAGS.values,
    usage="tfdist-finetune --preset=FOLDER [flags]",
    summary="Fine-tunes a language model of KerasHub on the ranks that tfdist-run or horovodrun starts.",
    check=_check,
    folded={
        "for the steps": [
            *("seed", "loss_chunk", "train_biases", "block_size", "recompute"),
            *names(PresetOptimizerOptions),
            "steps_per_execution",
        ],
        "for checkpoints": ["save_every", "keep"],
        "for memory and links": ["zero_stage", "communication_dtype", "compression"],
        "for the ranks": [*names(MeshOptions, without=["zero_stage"]), "threads", *OF_RANKS],
    },
)


if __name__ == "__main__":
    run()
