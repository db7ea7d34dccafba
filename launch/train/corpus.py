"""The texts of `tfdist-finetune`, tokenized by a preset's tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tfdist.launch.flags.values import UsageError, data_file

_FILE, _TFDS = "text:", "tfds:"
#: Characters per call of the tokenizer, which limits the memory of its copies.
_CHARACTERS = 1 << 16
#: The percentage for validation of a dataset without a validation or test split.
_VALIDATION = 10


def check_source(source: str) -> None:
    """Check the value of `--dataset` without reading data.

    Raises:
        UsageError: The value is malformed, or the file cannot be read.
    """
    if source.startswith(_FILE):
        data_file("dataset", source.removeprefix(_FILE), _FILE)
    elif source != "pydoc" and not (source.startswith(_TFDS) and source.removeprefix(_TFDS)):
        raise UsageError(
            "--dataset must be text:FILE, tfds:NAME or tfds:NAME/FEATURE, or pydoc. Received: "
            f"--dataset={source}."
        )


def read_tokens(source: str, tokenizer: Any, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Read the tokens of a text for training and for validation.

    Documents of a TFDS dataset are concatenated, each followed by the tokenizer's end token.

    Args:
        source: The value of `--dataset`.
        tokenizer: A tokenizer of KerasHub.
        data_dir: Folder of the TFDS datasets.

    Returns:
        Two arrays of int32, of shape [tokens].

    Raises:
        UsageError: The data cannot be read, or are not text.
    """
    if source.startswith(_TFDS):
        train, validation = _documents(source, data_dir)
        end = getattr(tokenizer, "end_token_id", None)
        return _tokens(train, tokenizer, end), _tokens(validation, tokenizer, end)
    from tfdist.addons.datasets import load_text

    try:
        text = load_text(source)
        # A character that is split between both parts is dropped.
        parts = [_decoded(bytes(part)) for part in (text.train, text.validation)]
    except (ValueError, ImportError) as error:
        raise UsageError(f"--dataset={source} could not be read: {error}") from error
    first, second = (_tokens(_pieces(part), tokenizer, None) for part in parts)
    return first, second


def _decoded(part: bytes) -> str:
    """Decode bytes that may begin and end within a character."""
    begin = next((i for i, byte in enumerate(part[:4]) if byte & 0xC0 != 0x80), 0)
    try:
        # An incremental decoder ignores an incomplete character at the end.
        return codecs.getincrementaldecoder("utf-8")().decode(part[begin:])
    except UnicodeDecodeError as error:
        raise ValueError(f"The file is not UTF-8 text: {error.reason}.") from error


def _pieces(text: str) -> Iterator[str]:
    """Split a text into pieces of limited length, at ends of lines if possible."""
    begin = 0
    while begin < len(text):
        end = begin + _CHARACTERS
        if end < len(text):
            line = text.rfind("\n", begin, end) + 1
            end = line if line > begin else end
        yield text[begin:end]
        begin = end


def _documents(source: str, data_dir: str | None) -> tuple[Iterable[str], Iterable[str]]:
    """The documents of the training split, and of the validation or test split."""
    from tfdist.addons.datasets.loading import open_builder, prepare_builder
    from tfdist.addons.datasets.preparing import import_tfds

    name, _, feature = source.removeprefix(_TFDS).partition("/")
    try:
        builder = open_builder(name, data_dir)
        prepare_builder(builder, name, download=True, instead="--dataset=pydoc or text:FILE")
    except (ValueError, ImportError, RuntimeError) as error:
        raise UsageError(f"--dataset={source} could not be loaded: {error}") from error
    splits = builder.info.splits
    if "train" not in splits:
        raise UsageError(f"--dataset={source} must have a split `train`. Received: {list(splits)}.")
    tested = next((split for split in ("validation", "test") if split in splits), None)
    names = ["train", tested]
    if tested is None:
        names = [f"train[:-{_VALIDATION}%]", f"train[-{_VALIDATION}%:]"]
    found = builder.info.features
    feature = feature or "text"
    if feature not in found or str(found[feature].dtype) != "object":
        named = [key for key in found if str(found[key].dtype) == "object"]
        raise UsageError(
            f"--dataset={source} does not have a text feature `{feature}`. Use tfds:{name}/FEATURE with one "
            f"of {named}."
        )

    def texts(data) -> Iterator[str]:
        for example in import_tfds().as_numpy(data):
            yield example[feature].decode(errors="replace")

    first, second = (texts(builder.as_dataset(split=split)) for split in names)
    return first, second


def _tokens(texts: Iterable[str], tokenizer, end: int | None) -> np.ndarray:
    found = []
    for text in texts:
        for piece in _pieces(text):
            found.append(np.asarray(tokenizer(piece), "int32"))
        if end is not None:
            found.append(np.array([end], "int32"))
    return np.concatenate(found) if found else np.zeros([0], "int32")
