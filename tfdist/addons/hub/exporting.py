"""KerasHub's exports to the files of transformers: weights of fine-tuned models, gathered one layer at a time.

KerasHub's exporters read the layers of a model. On a rank these have parts, and some layers of a
fine-tuned model are read without adapters, or as codes without scales. Here the exporters read a plain
model, whose weights are computed when they are written.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf
from absl import logging

from tfdist.addons.hub.chief import Chief
from tfdist.addons.hub.exporters import (
    MODULE,
    check_exporter,
    complete,
    exporter_of,
    without_weights,
)
from tfdist.addons.hub.importing import copy_beside
from tfdist.addons.hub.merging import (
    check_mergeable,
    plain_model,
    quantization_modes,
)
from tfdist.addons.hub.streaming import (
    INDEX,
    WEIGHTS,
    Exporter,
    ShardWriter,
    files_of,
    write_index,
)
from tfdist.backend.keras.attributes import stored_value
from tfdist.backend.keras.patching import Patch
from tfdist.sharding.layout import layout_of
from tfdist.step.local_steps import global_parameters
from tfdist.tensor_parallel.attributes import variables_of_layer
from tfdist.utils import checks
from tfdist.utils.temporary import attributes_set

#: The files of weights in several parts.
_SHARDS = "model-*-of-*.safetensors"


class _Local(threading.local):
    """Whether KerasHub's function is called by that of this module."""

    under_way = False


_local = _Local()


def exporting_patches(models) -> tuple[Patch, ...]:
    """The patches, where `models` is `keras_hub.models`."""
    if not hasattr(models.Backbone, "export_to_transformers"):
        return ()  # Before 0.22 it does not exist.
    functions = importlib.import_module(MODULE)
    return (
        Patch(models.Backbone, "export_to_transformers", ("self", "path"), _export),
        Patch(models.CausalLM, "export_to_transformers", ("self", "path"), _export),
        Patch(functions, "export_to_safetensors", ("keras_model", "path"), _export),
        Patch(functions, "export_backbone", ("backbone", "path", "include_lm_head"), _export),
        # The exporters of a tokenizer and of a preprocessor call it.
        Patch(functions, "export_tokenizer", ("tokenizer", "path"), _export_tokenizer),
    )


def _export(
    self,
    path,
    *args,
    dequantize: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    original: Callable,
    **kwargs,
):
    """Exports a plain model; every rank calls it, and the chief writes the files.

    The chief holds one layer at a time.

    Args:
        original: KerasHub's function.
        self: The task, or the backbone.
        path: The folder.
        *args: Arguments of the original.
        dequantize: Whether to write a quantized model as floats.
        max_shard_bytes: The most bytes of tensors in a file, unless one tensor has more.
        **kwargs: Keyword arguments of the original.

    Raises:
        ImportError: The package `safetensors` is not installed.
        ValueError: The model is quantized, and `dequantize` is not set; or the file would be that of
            another model.
    """
    if _local.under_way:
        return original(self, path, *args, **kwargs)
    folder = Path(checks.path("path", path))
    checks.boolean("dequantize", dequantize)
    checks.integer("max_shard_bytes", max_shard_bytes, minimum=1, maximum=1 << 60)
    modes = _check(self, dequantize)
    before = _outputs(self) if modes else None
    # For a backbone, `include_lm_head` comes after the path.
    has_head = hasattr(self, "backbone") or any(args[:1]) or kwargs.get("include_lm_head", False)

    def write_others(plain, new: Path) -> None:
        """The configuration, and a tokenizer."""
        with without_weights(), attributes_set(_local, under_way=True):
            original(plain, str(new), *args, **kwargs)
        complete(plain, new, has_head)
        if has_head:
            copy_beside(getattr(self, "backbone", self), new)

    export = _Export(self, getattr(original, "__name__", "export_to_transformers"), before)
    export.write(folder, has_head, max_shard_bytes, write_others)
    if modes and export.chief.is_here:
        _tell_difference(modes, before, export.outputs())
    return None


