"""Weights in the files of transformers, one tensor at a time.

KerasHub's exporters return all tensors of a model at once. Here they run in a graph, on placeholders, which shows
the variables that each tensor is computed from; a tensor is computed when its turn has come.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.hub.merging import PlainModel
from tfdist.tensor_parallel.attributes import variables_of_layer

#: The file of a model in one file, and the list of several.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The names of dtypes in these files.
_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


@dataclasses.dataclass(frozen=True)
class Exporter:
    """What KerasHub's exporter computes.

    Attributes:
        graph: Its graph.
        outputs: The tensors of the graph by their names in the file, in their order.
        placeholders: The placeholder of each variable, by the place of its layer and its name.
    """

    graph: tf.Graph
    outputs: dict[str, tf.Tensor]
    placeholders: dict[tuple[int, str], tf.Tensor]

    @classmethod
    def of(cls, plain: PlainModel, weights_map, *, has_head: bool) -> Exporter:
        """The exporter of a plain model.

        Args:
            plain: The model.
            weights_map: KerasHub's function of a backbone to its tensors.
            has_head: Whether the projection to the vocabulary is one of them.
        """
        backbone = getattr(plain.model, "backbone", plain.model)
        graph, placeholders, mapping = tf.Graph(), {}, []
        with graph.as_default():
            for place, layer in enumerate(plain.layers):
                for variable in variables_of_layer(layer):
                    fed = tf.compat.v1.placeholder(variable.dtype, variable.shape)
                    placeholders[place, variable.name] = fed
                    mapping.append((variable, fed))
            with keras.StatelessScope(state_mapping=mapping):
                found = weights_map(backbone, include_lm_head=has_head)
                outputs = {
                    name: tf.identity(keras.ops.convert_to_tensor(value))
                    for name, value in found.items()
                }
        return cls(graph, outputs, placeholders)

    @functools.cached_property
    def sources(self) -> dict[str, list[tuple[int, str]]]:
        """By tensor, the variables that it is computed from: places of layers, and names."""
        return {name: self._behind(output.op) for name, output in self.outputs.items()}

    def _behind(self, operation: tf.Operation) -> list[tuple[int, str]]:
        seen, waiting, found = set(), [operation], []
        while waiting:
            operation = waiting.pop()
            if operation.name in seen:
                continue
            seen.add(operation.name)
            if operation.name in self._keys:
                found.append(self._keys[operation.name])
            waiting += [each.op for each in operation.inputs]
        return sorted(found)

    @functools.cached_property
    def _keys(self) -> dict[str, tuple[int, str]]:
        """The variable of each placeholder, by the name of its operation."""
        return {fed.op.name: key for key, fed in self.placeholders.items()}

    def compute(
        self, name: str, values: Mapping[tuple[int, str], Any], *, zeros: bool = False
    ) -> np.ndarray:
        """A tensor of the file.

        Args:
            name: Its name.
            values: Those of the variables that it is computed from.
            zeros: Whether other variables are zeros.
        """
        found = self._by_numpy(self.outputs[name].op, values)
        if found is None:
            fed = {}
            for key in self.sources[name]:
                placeholder = self.placeholders[key]
                if zeros and key not in values:
                    dtype = placeholder.dtype.as_numpy_dtype
                    fed[placeholder] = np.zeros(placeholder.shape, dtype)
                else:
                    fed[placeholder] = np.asarray(values[key])
            found = self._session.run(self.outputs[name], fed)
        return np.ascontiguousarray(found)

    def _by_numpy(
        self, operation: tf.Operation, values: Mapping[tuple[int, str], Any]
    ) -> np.ndarray | None:
        """The result of an operation that only moves entries, without copies of TensorFlow; None for others."""
        if operation.name in self._keys:
            value = values.get(self._keys[operation.name])
            return None if value is None else np.asarray(value)
        if operation.type not in ("Identity", "Reshape", "Transpose"):
            return None
        found = self._by_numpy(operation.inputs[0].op, values)
        if found is None or operation.type == "Identity":
            return found
        argument = tf.get_static_value(operation.inputs[1])
        if argument is None:
            return None
        return (np.reshape if operation.type == "Reshape" else np.transpose)(found, argument)

    @functools.cached_property
    def _session(self) -> tf.compat.v1.Session:
        # No memory of a GPU is taken for transpositions.
        config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        return tf.compat.v1.Session(graph=self.graph, config=config)

    def size(self, name: str) -> int:
        """The bytes of a tensor."""
        output = self.outputs[name]
        return int(np.prod(output.shape.as_list(), dtype=np.int64)) * output.dtype.size

    def shards(self, most: int) -> list[list[str]]:
        """The names of the tensors of each file, of at most some bytes unless one tensor is larger.

        In the order in which the library writes tensors of one dtype.
        """
        shards: list[list[str]] = [[]]
        size = 0
        for name in sorted(self.outputs):
            if shards[-1] and size + self.size(name) > most:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += self.size(name)
        return shards


class ShardWriter:
    """Writes a file of safetensors, one tensor at a time; the library writes all of them at once.

    The format: the number of bytes of the header, the header as JSON, the tensors one after the other
    (https://github.com/huggingface/safetensors#format).

    Args:
        path: The file.
        exporter: What computes the tensors.
        names: Their names, in the order in which they are added.
    """

    def __init__(self, path: Path, exporter: Exporter, names: Sequence[str]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for name in names:
            output, end = exporter.outputs[name], begin + exporter.size(name)
            kind, shape = _KINDS[output.dtype.name], output.shape.as_list()
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(header, separators=(",", ":")).encode()
        # Tensors begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        self._file = open(path, "wb")  # noqa: SIM115 Closed by `__exit__`.
        self._file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def add(self, tensor: np.ndarray) -> None:
        """Writes the next tensor, as `Exporter.compute` returns it."""
        self._file.write(tensor.view(np.uint8).data)


def files_of(shards: Sequence[Sequence[str]]) -> Iterator[str]:
    """The name of each file, as transformers names them."""
    if len(shards) == 1:
        yield WEIGHTS
        return
    for number in range(1, len(shards) + 1):
        yield f"model-{number:05}-of-{len(shards):05}.safetensors"


def write_index(folder: Path, exporter: Exporter, shards: Sequence[Sequence[str]]) -> None:
    """Writes which file each tensor is in, if there are several."""
    if len(shards) == 1:
        return
    places = {
        name: file for file, names in zip(files_of(shards), shards, strict=True) for name in names
    }
    total = sum(exporter.size(name) for name in places)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2), "utf-8")
