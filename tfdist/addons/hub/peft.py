"""LoRA adapters as files of PEFT, which transformers and vLLM read.

Keras' adapter of a projection to heads is `A` [inputs, heads, rank] and `B` [rank, size of a head], the same for all
heads. That of PEFT is a product of two matrices: `lora_A` [heads * rank, inputs], and `lora_B` whose blocks on the
diagonal are `B` transposed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist.addons.hub.adapters import is_adapter
from tfdist.addons.hub.chief import Chief
from tfdist.addons.hub.exporters import check_exporter, exporter_of
from tfdist.addons.hub.exporting import new_folder, replace_files
from tfdist.addons.hub.importing import folder_of
from tfdist.addons.hub.merging import plain_model
from tfdist.addons.hub.streaming import Exporter
from tfdist.backend.keras.private import all_layers
from tfdist.utils import checks

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MERGED = "Export the merged weights with `export_to_transformers`."
#: The largest relative difference of the product of both matrices from the adapter, in float32.
_ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """The two matrices of PEFT, with the scale of the adapter in `up`.

    Attributes:
        down: `lora_A`, [rank, inputs].
        up: `lora_B`, [outputs, rank].
        is_transposed: Whether the weight is stored as [inputs, outputs].
    """

    down: np.ndarray
    up: np.ndarray
    is_transposed: bool


def export_peft(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Writes the LoRA adapters of a model of KerasHub as an adapter of PEFT; every rank calls it.

    `peft.PeftModel.from_pretrained(base, path)` computes what the model computes. All matrices have the same rank,
    which is that of the largest one; others have zeros.

    Args:
        model: A task or a backbone with adapters.
        path: The folder.

    Raises:
        ImportError: The package `safetensors` is not installed.
        ValueError: The model has no adapters, other weights were trained, or KerasHub has no exporter for it.
    """
    folder = Path(checks.path("path", path))
    check_exporter(checks.instance("model", model, keras.Model, "a model"))
    backbone: Any = getattr(model, "backbone", model)
    layers = [layer for layer in all_layers(backbone) if getattr(layer, "lora_enabled", False)]
    _check(backbone, layers)
    plain = plain_model(model, dtype="float32")
    exporter = exporter_of(plain, has_head=model is not backbone)
    places = [place for place, layer in enumerate(plain.sources) if layer in layers]
    chief = Chief(model, "export_peft")
    found: dict[str, list[_Adapter]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(chief.gathering())
        new = chief.run(lambda: stack.enter_context(new_folder(folder)))
        for place in places:
            layer, kernel = plain.sources[place], plain.layers[place].kernel
            with chief.whole([layer.lora_kernel_a, layer.lora_kernel_b]):

                def add(layer=layer, place=place, shape=tuple(kernel.shape)):
                    name, adapter = _adapter(exporter, place, layer, shape)
                    found.setdefault(name, []).append(adapter)

                chief.run(add)

        def finish():
            _write(new, found, exporter, folder_of(backbone))
            replace_files(new, folder)

        chief.run(finish)


def _check(backbone, layers: Sequence[keras.Layer]) -> None:
    if not layers:
        raise ValueError(
            "`export_peft` requires a model with LoRA adapters. Received: "
            f"`{backbone.name}` without any. Call `enable_lora`, or use `export_to_transformers`."
        )
    for layer in layers:
        if not isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense):
            raise ValueError(
                "`export_peft` requires adapters of Dense and EinsumDense layers. Received: one of "
                f"`{layer.path}`, a {type(layer).__name__}. {_MERGED}"
            )
    for variable in backbone.trainable_variables:
        if not is_adapter(variable):
            raise ValueError(
                "`export_peft` requires that only adapters were trained. Received: "
                f"`{variable.path}`, which is trainable. {_MERGED}"
            )


