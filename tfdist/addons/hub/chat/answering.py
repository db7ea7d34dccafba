"""Answers of a model to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.addons.hub.chat.tokenizer import ChatTokenizer


def answer(
    task: Any,
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    length: int,
) -> str:
    """What a model answers to messages; every rank of a split model calls it.

    Args:
        task: A causal language model of KerasHub, or a `PipelineModel` of one.
        tokenizer: The tokenizer, with a chat template.
        messages: Messages with `role` and `content`, or one text without a template.
        length: The most tokens, with those of the messages.

    Raises:
        ValueError: The messages have `length` tokens or more, or the folder has no chat template.
    """
    if tokenizer.template is None:
        raise ValueError(
            f"Messages require a chat template, which {tokenizer.folder} does not have. Use a folder with one."
        )
    text = tokenizer.template.render(tuple(messages), "messages", add_generation_prompt=True)
    ids = tokenizer.encode(text).ids
    if len(ids) >= length:
        raise ValueError(
            f"Messages must have fewer than {length} tokens. Received: {len(ids)}. Begin again."
        )
    # KerasHub inverts the mask bit by bit, so it must be one of bools; and it looks for the end of an answer also in
    # places that are still to be written.
    tokens, mask = np.full([1, length], tokenizer.blank, "int32"), np.zeros([1, length], "bool")
    tokens[0, : len(ids)], mask[0, : len(ids)] = ids, True
    found = task.generate(
        {"token_ids": tokens, "padding_mask": mask}, stop_token_ids=tuple(sorted(tokenizer.stops))
    )
    written = np.asarray(found["token_ids"])[0, len(ids) :].tolist()
    end = next((at for at, number in enumerate(written) if number in tokenizer.stops), None)
    return tokenizer.decode(written[:end]).strip()