class _Export:
    """An export, on all ranks.

    Args:
        model: The model.
        name: What is called, for messages.
        before: Outputs of a quantized model; None if no outputs are compared.

    Attributes:
        chief: The rank that writes the files.
    """

    def __init__(self, model, name: str, before: np.ndarray | None):
        self.chief = Chief(model, name)
        self._plain = plain_model(model)
        # To compute outputs of the plain model, the chief must hold all of its weights.
        count = sum(math.prod(variable.shape) for variable in self._plain.model.variables)
        size = count * tf.as_dtype(self._plain.dtype).size
        fits = size < psutil.virtual_memory().available / 2
        self._keeps = self.chief.is_here and before is not None and fits

    def outputs(self) -> np.ndarray | None:
        """Outputs of the plain model, if they are compared."""
        return _outputs(self._plain.model) if self._keeps else None

    def write(self, folder: Path, has_head: bool, most: int, write_others: Callable) -> None:
        """Writes the files, all of them or none.

        Args:
            folder: The folder.
            has_head: Whether the projection to the vocabulary is exported.
            most: The most bytes of a file of weights.
            write_others: Writes the other files of a plain model into a folder, on the chief.
        """
        exporter = exporter_of(self._plain, has_head=has_head)
        shards = exporter.shards(most)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.chief.gathering())
            new = self.chief.run(lambda: stack.enter_context(new_folder(folder)))
            for file, names in zip(files_of(shards), shards, strict=True):
                self._write_shard(exporter, names, new, file)

            def finish():
                write_others(self._plain.model, new)
                write_index(new, exporter, shards)
                replace_files(new, folder)

            self.chief.run(finish)

    def _write_shard(
        self, exporter: Exporter, names: Sequence[str], folder: Path, file: str
    ) -> None:
        """Writes a file of weights, in a folder that the chief knows."""
        with contextlib.ExitStack() as stack:
            writer: Any = self.chief.run(
                lambda: stack.enter_context(ShardWriter(folder / file, exporter, names))
            )
            for name in names:
                self._write_tensor(exporter, name, writer)

    def _write_tensor(self, exporter: Exporter, name: str, writer: Any) -> None:
        values = self._gathered(exporter.sources[name])
        self.chief.run(lambda: writer.add(exporter.compute(name, values)))

    def _gathered(self, sources: Sequence[tuple[int, str]]) -> dict[tuple[int, str], Any]:
        """Weights of plain layers on the chief, by the places of layers and names."""
        values: dict[tuple[int, str], Any] = {}
        for place in sorted({place for place, _ in sources}):
            names = {name for at, name in sources if at == place}
            needs = self._plain.needs(place, names)
            if self._plain.is_changed(place):
                with self.chief.whole(needs):
                    found = self.chief.run(functools.partial(self._values, place, names))
            else:
                wholes = self.chief.gathered(needs)
                found = self.chief.run(functools.partial(self._values, place, names, wholes))
            values |= found or {}
        return values

    def _values(
        self, place: int, names: set[str], wholes: dict[int, np.ndarray] | None = None
    ) -> dict[tuple[int, str], Any]:
        """Some weights of a plain layer, from its source with global arrays."""
        found = self._plain.values(place, names, wholes)
        for variable in variables_of_layer(self._plain.layers[place]) if self._keeps else ():
            if variable.name in found:
                stored_value.set(variable, found[variable.name])
        return {(place, name): value for name, value in found.items()}


def _export_tokenizer(tokenizer, path, *, original: Callable):
    """Exports a tokenizer, on each rank that calls it, to the same files.

    KerasHub renames some of them, so two ranks in the same folder would conflict.
    """
    if _local.under_way:
        return original(tokenizer, path)
    folder = Path(checks.path("path", path))
    with new_folder(folder) as new:
        result = original(tokenizer, str(new))
        replace_files(new, folder)
        return result


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder for new files, inside another one that is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as new:
        yield Path(new)


def replace_files(new: Path, folder: Path) -> None:
    """Moves complete files to their places, and removes weights of an earlier export."""
    names = sorted(file.name for file in new.iterdir())
    for name in names:
        os.replace(new / name, folder / name)
    # An adapter may stand beside the model that it belongs to.
    if any(name == WEIGHTS or fnmatch.fnmatchcase(name, _SHARDS) for name in names):
        for file in [*folder.glob(_SHARDS), folder / WEIGHTS, folder / INDEX]:
            if file.name not in names:
                file.unlink(missing_ok=True)


def _check(model, dequantize: bool) -> list[str]:
    """Checks that the export would be correct; returns the model's quantization modes."""
    check_exporter(model)
    modes = quantization_modes(model)
    if modes and not dequantize:
        raise ValueError(
            "`export_to_transformers` requires weights of floats. Received: "
            f"`{model.name}`, quantized to {' and '.join(modes)}. Pass dequantize=True to export "
            "dequantized floats, or save it with `save_to_preset`."
        )
    if modes:
        check_mergeable(model)
    return modes


def _outputs(model) -> np.ndarray | None:
    """The outputs for a row of tokens; None if the model cannot be called, as on a pipeline."""
    inputs = model.input
    known = isinstance(inputs, dict) and set(inputs) == {"token_ids", "padding_mask"}
    if not known or any(layout_of(variable).stage is not None for variable in model.variables):
        return None
    backbone = getattr(model, "backbone", model)
    length = min(16, getattr(backbone, "max_sequence_length", None) or 16)
    ids = np.random.default_rng(0).integers(0, backbone.vocabulary_size, (1, length), "int32")
    with global_parameters(model):
        outputs = model({"token_ids": ids, "padding_mask": np.ones_like(ids)}, training=False)
    return tf.cast(keras.tree.flatten(outputs)[0], tf.float32).numpy()


def _tell_difference(modes: list[str], before, after) -> None:
    """Logs the effect of the quantization, which also rounds the inputs of products."""
    words = (
        "outputs were not compared, because no rank can call the quantized model, or the floats do not fit "
        "into the memory of the chief"
    )
    if before is not None and after is not None:
        apart, size = np.abs(after - before).max(), before.std()
        words = (
            f"outputs for {before.shape[1]} tokens differ by at most {apart:.3g} from those of the "
            f"quantized model, whose standard deviation is {size:.3g}"
        )
    logging.warning(
        "tfdist: exported the dequantized floats of %s; %s.", " and ".join(modes), words
    )
