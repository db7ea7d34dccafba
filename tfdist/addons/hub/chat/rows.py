"""Token rows of records, with the tokens that are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from tfdist.addons.hub.chat.records import Record, RecordError
from tfdist.addons.hub.chat.template import Span
from tfdist.addons.hub.chat.tokenizer import ChatTokenizer

TRUNCATIONS = ("keep_start", "keep_end")


@dataclasses.dataclass(frozen=True)
class Row:
    """A text as tokens.

    Attributes:
        ids: The ids.
        trained: Whether each token is predicted in training.
        place: The file and line.
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    place: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        """The number of tokens that are predicted: the first token has nothing before it."""
        return sum(self.trained[1:])

    def truncated(self, length: int, truncation: str) -> Row:
        """The row with at most some tokens, without its end or without its begin."""
        kept = slice(None, length) if truncation == "keep_start" else slice(-length, None)
        return Row(self.ids[kept], self.trained[kept], self.place)


def rows_of(record: Record, tokenizer: ChatTokenizer) -> tuple[Row, ...]:
    """The row of each answer of a record.

    Raises:
        RecordError: There is no answer, an answer does not end in a token that generation stops at, a text has two
            first tokens, or a token is not in the vocabulary.
    """
    return tuple(_row(record, answer, tokenizer) for answer in range(len(record.answers)))


def _row(record: Record, answer: int, tokenizer: ChatTokenizer) -> Row:
    messages = record.messages(answer)
    if messages is None:
        return _of_text(record, answer, tokenizer)
    place = record.place
    try:
        template = tokenizer.needed_template
    except ValueError as error:
        raise RecordError(str(error), place) from error
    first = len(record.prompt)
    text, spans = template.answers(messages, place, first=first, tools=record.tools)
    if not spans:
        raise RecordError(
            "The messages must have an answer, of the role assistant. Received: none, or of weight 0.",
            place,
        )
    if any(
        isinstance(message.get("content"), list) and str(message["content"]) in text
        for message in messages
    ):
        raise RecordError(
            "The template must support a `content` of parts. Received: one that prints the list. Use text.",
            place,
        )
    encoded = tokenizer.encode(text)
    ids = encoded.ids
    if tokenizer.bos is not None and ids[:2] == [tokenizer.bos] * 2:
        raise RecordError("The template must begin with one first token. Received: two.", place)
    trained = [False] * len(ids)
    for span in spans:
        inside = _inside(encoded.spans, span)
        while inside and not text[slice(*encoded.spans[inside[-1]])].strip():
            inside.pop()  # Such as a line break after the end of the turn.
        if not inside or not tokenizer.is_end(ids[inside[-1]]):
            raise RecordError(
                f"Each answer must end in a token that generation stops at, such as the end of a turn. "
                f"Received: {text[slice(*span)][-40:]!r}. Use a template that ends answers with one.",
                place,
            )
        for at in inside:
            trained[at] = True
    return _checked(Row(tuple(ids), tuple(trained), place), tokenizer)


def _inside(spans: Sequence[Span], part: Span) -> list[int]:
    """The tokens that have characters of a part of the text, as in transformers."""
    begin, end = part
    return [at for at, (first, last) in enumerate(spans) if first < end and begin < last]


def _of_text(record: Record, answer: int, tokenizer: ChatTokenizer) -> Row:
    """The tokens of a text and its end; those of the prompt are not trained."""
    prompt, text = str(record.prompt), str(record.answers[answer])
    encoded = tokenizer.encode(prompt + text, special=True)
    ids = encoded.ids
    # A token may have characters of both: then it is one of the answer.
    trained = [not prompt or end > len(prompt) for _, end in encoded.spans]
    if tokenizer.eos is not None:
        if ids[-1:] == [tokenizer.eos]:
            ids, trained = ids[:-1], trained[:-1]
        ids, trained = [*ids, tokenizer.eos], [*trained, True]
    return _checked(Row(tuple(ids), tuple(trained), record.place), tokenizer)


def _checked(row: Row, tokenizer: ChatTokenizer) -> Row:
    if not row.targets:
        raise RecordError(f"A text must have at least two tokens. Received: {len(row)}.", row.place)
    return row


def check_vocabulary(rows: Iterable[Row], size: int) -> Iterator[Row]:
    """The rows.

    Raises:
        RecordError: A token is not in the vocabulary of the model.
    """
    for row in rows:
        if max(row.ids) >= size:
            raise RecordError(
                f"Tokens must be less than {size:,}, the vocabulary of the model. Received: "
                f"{max(row.ids):,}. The tokenizer has tokens that the model does not.",
                row.place,
            )
        yield row


def shown(row: Row, tokenizer: ChatTokenizer) -> str:
    """The tokens of a row, each on a line with its id; trained ones have a mark."""
    lines = [
        f"{'>' if trained else ' '} {number:>7} {tokenizer.token(number)!r}"
        for number, trained in zip(row.ids, row.trained, strict=True)
    ]
    return "\n".join([f"{row.place}: {len(row)} tokens, {row.targets} trained (>)", *lines])
