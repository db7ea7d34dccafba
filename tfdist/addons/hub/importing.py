"""Weights of folders in the format of Hugging Face, of which each rank reads its parts.

KerasHub's converters map the tensors of such a folder to a backbone's variables. They assign each tensor as a
whole; here a variable receives an array that is read when it is needed, one tensor at a time.

`keras_hub.src` is private to KerasHub, which has no public loader that takes the variables one by one;
`tests/addons/hub/test_importing.py` fails if it changes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np

from tfdist.addons.hub.streaming import INDEX, WEIGHTS
from tfdist.backend.keras.private import all_layers
from tfdist.backend.keras.stored import StoredArray
from tfdist.strategies.keras_patches.reading import reading_parts
from tfdist.utils import checks

_CONFIG = "config.json"
#: What a folder has beside weights: tokenizers, chat templates, and how texts are generated.
_BESIDE = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
#: NumPy, for converters that round to float16.
_EXACT = types.SimpleNamespace(**vars(np) | {"float16": np.float32})
#: The folder that a backbone was read from.
_folders: weakref.WeakKeyDictionary[keras.Model, Path] = weakref.WeakKeyDictionary()
_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder has the configuration and the weights of a model of Hugging Face."""
    if not (folder / _CONFIG).is_file() or not any(
        (folder / name).is_file() for name in (WEIGHTS, INDEX)
    ):
        return False
    try:
        found = json.loads((folder / _CONFIG).read_text("utf-8"))
    except ValueError:
        return False
    return isinstance(found, dict) and "model_type" in found and "registered_name" not in found


