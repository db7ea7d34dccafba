"""The data of `tfdist-finetune`: windows of text, conversations, or pairs of answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.launch.finetune.chat import CHAT
from tfdist.launch.finetune.options import FinetuneOptions
from tfdist.launch.flags.command import UsageError
from tfdist.launch.train.corpus import read_tokens
from tfdist.utils.checks import one_line


@dataclasses.dataclass(frozen=True)
class Data:
    """Global batches of rows of tokens.

    Attributes:
        train: Inputs of the task, the next tokens, and weights of these for conversations.
        validation: The same.
        steps: Batches for training.
        tokens: The trained tokens of the validation.
        reduction: Of the loss.
        preprocessor: That of KerasHub; None for conversations.
        tokenizer: Of conversations.
        rows: The conversations.
        pairs: The pairs of answers, for training and for validation; their batches are made later.
        trained: The trained tokens of an epoch, if others have no weight.
    """

    train: Any
    validation: Any
    steps: int
    tokens: int
    reduction: str = "sum_over_batch_size"
    preprocessor: Any = None
    tokenizer: Any = None
    rows: Sequence = ()
    pairs: Sequence = ()
    trained: int | None = None


def read(given: FinetuneOptions, batch_size: int, is_chief: bool) -> Data:
    """The data of the flags.

    Raises:
        UsageError: They cannot be used.
    """
    if given.preferences.is_used:
        return _preferences(given, batch_size, is_chief)
    if given.dataset.startswith(CHAT):
        return _conversations(given, batch_size, is_chief)
    return _windows(given, batch_size)


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


def _windows(given: FinetuneOptions, batch_size: int) -> Data:
    """Windows of text."""
    import tensorflow as tf

    from tfdist.addons.datasets import language_model_windows

    length = given.seq_length
    preprocessor = _preprocessor(given)
    train, validation = read_tokens(given.dataset, preprocessor.tokenizer, given.data_dir)

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
    return Data(
        trained.batch(batch_size, drop_remainder=True).prefetch(2),
        tested.batch(batch_size).cache(),
        steps,
        int(tested.cardinality()) * length,
        preprocessor=preprocessor,
    )


def _tokenizer(given: FinetuneOptions):
    """The tokenizer of conversations, which can answer the prompt."""
    from tfdist.addons.hub.chat.answering import prompt_ids

    tokenizer = given.chat.read_tokenizer(str(given.preset))
    if given.prompt is not None:
        messages = [{"role": "user", "content": given.prompt}]
        try:
            prompt_ids(tokenizer, messages, length=given.seq_length)
        except ValueError as error:
            raise UsageError(f"--prompt cannot be answered: {error}") from error
    return tokenizer


def _conversations(given: FinetuneOptions, batch_size: int, is_chief: bool) -> Data:
    """Rows of conversations."""
    from tfdist.addons.hub.chat.data import chat_batches

    tokenizer = _tokenizer(given)
    found = given.chat.read(given.dataset, tokenizer, 1, given.seq_length)
    rows, others = ([row for (row,) in lines] for lines in found)
    options: dict[str, Any] = {"length": given.seq_length, "packing": given.chat.packing}
    updates = given.optimizer.accumulate if given.chat.loss_average == "update" else 1
    train = chat_batches(rows, batch_size, updates=updates, seed=given.seed, **options)
    tested = chat_batches(others, batch_size, **options)
    if is_chief:
        _show(given, rows, tokenizer)
        tokens = sum(map(len, rows))
        alone = 1 - tokens / (len(rows) * given.seq_length)
        print(
            f"{len(rows):,} conversations of {tokens:,} tokens, of which {train.tokens:,} are trained; "
            f"{train.padding:.1%} of the rows is padding{f', instead of {alone:.1%}' * given.chat.packing}."
        )
    return Data(
        train.dataset,
        tested.dataset,
        train.steps,
        tested.tokens,
        "sum",
        tokenizer=tokenizer,
        rows=[*rows, *others],
        trained=train.tokens,
    )


def _preferences(given: FinetuneOptions, batch_size: int, is_chief: bool) -> Data:
    """Pairs of answers."""
    from tfdist.addons.hub.preferences.data import Pairs

    tokenizer = _tokenizer(given)
    train, tested = given.chat.read(given.dataset, tokenizer, 2, given.seq_length)
    rows = [row for pair in [*train, *tested] for row in pair]
    if len(train) < batch_size:
        raise UsageError(
            f"--batch_size must be at most the {len(train)} training pairs of {given.dataset}. Received: "
            f"--batch_size={batch_size}."
        )
    if is_chief:
        _show(given, rows, tokenizer)
        print(f"{len(train):,} pairs for training, and {len(tested):,} for validation.")
    return Data(
        None,
        None,
        len(train) // batch_size,
        sum(row.targets for pair in tested for row in pair),
        tokenizer=tokenizer,
        rows=rows,
        pairs=[Pairs.of(each, given.seq_length) for each in (train, tested)],
    )


def referenced(
    given: FinetuneOptions, data: Data, model, backbone, batch_size: int, ranks: int
) -> Data:
    """Batches of pairs, with log-probabilities by the reference model; every rank calls this.

    Args:
        given: The options.
        data: The data, with pairs.
        model: The model, in its initial state.
        backbone: Its backbone.
        batch_size: The pairs of a global batch.
        ranks: The ranks with different rows.
    """
    options: dict[str, Any] = {"rows": 2 * batch_size, "chunk_size": given.chunk_size}
    pairs = [given.preferences.referenced(each, model, backbone, **options) for each in data.pairs]
    return dataclasses.replace(
        data,
        train=pairs[0].batches(batch_size, seed=given.seed),
        validation=pairs[1].batches(batch_size, ranks=ranks),
        pairs=pairs,
    )


def _show(given: FinetuneOptions, rows: Sequence, tokenizer) -> None:
    """Print the tokens of the first rows."""
    from tfdist.addons.hub.chat.rows import shown

    for row in rows[: given.chat.show]:
        print(shown(row, tokenizer))
