"""`tfdist-finetune`: fine-tune a language model of KerasHub or Hugging Face on text or conversations.

    tfdist-finetune --preset=gpt2-local/ --dataset=text:notes.txt --lora_rank=8
    tfdist-run -np 2 -- tfdist-finetune --preset=llama3-local/ --tensor=2 --lora_rank=8 \
        --dataset=chat:conversations.jsonl --packing --output=tuned/ --export=hf,peft

The preset is a folder of Hugging Face, or one written by KerasHub's `save_to_preset`; each rank reads only
its shards.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from tfdist.launch.finetune.chat import ChatOptions, check_tokens
from tfdist.launch.finetune.data import Data, read, referenced
from tfdist.launch.finetune.options import ADAPTER, BATCH_SIZE, HUB, FinetuneOptions
from tfdist.launch.finetune.preferences import PreferenceOptions
from tfdist.launch.finetune.talk import TALK
from tfdist.launch.flags import command
from tfdist.launch.flags.command import UsageError
from tfdist.launch.flags.mesh import Layout, MeshOptions
from tfdist.launch.flags.optimizer import PresetOptimizerOptions
from tfdist.launch.flags.options import define_flags, names
from tfdist.launch.flags.quiet import quiet_start
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


def run() -> None:
    """Run the console script, or `chat`."""
    program, *words = sys.argv
    if words[:1] == ["chat"]:
        TALK.run([program, *words[1:]])
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
    in_pairs = given.preferences.is_used
    batch_size = layout.batch_size(given.batch_size, BATCH_SIZE, on.data, equal=in_pairs)
    global_rows = batch_size * (2 if in_pairs else 1)
    keras.utils.set_random_seed(given.seed)

    # --- Data: every rank reads the global batches and keeps its own rows -----------------------
    given = dataclasses.replace(given, preset=_downloaded(str(given.preset)))
    data = read(given, batch_size, on.is_chief)

    # --- Model ---------------------------------------------------------------------------------
    with on.strategy.scope():
        task = _load(given)
        check_tokens(data.rows, task)
        trained = _separated(task) if given.chat.packing else task
        rows = -(-(global_rows // on.data) // layout.num_microbatches)
        if given.prompt is not None and trained is not task and layout.pipeline > 1:
            raise UsageError(
                "--prompt is not supported with --packing and --pipeline for a model with learned positions. "
                f"Received: {task.name}. Omit --prompt, or use --tensor."
            )
        add_recompute(trained, given.recompute, rows, (given.seq_length,))
        model = pipelined(trained, layout, (given.seq_length,))
    if data.pairs:
        data = referenced(given, data, model, task.backbone, batch_size, on.data)
    with on.strategy.scope():
        rate = warmup_cosine(given.learning_rate, given.epochs * data.steps)
        vocabulary = task.output.shape[-1]
        if data.pairs:
            loss = given.preferences.loss(vocabulary, given.chunk_size)
        else:
            loss = tfdist.layers.VocabParallelCrossEntropy(
                vocabulary, data.reduction, chunk_size=given.chunk_size
            )
        # What writes texts: a model with learned positions in documents does not.
        writer = model if hasattr(model, "generate") else task
        options: dict[str, Any] = {}
        if data.tokenizer is not None:
            # Answers are the most probable ones.
            if writer is model:
                options["sampler"] = "greedy"
            else:
                task.compile(sampler="greedy")
        with given.optimizer.expected_errors():
            optimizer = given.optimizer.make("AdamW", rate, weight_decay=0.01, global_clipnorm=1.0)
            model.compile(
                given.optimizer.scaled(optimizer),
                loss,
                # The default metric of a task requires whole logits.
                weighted_metrics=None,
                steps_per_execution=min(on.steps_per_execution, data.steps),
                **options,
                **given.optimizer.compile_options,
            )
    if on.is_chief:
        print(_sizes(task, on), flush=True)

    # --- Training ------------------------------------------------------------------------------
    tokens = data.steps * global_rows * given.seq_length
    speed = speed_callback(tokens)
    callbacks = [speed, tfdist.callbacks.TerminateOnNonFinite()]
    callbacks += given.checkpoints.callbacks(global_rows)
    if given.patience:
        callbacks.append(keras.callbacks.EarlyStopping("val_loss", patience=given.patience))
    if given.chat.sample_every:
        callbacks.append(_samples(given, writer, data.tokenizer, on.is_chief))
    with (
        expected_errors(given.checkpoints.workdir, given.dataset),
        given.optimizer.expected_errors(),
    ):
        before = model.evaluate(data.validation, verbose=0)
        history = model.fit(
            data.train,
            validation_data=data.validation,
            epochs=given.epochs,
            callbacks=callbacks,
            verbose=given.verbose,
            shuffle=False,
        )

    # --- Result --------------------------------------------------------------------------------
    saved = []
    if given.output is not None:
        saved = _save(given, task, model, data, on.is_chief)
    lines = []
    if given.prompt is not None:
        if data.tokenizer is None:
            task.preprocessor = data.preprocessor
            text = task.generate(given.prompt, max_length=given.seq_length)
        else:
            text = _answer(given, writer, data.tokenizer)
        lines.append(f"{task.name} writes:\n{text}")
    if saved:
        lines.append(f"Saved: {', '.join(saved)}")
    loss = history.history["val_loss"][-1]
    if given.optimizer.averages:  # They replace the weights at the end of `fit`.
        loss = model.evaluate(data.validation, verbose=0)
    shares = f"{speed.items_per_second:,.0f} tokens/s"
    if data.trained is not None:
        shares += f" ({speed.items_per_second * data.trained / tokens:,.0f} of them trained)"
    if data.pairs:
        tested = data.pairs[1]
        agreement = given.preferences.agreement(
            tested, model, rows=global_rows, chunk_size=given.chunk_size
        )
        lines.append(
            f"Validation loss {before:.4f} before and {loss:.4f} after; the chosen answer is preferred in "
            f"{agreement:.1%} of {len(tested):,} pairs of {given.dataset}; {shares} on {on.words}."
        )
    else:
        lines.append(
            f"Validation loss {loss:.4f}, perplexity {_perplexity(before)} before and "
            f"{_perplexity(loss)} after, on {data.tokens:,} tokens of {given.dataset}; "
            f"{shares} on {on.words}."
        )
    if on.is_chief:
        print("\n".join(lines))


def _downloaded(preset: str) -> str:
    """The folder of a preset."""
    if not preset.startswith(HUB):
        return preset
    from tfdist.addons.hub.presets import local_folder

    try:
        return str(local_folder(preset))
    except (ImportError, ValueError) as error:
        raise UsageError(f"--preset={preset} cannot be used: {one_line(error)}") from error


def _separated(task):
    """The model for rows of several conversations."""
    from tfdist.addons.hub.documents import separate_documents

    try:
        return separate_documents(task)
    except ValueError as error:
        raise UsageError(f"--packing is not supported: {error}") from error


def _samples(given: FinetuneOptions, writer, tokenizer, is_chief: bool):
    """A callback that prints the answer to the prompt."""
    import keras

    def on_epoch_end(epoch, logs):
        if (epoch + 1) % given.chat.sample_every:
            return
        text = _answer(given, writer, tokenizer)
        if is_chief:
            print(f"Epoch {epoch + 1} answers: {text}", flush=True)

    return keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)


def _answer(given: FinetuneOptions, writer, tokenizer) -> str:
    """The answer to the prompt."""
    from tfdist.addons.hub.chat.answering import answer

    messages = [{"role": "user", "content": given.prompt}]
    return answer(writer, tokenizer, messages, length=given.seq_length)


def _load(given: FinetuneOptions):
    """Load the task, with a quantized base and adapters if requested."""
    import keras

    import tfdist
    from tfdist.addons.hub import train_only_adapters
    from tfdist.addons.hub.exporters import check_exporter

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
            if not given.train_biases:
                train_only_adapters(backbone)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(
            f"--preset={given.preset} could not be loaded: {one_line(error)}"
        ) from error
    try:
        if given.export:
            check_exporter(task)
    except (ImportError, ValueError) as error:
        raise UsageError(f"--export={','.join(given.export)} is not supported: {error}") from error
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


def _save(given: FinetuneOptions, task, model, data: Data, is_chief: bool) -> list[str]:
    """Writes the result, in each format, and has transformers read it; the paths."""
    place = Path(str(given.output)).expanduser()
    task.preprocessor = data.preprocessor
    place.mkdir(parents=True, exist_ok=True)
    if given.lora_rank:
        task.backbone.save_lora_weights(str(place / ADAPTER))
        saved = [str(place / ADAPTER)]
    else:
        task.save_to_preset(str(place))
        saved = [str(place)]
    for kind in given.export:
        from tfdist.addons import hub

        saved.append(str(place / kind))
        try:
            if kind == "peft":
                hub.export_peft(task, place / kind)
            else:
                task.export_to_transformers(place / kind, dequantize=given.quantize != "none")
        except (ImportError, ValueError) as error:
            raise UsageError(f"--export={kind} is not supported: {error}") from error
        if kind == "hf" and data.tokenizer is not None and is_chief:
            data.tokenizer.save(place / kind)
    written = len(saved) - len(given.export)
    for number, kind in enumerate(given.export, start=written):
        saved[number] += _verified(given, model, task, kind, place / kind)
    return saved


def _verified(given: FinetuneOptions, model, task, kind: str, folder: Path) -> str:
    """Has transformers compute the model's logits from an export, if it is there; what to say of it."""
    from tfdist.addons import hub
    from tfdist.addons.hub.importing import folder_of
    from tfdist.addons.hub.verifying import has_transformers

    if given.verify_with is None and not has_transformers():
        return ""
    if kind == "peft" and folder_of(task.backbone) is None:
        return " (not verified: an adapter of a model that has no folder of Hugging Face)"
    try:
        apart = hub.verify_export(model, folder, python=given.verify_with)
    except ImportError as error:
        raise UsageError(f"--export={kind} cannot be verified: {error}") from error
    except ValueError as error:
        raise UsageError(f"--export={kind} was written, but is wrong: {error}") from error
    return "" if apart is None else f" (transformers: its logits, within {apart:.1g})"


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
    summary="Fine-tunes a language model of KerasHub or Hugging Face on the ranks that tfdist-run or horovodrun "
    "starts. `tfdist-finetune chat FOLDER` talks with the result.",
    check=_check,
    folded={
        "for conversations": [*names(ChatOptions), *names(PreferenceOptions)],
        "for the steps": [
            *("seed", "loss_chunk", "train_biases", "block_size", "recompute", "patience"),
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
