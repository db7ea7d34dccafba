"""Checkpoints of format 1, which earlier versions wrote: their names, and how they are read.

Their manifest has no checksums of files, so a file is accepted only if it equals what was written then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist.backend.keras.attributes import own_variables
from tfdist.checkpoint.chunks import CRC_BYTES, chunk_shape_of, decode, item_bytes, metadata_of
from tfdist.checkpoint.errors import StorageError
from tfdist.checkpoint.manifest import Array
from tfdist.checkpoint.names import numbered
from tfdist.checkpoint.storage import Storage

_DESCRIPTION_BYTES = 1 << 20


def check_description(storage: Storage, name: str, array: Array) -> None:
    """Checks that an array's `zarr.json` is as tfdist wrote it.

    Raises:
        StorageError: It is not.
    """
    path = f"arrays/{name}/zarr.json"
    content = storage.read(path, _DESCRIPTION_BYTES)
    if content is None:
        raise StorageError(
            f"The array `{name}` in {storage.path} is not valid: zarr.json is missing."
        )
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise StorageError(
            f"{storage.path}/{path} is corrupt and could not be read: {error}."
        ) from error
    right: dict[str, Any] = {
        **metadata_of(*array, chunk_shape_of(*array)),
        "chunk_key_encoding": {"name": "default"},
        "node_type": "array",
        "zarr_format": 3,
    }
    if item_bytes(array[1]) == 1:
        right["codecs"] = [{"name": "bytes"}, {"name": "crc32c"}]
    fill = found.pop("fill_value", None) if isinstance(found, dict) else None
    if fill != 0 or json.dumps(found, sort_keys=True) != json.dumps(right, sort_keys=True):
        shape, dtype = array
        raise StorageError(
            f"The array `{name}` in {storage.path} is not valid: its zarr.json is not the one that "
            f"tfdist writes for {dtype}{list(shape)}."
        )


def chunk_values(
    storage: Storage, name: str, key: str, chunk: Sequence[int], dtype: str
) -> np.ndarray:
    """The numbers of a chunk.

    Raises:
        StorageError: The chunk is missing or corrupt.
    """
    size = int(np.prod(chunk, dtype=object)) * item_bytes(dtype) + CRC_BYTES
    path = f"arrays/{name}/{key}"
    content = storage.read(path, size)
    if content is None:
        raise StorageError(f"The array `{name}` in {storage.path} is not valid: {key} is missing.")
    try:
        return decode(content, chunk, dtype, checks=True)
    except StorageError as error:
        raise StorageError(
            f"{storage.path}/{path} is corrupt and could not be read: {error}."
        ) from error


def model_names(variables: Sequence[keras.Variable]) -> list[str]:
    """The name of each variable of a model: its path, with layers numbered from the first."""
    found: list[str] = []
    layers: dict[str, str] = {}
    used: set[str] = set()
    for variable in variables:
        layer, _, name = variable.path.rpartition("/")
        if layer not in layers:
            plain = "/".join(re.sub(r"_\d+$", "", part) for part in layer.split("/"))
            layers[layer] = numbered(plain, used)
        found.append("/".join(filter(None, (layers[layer], name))))
    repeated: set[str] = set()
    return [numbered(name, repeated) for name in found]


def optimizer_names(
    optimizer: Any, parameters: Sequence[tuple[keras.Variable, str]]
) -> list[tuple[keras.Variable, str]]:
    """The variables of an optimizer, each with a name as in `names.optimizer_names`."""
    prefixes = sorted(
        ((variable.path.replace("/", "_") + "_", name) for variable, name in parameters),
        key=lambda pair: -len(pair[0]),
    )
    found: list[tuple[keras.Variable, str]] = []
    used: set[str] = set()
    depth: list[Any] = [optimizer]
    while getattr(depth[-1], "inner_optimizer", None) is not None:
        depth.append(depth[-1].inner_optimizer)
    for level, each in enumerate(depth):
        wrappers = level + 1 if each is not depth[-1] else 0
        kind = "/".join(["optimizer"] + ["wrapper"] * wrappers)
        for variable in own_variables(each):
            name = f"{kind}/{variable.name}"
            for prefix, parameter in prefixes:
                if variable.name.startswith(prefix):
                    name = f"{kind}/{variable.name[len(prefix) :]}/{parameter}"
                    break
            found.append((variable, numbered(name, used)))
    return found
