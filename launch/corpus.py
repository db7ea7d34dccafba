"""The texts of `tfdist-finetune`, as tokens of a preset's tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tfdist.launch.flag_values import UsageError, input_file

_FILE, _TFDS = "text:", "tfds:"
#: How many characters go to the tokenizer at once: it holds copies of them.
_CHARACTERS = 1 << 16
#: Of a data set without a split for it, the share that is for validation.
_VALIDATION = 10


def check_source(source: str) -> None:
    """Looks at the value of `--dataset`, as far as that reads no data.

    Raises:
        UsageError: It names nothing that can be read.
    """
    if source.startswith(_FILE):
        input_file("dataset", source.removeprefix(_FILE), _FILE)
    elif source != "pydoc" and not (source.startswith(_TFDS) and source.removeprefix(_TFDS)):
        raise UsageError(
            "--dataset must be text:FILE, tfds:NAME or tfds:NAME/FEATURE, or pydoc. Received: "
            f"--dataset={source}."
        )


def read_tokens(source: str, tokenizer: Any, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a text for training, and those for validation.

    Documents of a TFDS data set follow each other with the tokenizer's end token in between.

    Args:
        source: The value of `--dataset`.
        tokenizer: One of KerasHub.
        data_dir: Folder of the TFDS data sets.

    Returns:
        Two arrays of int32, of shape [tokens].

    Raises:
        UsageError: The data cannot be read, or is no text.
    """
    if source.startswith(_TFDS):
        train, validation = _documents(source, data_dir)
        end = getattr(tokenizer, "end_token_id", None)
        return _tokens(train, tokenizer, end), _tokens(validation, tokenizer, end)
    from tfdist.addons.datasets import load_text

    try:
        text = load_text(source)
        # A character that the cut goes through belongs to neither part.
        parts = [_decoded(bytes(part)) for part in (text.train, text.validation)]
    except (ValueError, ImportError) as error:
        raise UsageError(f"--dataset={source}: {error}") from error
    first, second = (_tokens(_pieces(part), tokenizer, None) for part in parts)
    return first, second


def _decoded(part: bytes) -> str:
    """The text of bytes whose ends may be parts of a character."""
    begin = next((i for i, byte in enumerate(part[:4]) if byte & 0xC0 != 0x80), 0)
    try:
        # It waits for the rest of a character at the end.
        return codecs.getincrementaldecoder("utf-8")().decode(part[begin:])
    except UnicodeDecodeError as error:
        raise ValueError(f"The file is no UTF-8 text: {error.reason}.") from error


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces that end where a line does, or where the longest piece does."""
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
        raise UsageError(f"--dataset={source}: {error}") from error
    splits = builder.info.splits
    if "train" not in splits:
        raise UsageError(f"--dataset={source}: it has no split `train`, only {list(splits)}.")
    tested = next((split for split in ("validation", "test") if split in splits), None)
    names = ["train", tested]
    if tested is None:
        names = [f"train[:-{_VALIDATION}%]", f"train[-{_VALIDATION}%:]"]
    found = builder.info.features
    feature = feature or "text"
    if feature not in found or str(found[feature].dtype) != "object":
        named = [key for key in found if str(found[key].dtype) == "object"]
        raise UsageError(
            f"--dataset={source}: it has no text `{feature}`. Name one: tfds:{name}/FEATURE, of {named}."
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
