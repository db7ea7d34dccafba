"""Text as bytes, for language models: one that is included in Python, or a file."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdist.checkpoint.storage import read_bytes
from tfdist.utils import checks

#: One token a byte.
VOCABULARY_SIZE = 256
#: The fraction of a text for training; the rest is for validation.
_TRAIN_SHARE = 0.9

_FILE = "text:"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in two disjoint parts, as tokens of one byte each.

    Attributes:
        name: The argument of `load_text`.
        train: uint8 of shape [bytes].
        validation: uint8 of shape [bytes].
        vocabulary_size: 256.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    vocabulary_size: int = VOCABULARY_SIZE


def load_text(name: str) -> Text:
    r"""Returns a text as bytes, nine tenths for training and one tenth for validation.

    ```pycon
    >>> text = load_text("pydoc")
    >>> bytes(text.train[:31])
    b'The "assert" statement\n*******'
    ```

    The split is deterministic, so all processes that read the same text have the same split.

    Args:
        name: "pydoc" for the reference of the Python language, about 370 kB of English that comes
            with Python (`pydoc_data.topics`) and needs no download; or "text:/path/to/file" for a
            file of any kind, also "text:s3://..." or "text:gs://...", whose last tenth is for validation.

    Returns:
        The text. The pydoc text differs between versions of Python, by a few percent; its losses
        are comparable between runs of one version.

    Raises:
        ValueError: The name is unknown, or the file cannot be read or is empty.
        ImportError: This Python was installed without `pydoc_data`.
    """
    checks.text("name", name)
    if name == "pydoc":
        # The last tenth of each topic, so that both parts include all topics.
        parts = [_cut(topic.encode()) for topic in _pydoc_topics()]
        train, validation = (b"".join(halves) for halves in zip(*parts, strict=True))
    elif name.startswith(_FILE):
        train, validation = _cut(_read(name.removeprefix(_FILE)))
    else:
        raise ValueError(
            f"The `name` of a text must be 'pydoc', or '{_FILE}' and the path of a file. Received: "
            f"{checks.shown(name)}."
        )
    return Text(name, np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8))


def language_model_windows(
    tokens: np.ndarray, length: int, *, shuffle_seed: int | None = None
) -> tf.data.Dataset:
    """Splits a text into windows, each with the tokens that follow those in it.

    ```pycon
    >>> windows = language_model_windows(np.arange(10), 4)
    >>> [(list(x), list(y)) for x, y in windows.as_numpy_iterator()]
    [([0, 1, 2, 3], [1, 2, 3, 4]), ([4, 5, 6, 7], [5, 6, 7, 8])]
    ```

    The windows follow each other without overlap, and an incomplete last one is dropped.

    Args:
        tokens: Integers of shape [tokens].
        length: The number of tokens of a window.
        shuffle_seed: The seed of the order of the windows and of the beginning of the first, within its
            length, which are drawn for each pass over the dataset. Passes are the same in all processes
            with the same seed and global seed of TensorFlow, as all ranks under a strategy have. None:
            from the beginning, in the order of the text.

    Returns:
        Pairs (tokens, next tokens), both int32 of shape [length]; each pass has the same number.

    Raises:
        ValueError: `length` is not positive, or the text is shorter than a window.
    """
    length = checks.integer("length", length, minimum=1)
    shuffle_seed = checks.integer(
        "shuffle_seed", shuffle_seed, minimum=0, maximum=2**63 - 1, optional=True
    )
    found = np.asarray(tokens)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise checks.refuse("tokens", tokens, "integers of shape [tokens]")
    tokens = found
    # A shuffled pass may begin up to a window later, and all have the same number of windows.
    latest = 0 if shuffle_seed is None else length - 1
    num_windows = (len(tokens) - 1 - latest) // length
    if num_windows < 1:
        raise ValueError(
            f"A text must have at least {latest + length + 1} tokens for windows of {length}. Received: "
            f"{checks.shown(tokens)}, {len(tokens)} tokens. Use a longer text, or shorter windows."
        )
    text = tf.constant(tokens)

    def window(start):
        part = tf.cast(tf.ensure_shape(text[start : start + length + 1], [length + 1]), tf.int32)
        return part[:-1], part[1:]

    starts = tf.data.Dataset.range(0, num_windows * length, length)
    if shuffle_seed is None:
        return starts.map(window)
    offsets = tf.data.Dataset.random(shuffle_seed, rerandomize_each_iteration=True).take(1)
    moved = offsets.flat_map(lambda drawn: starts.map(lambda start: start + drawn % length))
    moved = moved.apply(tf.data.experimental.assert_cardinality(num_windows))
    return moved.shuffle(num_windows, seed=shuffle_seed).map(window)


def _pydoc_topics() -> list[str]:
    """The topics by name, without paragraphs that an earlier one includes.

    Chapters repeat their sections, so a validation paragraph of one topic would be a training paragraph
    of another.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    found = []
    for name in sorted(topics):
        new = []
        for paragraph in topics[name].strip().split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                new.append(paragraph)
        found.append("\n\n".join(new) + "\n\n\n")
    return found


def _read(path: str) -> bytes:
    try:
        text = read_bytes(path)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"The text {path!r} cannot be read: {why}.") from error
    if not text:
        raise ValueError(f"A text must not be empty. Received: {path!r}, which has no bytes.")
    return text


def _cut(text: bytes) -> tuple[bytes, bytes]:
    end = int(len(text) * _TRAIN_SHARE)
    return text[:end], text[end:]