def _adapter(
    exporter: Exporter, place: int, layer: Any, shape: tuple[int, ...]
) -> tuple[str, _Adapter]:
    """The matrix of the file that a layer is a part of, and the adapter of that matrix."""
    key = place, "kernel"
    (name,) = (each for each, sources in exporter.sources.items() if key in sources)
    a, b = (
        keras.ops.convert_to_numpy(keras.ops.cast(each, "float32"))
        for each in (layer.lora_kernel_a, layer.lora_kernel_b)
    )
    b = b * (layer.lora_alpha / layer.lora_rank)
    rank = b.shape[0]
    inputs = _input_axes(layer, len(shape))
    groups = [axis for axis in range(len(shape) - 1) if axis not in inputs]
    size, count = (math.prod(shape[axis] for axis in axes) for axes in (inputs, groups))
    down = a.transpose(*groups, len(shape) - 1, *inputs).reshape(count * rank, size)

    def exported(kernel: np.ndarray) -> np.ndarray:
        """The matrix of the file from a kernel [groups, inputs, last]."""
        dims = [*(shape[axis] for axis in groups), *(shape[axis] for axis in inputs), shape[-1]]
        back = np.argsort([*groups, *inputs, len(shape) - 1])
        return exporter.compute(name, {key: kernel.reshape(dims).transpose(back)}, zeros=True)

    right = exported(np.einsum("grd,ro->gdo", down.reshape(count, rank, size), b))
    for is_transposed in (False, True):
        matrix = right.T if is_transposed else right
        if matrix.ndim != 2 or matrix.shape[1] != size:
            continue
        # Each column of the matrix is that of one input, so one export has a column of `lora_B` for each.
        columns = []
        for first in range(0, count * rank, size):
            kernel = np.zeros([count, size, shape[-1]], "float32")
            numbers = np.arange(first, min(first + size, count * rank))
            kernel[numbers // rank, numbers - first] = b[numbers % rank]
            part = exported(kernel)
            columns.append((part.T if is_transposed else part)[:, : len(numbers)])
        up = np.concatenate(columns, axis=1)
        if np.abs(up @ down - matrix).max() <= _ROUNDING * max(np.abs(matrix).max(), 1e-30):
            return name, _Adapter(down, up, is_transposed)
    raise ValueError(
        f"The adapter of `{layer.path}` must be a product of two matrices in `{name}`, which it is not in the "
        f"files of this family. {_MERGED}"
    )


def _input_axes(layer: Any, rank: int) -> list[int]:
    """The axes of a kernel that are those of the input."""
    if isinstance(layer, keras.layers.Dense):
        return list(range(rank - 1))
    terms = layer.equation.replace(" ", "").split("->")[0].split(",")
    return [axis for axis, letter in enumerate(terms[1][-rank:]) if letter in terms[0]]


def _write(
    folder: Path, found: dict[str, list[_Adapter]], exporter: Exporter, base: Path | None
) -> None:
    """Writes both files."""
    from safetensors.numpy import save_file

    rank = max(sum(len(part.down) for part in parts) for parts in found.values())
    tensors = {}
    for name, parts in found.items():
        down = np.concatenate([part.down for part in parts])
        up = np.concatenate([part.up for part in parts], axis=1)
        rest = rank - len(down)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = np.pad(down, [(0, rest), (0, 0)])
        tensors[f"{module}.lora_B.weight"] = np.pad(up, [(0, 0), (0, rest)])
    # In float32, in which Keras has adapters in a model of any dtype.
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(contiguous, folder / _WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": rank,
        # The matrices have the scale, which is `lora_alpha / r`.
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(part.is_transposed for parts in found.values() for part in parts),
        "target_modules": _targets(found, exporter),
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2), "utf-8")


def _targets(found: dict[str, list[_Adapter]], exporter: Exporter) -> list[str]:
    """The names of the modules with adapters: their last parts if no other module has the same."""
    names = [name.removesuffix(".weight") for name in found]
    last = {name.rpartition(".")[2] for name in names}
    others = {
        name.removesuffix(".weight").rpartition(".")[2]
        for name in exporter.outputs
        if name.endswith(".weight") and name not in found
    }
    return sorted(names) if last & others else sorted(last)
