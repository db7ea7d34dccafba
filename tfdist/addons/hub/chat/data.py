"""Chat data as batches for `fit`: rows of one length, with weights that make the loss a mean over trained tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist.addons.hub.chat.packing import Batch, packed
from tfdist.addons.hub.chat.records import RecordError, read_records
from tfdist.addons.hub.chat.rows import TRUNCATIONS, Row, rows_of
from tfdist.addons.hub.chat.tokenizer import ChatTokenizer
from tfdist.utils import checks

#: Of ten conversations, one is for validation.
_ONE_OF = 10
#: The answers of a line, by their number.
_ANSWERS = {1: "one answer", 2: "a chosen and a rejected answer"}


def read_rows(
    path: str | Path,
    tokenizer: ChatTokenizer,
    *,
    length: int,
    truncation: str = "keep_start",
) -> list[Row]:
    """The token rows of a file of conversations, without those whose answers are cut off.

    Args:
        path: A file of JSON lines.
        tokenizer: The tokenizer, with a chat template.
        length: The most tokens of a row.
        truncation: "keep_start" or "keep_end": the part that is kept of a longer one.

    Raises:
        OSError: The file cannot be read.
        ValueError: An argument is invalid.
        RecordError: A line is not a conversation with an answer, or a preference.
    """
    checks.path("path", path)
    checks.instance("tokenizer", tokenizer, ChatTokenizer, "a ChatTokenizer")
    checks.integer("length", length, minimum=2)
    checks.one_of("truncation", truncation, TRUNCATIONS)
    found = read_answers(path, tokenizer, 1, length=length, truncation=truncation)
    return [row for (row,) in found]


def read_answers(
    path: str | Path, tokenizer: ChatTokenizer, count: int, *, length: int, truncation: str
) -> list[tuple[Row, ...]]:
    """The token rows of each line of a file, without lines of which an answer is cut off.

    Args:
        path: A file of JSON lines.
        tokenizer: The tokenizer.
        count: The answers of a line: 1, or 2 for a chosen and a rejected one.
        length: The most tokens of a row.
        truncation: As for `read_rows`.

    Raises:
        OSError: The file cannot be read.
        RecordError: A line has another number of answers.
    """
    found = []
    for record in read_records(path, count):
        if len(record.answers) != count:
            wanted, received = _ANSWERS[count], _ANSWERS[len(record.answers)]
            raise RecordError(f"A line must have {wanted}. Received: {received}.", record.place)
        rows = rows_of(record, tokenizer)
        found.append(tuple(row.truncated(length, truncation) for row in rows))
    kept = [rows for rows in found if all(row.targets for row in rows)]
    if not kept:
        raise RecordError(
            f"A file must have answers within the first or last {length} tokens. Received: {len(found)} lines "
            "without any.",
            str(path),
        )
    return kept


def held_out(rows: Sequence) -> tuple[list, list]:
    """Rows, or pairs of them, for training and for validation: the last tenth, at least one.

    Raises:
        ValueError: There are fewer than two rows.
    """
    count = max(len(rows) // _ONE_OF, 1)
    if len(rows) < 2:
        raise ValueError(
            f"Training and validation require at least two conversations. Received: {len(rows)}."
        )
    return list(rows[:-count]), list(rows[-count:])


@dataclasses.dataclass(frozen=True)
class ChatBatches:
    """Batches of rows.

    Attributes:
        dataset: Of ({"token_ids", "padding_mask"}, targets, weights), each [rows, length].
        steps: The number of batches.
        tokens: The number of trained tokens.
        padding: The share of all tokens that is padding.
    """

    dataset: tf.data.Dataset
    steps: int
    tokens: int
    padding: float


def chat_batches(
    rows: Sequence[Row],
    size: int,
    *,
    length: int,
    packing: bool = False,
    updates: int | None = None,
    seed: int | None = None,
    pad: int = 0,
) -> ChatBatches:
    """Batches of rows, for a loss with reduction "sum", which then is the mean over trained tokens.

    Rows of padding without weights complete the last batch.

    Args:
        rows: The rows, of at most `length` tokens.
        size: The rows of a global batch.
        length: The tokens of a row.
        packing: Whether a row of a batch may have several rows. `padding_mask` is then that of
            `tfdist.addons.hub.documents`.
        updates: The batches whose trained tokens are counted together, such as those that an optimizer
            accumulates; None for all, so that the mean of the losses of all batches is that of all tokens.
        seed: Of the order, another one in each epoch; None for the given order.
        pad: The id of padding.

    Raises:
        ValueError: An argument is invalid.
    """
    if not checks.sequence("rows", rows, "rows") or not all(isinstance(row, Row) for row in rows):
        raise checks.refuse("rows", rows, "a non-empty list of rows of `read_rows`")
    checks.integer("size", size, minimum=1)
    checks.integer("length", length, minimum=2)
    checks.boolean("packing", packing)
    checks.integer("updates", updates, minimum=1, optional=True)
    checks.integer("seed", seed, minimum=0, optional=True)
    checks.integer("pad", pad, minimum=0)
    batch = packed(rows, length, pad=pad, pack=packing)
    count = len(batch.ids)
    steps = -(-count // size)
    together = updates or steps
    steps = -(-steps // together) * together
    arrays = _padded(batch, steps * size, pad, packing)
    data = tf.data.Dataset.from_tensor_slices(arrays)
    if seed is not None:
        data = data.shuffle(steps * size, seed=seed, reshuffle_each_iteration=True)

    def weighted(ids, mask, targets, weights):
        total = tf.maximum(tf.reduce_sum(weights), 1.0)
        found = {"token_ids": ids, "padding_mask": mask}, targets, weights * (together / total)
        return tf.nest.map_structure(lambda each: tf.reshape(each, [together, size, length]), found)

    data = data.batch(together * size, drop_remainder=True).map(weighted).unbatch().prefetch(2)
    return ChatBatches(data, steps, int(batch.weights.sum()), batch.padding)


def _padded(batch: Batch, count: int, pad: int, packing: bool) -> tuple[np.ndarray, ...]:
    """The ids, masks, targets and weights, with rows of padding."""
    masks = (batch.documents > 0).astype("int32")
    if packing:
        # 1 + the place of the first token of the document.
        masks *= 1 + np.arange(masks.shape[1], dtype="int32") - batch.positions
    rest = [(0, count - len(batch.ids)), (0, 0)]
    ids, targets = (np.pad(each, rest, constant_values=pad) for each in (batch.ids, batch.targets))
    masks, weights = (np.pad(each, rest) for each in (masks, batch.weights))
    # No row is without any token that attention can see.
    masks[len(batch.ids) :, 0] = 1
    return ids, masks, targets, weights