def check_importable(folder: Path) -> None:
    """Checks a folder before a model is created.

    Raises:
        ImportError: The package `safetensors` is missing.
        ValueError: KerasHub cannot convert this model, or files of weights are missing or broken.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "A folder of Hugging Face requires the package `safetensors`, which is not installed. Run: pip "
            "install 'tfdist[hub]'."
        ) from error
    _converter(folder)
    index = folder / INDEX
    names = {WEIGHTS}
    if index.is_file():
        names = _files_of(index)
    for name in sorted(names):
        try:
            with safetensors.safe_open(str(folder / name), framework="np"):
                pass
        except Exception as error:
            # The package raises errors of its own for files that are cut, and others for missing ones.
            raise ValueError(
                f"{str(folder / name)!r} must be a complete file of safetensors. Received: {error}. Copy the "
                "folder again."
            ) from error


def _files_of(index: Path) -> set[str]:
    """The files of weights that an index names, which are beside it."""
    try:
        found = json.loads(index.read_text("utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(index)!r} must be an index of safetensors, with a `weight_map`. Received: "
            f"{type(error).__name__}: {error}."
        ) from error
    for name in found:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"{str(index)!r} must name files of its folder. Received: {checks.shown(name)}."
            )
    return set(found)


def import_weights(backbone: keras.Model, folder: Path) -> None:
    """Reads the weights of a backbone, which may be split, sharded, or without values yet.

    Args:
        backbone: A backbone that KerasHub has created for this folder.
        folder: The folder.
    """
    converter, config = _converter(folder)
    if config["model_type"] == "qwen3":
        _set_epsilons(backbone, config["rms_norm_eps"])
    with reading_parts(backbone), _loader_class()(str(folder)) as loader:
        converter.convert_weights(backbone, loader, config)
    _folders[backbone] = folder.resolve()


def folder_of(backbone: keras.Model) -> Path | None:
    """The folder of Hugging Face that a backbone was read from."""
    return _folders.get(backbone)


def copy_beside(backbone: keras.Model, new: Path) -> None:
    """Completes an export by the files of the folder that the backbone was read from, if there is one.

    Its configuration has options that KerasHub does not keep; training changes none of them.

    Args:
        backbone: The backbone.
        new: The folder of the export, which has a configuration.
    """
    folder = folder_of(backbone)
    if folder is None or not (folder / _CONFIG).is_file():
        return
    for name in _BESIDE:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, new / name)
    own, theirs = (json.loads((place / _CONFIG).read_text("utf-8")) for place in (new, folder))
    dtypes = {
        key: own.get("torch_dtype", backbone.variable_dtype)
        for key in ("dtype", "torch_dtype")
        if key in own or key in theirs
    }
    theirs.pop("quantization_config", None)
    (new / _CONFIG).write_text(json.dumps(own | theirs | dtypes, indent=2), "utf-8")


def _converter(folder: Path) -> tuple[Any, dict]:
    """KerasHub's converter of a folder's model, and the configuration."""
    from keras_hub.src.utils.preset_utils import get_preset_loader

    loader = get_preset_loader(str(folder))
    converter = getattr(loader, "converter", None)
    if converter is None or not hasattr(converter, "convert_weights"):
        raise ValueError(
            f"KerasHub must have a converter for the model of a folder. Received: {str(folder)!r}, whose "
            f"`model_type` is {loader.config.get('model_type')!r}."
        )
    return converter, loader.config


@dataclasses.dataclass(frozen=True)
class _Converted(StoredArray):
    """A tensor of a file of safetensors in the form of a variable.

    Attributes:
        convert: Maps the tensor and the shape of the variable to the variable's array; None for the tensor itself.
    """

    convert: Callable | None = None

    def read(self, index: Any = ()) -> np.ndarray:
        """Reads the array, or the part that an index selects."""
        import safetensors

        with safetensors.safe_open(self.file, framework="np") as file:
            if self.convert is None:
                found = (
                    file.get_slice(self.name)[index] if index != () else file.get_tensor(self.name)
                )
                return np.asarray(found)
            tensor = file.get_tensor(self.name)
        found = np.asarray(self.convert(tensor, list(self.shape)))
        if tuple(found.shape) != self.shape:
            raise ValueError(
                f"The tensor {self.name!r} must have the shape {self.shape} in the variable. Received: "
                f"{tuple(found.shape)}."
            )
        return found[index]


def _loader_class() -> type:
    from keras_hub.src.utils.preset_utils import get_file
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

    class Loader(SafetensorLoader):
        """As KerasHub's, for variables that read their parts later."""

        def port_weight(self, keras_variable, hf_weight_key, hook_fn=None):
            """Assigns a tensor that is not read yet."""
            if self.safetensor_config is None:
                name = self.fname or WEIGHTS
            else:
                files = self.safetensor_config["weight_map"]
                name = files[self.get_prefixed_key(hf_weight_key, files)]
            path = get_file(self.preset, name)
            if name not in self.safetensor_files:
                import safetensors

                self.safetensor_files[name] = self.enter_context(
                    safetensors.safe_open(path, framework="np")
                )
            file = self.safetensor_files[name]
            key = self.get_prefixed_key(hf_weight_key, file)
            part = file.get_slice(key)
            shape = tuple(keras_variable.shape) if hook_fn else tuple(part.get_shape())
            dtype = np.dtype(_DTYPES.get(part.get_dtype(), np.float32))
            keras_variable.assign(_Converted(path, key, shape, dtype, _as_it_is_now(hook_fn)))

    return Loader


def _as_it_is_now(function: Callable | None) -> Callable | None:
    """A function with the present values of its closure, which a loop of a converter changes later.

    It keeps the precision of tensors, too: KerasHub 0.32 rounds the weights of Mistral to float16.
    """
    if not isinstance(function, types.FunctionType):
        return function
    cells = tuple(types.CellType(cell.cell_contents) for cell in function.__closure__ or ())
    names, defaults = {**function.__globals__, "np": _EXACT}, function.__defaults__
    copy = types.FunctionType(function.__code__, names, function.__name__, defaults, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _set_epsilons(backbone: keras.Model, epsilon: float) -> None:
    """Sets the epsilon of all norms: that of a query or a key in Qwen 3 is another one in KerasHub 0.32."""
    for layer in all_layers(backbone):
        for name in ("epsilon", "layer_norm_epsilon"):
            if hasattr(layer, name):
                setattr(layer, name, epsilon)
