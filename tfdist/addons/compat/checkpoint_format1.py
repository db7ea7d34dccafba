"""Checkpoints of format 1, which earlier versions wrote: their names, and how they are read.

Their manifest has no checksums of files, so a file is accepted only if it equals what was written then.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import keras

from tfdist.backend.keras.attributes import own_variables
from tfdist.checkpoint.chunks import CRC_BYTES, chunk_shape_of, decode, item_bytes, metadata_of
from tfdist.checkpoint.errors import StorageError
from tfdist.checkpoint.manifest import Manifest, array_of, pair_of, require
from tfdist.checkpoint.names import numbered
from tfdist.checkpoint.storage import Storage

_DESCRIPTION_BYTES = 1 << 20


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


class Format1(Manifest):
    """The manifest of a checkpoint of format 1."""

    names: ClassVar[Any] = SimpleNamespace(
        model_names=lambda model, variables: model_names(variables),
        metric_names=model_names,
        optimizer_names=optimizer_names,
    )

    @staticmethod
    def has_right_digest(found: dict[str, Any], content: dict[str, Any]) -> bool:
        """See `Manifest.has_right_digest`."""
        return found.get("crc32") == zlib.crc32(json.dumps(content, sort_keys=True).encode())

    @classmethod
    def parsed(
        cls, step: int, listed: dict[str, Any], state: dict[str, Any], content: dict[str, Any]
    ) -> Manifest:
        """See `Manifest.parsed`."""
        arrays = {name: array_of(name, *pair_of(each)) for name, each in listed.items()}
        for name in arrays:
            is_safe = all(part.strip(".") for part in name.split("/")) and "\0" not in name
            require(is_safe, f"`{name!r:.50}` is not the name of an array")
        return cls(step, arrays, state)

    def read_file(self, storage: Storage, name: str, key: str) -> bytes:
        """See `Manifest.read_file`; the content must be as tfdist wrote it."""
        shape, dtype = self.arrays[name]
        chunk, path = chunk_shape_of(shape, dtype), f"arrays/{name}/{key}"
        is_chunk = key != "zarr.json"
        size = math.prod(chunk) * item_bytes(dtype) + CRC_BYTES if is_chunk else _DESCRIPTION_BYTES
        content = storage.read(path, size)
        if content is None:
            raise StorageError(
                f"The array `{name}` in {storage.path} is not valid: {key} is missing."
            )
        try:
            if is_chunk:
                decode(content, chunk, dtype, checks=True)
                return content
            found = json.loads(content.decode())
        except (StorageError, ValueError, RecursionError) as error:
            raise StorageError(
                f"{storage.path}/{path} is corrupt and could not be read: {error}."
            ) from error
        right: dict[str, Any] = {
            **metadata_of(shape, dtype, chunk),
            "chunk_key_encoding": {"name": "default"},
            "node_type": "array",
            "zarr_format": 3,
        }
        if item_bytes(dtype) == 1:
            right["codecs"] = [{"name": "bytes"}, {"name": "crc32c"}]
        fill = found.pop("fill_value", None) if isinstance(found, dict) else None
        if fill != 0 or json.dumps(found, sort_keys=True) != json.dumps(right, sort_keys=True):
            raise StorageError(
                f"The array `{name}` in {storage.path} is not valid: its zarr.json is not the one "
                f"that tfdist writes for {dtype}{list(shape)}."
            )
        return content
