"""Answers of a model to messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.addons.hub.chat.tokenizer import ChatTokenizer


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers to the same messages.

    Attributes:
        ids: int32, [answers, length]: messages, answer, padding.
        begin: The place of the first token of each answer.
        ends: The place after the last token of each answer, which may end it.
        texts: The answers, without the tokens that end them.
    """

    ids: np.ndarray
    begin: int
    ends: np.ndarray
    texts: list[str]


def prompt_ids(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], *, length: int
) -> list[int]:
    """The tokens of messages and of the begin of an answer.

    Args:
        tokenizer: The tokenizer, with a chat template.
        messages: Messages with `role` and `content`.
        length: The most tokens, with those of the answer.

    Raises:
        ValueError: The messages have `length` tokens or more, the template refuses them, or there is none.
    """
    text = tokenizer.needed_template.render(tuple(messages), "messages", add_generation_prompt=True)
    ids = tokenizer.encode(text).ids
    if len(ids) >= length:
        raise ValueError(f"Messages must have fewer than {length} tokens. Received: {len(ids)}.")
    return ids


def answers(
    task: Any,
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    length: int,
    count: int = 1,
) -> Answers:
    """What a model answers to messages; every rank of a split model calls it.

    Args:
        task: A causal language model of KerasHub, or a `PipelineModel` of one.
        tokenizer: The tokenizer, with a chat template.
        messages: Messages with `role` and `content`.
        length: The most tokens, with those of the messages.
        count: The number of answers.

    Raises:
        ValueError: As for `prompt_ids`.
    """
    ids = prompt_ids(tokenizer, messages, length=length)
    # KerasHub inverts the mask bit by bit, so it must be one of bools; and it looks for the end of an answer also in
    # places that are still to be written.
    tokens = np.full([count, length], tokenizer.blank, "int32")
    mask = np.zeros([count, length], "bool")
    tokens[:, : len(ids)], mask[:, : len(ids)] = ids, True
    stops = tuple(sorted(tokenizer.stops))
    found = task.generate({"token_ids": tokens, "padding_mask": mask}, stop_token_ids=stops)
    rows = np.array(found["token_ids"], "int32")
    ends, texts = np.full([count], length), []
    for number, row in enumerate(rows):
        written = row[len(ids) :]
        stopped = np.flatnonzero(np.isin(written, stops))
        if len(stopped):
            ends[number] = len(ids) + stopped[0] + 1
            written = written[: stopped[0]]
        rows[number, ends[number] :] = 0
        texts.append(tokenizer.decode(written.tolist()))
    return Answers(rows, len(ids), ends, texts)


def answer(
    task: Any, tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], *, length: int
) -> str:
    """The text of one answer; see `answers`."""
    return answers(task, tokenizer, messages, length=length).texts[0].strip()
