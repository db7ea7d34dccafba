"""KerasHub's presets, of which each rank reads its parts."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras

from tfdist.addons.hub.files import check_files
from tfdist.addons.hub.importing import check_importable, import_weights, is_hugging_face
from tfdist.backend.keras.functional import deferred_weights, initialize_weights
from tfdist.step.context import current_strategy
from tfdist.tensor_parallel import parallelize
from tfdist.tensor_parallel.adapters import override
from tfdist.tensor_parallel.experts import find_experts
from tfdist.tensor_parallel.layout_map import is_layout_map
from tfdist.tensor_parallel.plan import check_plan
from tfdist.utils import checks

#: The files of a preset with weights: one file, or a list of several.
_WEIGHTS = ("model.weights.h5", "model.weights.json")
_TASK_WEIGHTS = "task.weights.h5"
_CONFIG = "config.json"
#: The begin of an address at Hugging Face, and the files that are downloaded from there.
HUB = "hf://"
_FILES = ["*.json", "*.h5", "*.safetensors", "*.model", "*.jinja", "*.txt", "assets/*"]
#: The longest part of a message of Keras that is shown for a model with other weights.
_LONGEST = 400


def load_preset(
    preset: str | os.PathLike[str],
    cls: Any = None,
    *,
    plan: Mapping[str, str] | Any | None = None,
    **kwargs: Any,
) -> keras.Model:
    """Loads a preset of KerasHub; each rank reads only its parts.

    ```python
    with HorovodStrategy(Mesh(tensor=2), zero_stage=3).scope():
        model = tfdist.load_preset("llama3-local/", dtype="bfloat16")
        model.backbone.enable_lora(8)
    ```

    `model.save_to_preset`, called by every rank, saves a preset that plain KerasHub can load.

    The model is that of `cls.from_preset(preset)`. On a tensor axis it is split by `parallelize`, and
    experts are split over theirs; a rank reads its slices from the files, one weight at a time, and with
    ZeRO stage 3 only the rows of its shard. On a pipeline axis the model has no values yet:
    `PipelineModel` reads those of this rank's stages. Without a strategy in scope this is `from_preset`.

    Args:
        preset: The folder of a preset, as `save_to_preset` writes it, or of a model of Hugging Face that
            KerasHub can convert; or "hf://organization/name", which is downloaded.
        cls: A task or backbone of KerasHub; None for `keras_hub.models.CausalLM`.
        plan: As for `parallelize`; None to find one.
        **kwargs: Arguments of `from_preset`, such as `dtype` or `preprocessor`.

    Returns:
        The model.

    Raises:
        ImportError: KerasHub is not installed, or huggingface_hub for a download.
        ValueError: The folder is not a preset, a file of it is missing or broken, its weights belong to
            another model, or `parallelize` fails.
    """
    folder = local_folder(preset)
    if cls is not None and not (inspect.isclass(cls) and hasattr(cls, "from_preset")):
        raise checks.refuse("cls", cls, "a task or a backbone of KerasHub, or None")
    if plan is not None and not is_layout_map(plan):
        check_plan(plan)
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is not None and (folder / _CONFIG).is_file():
        check_files(folder / _CONFIG, weights)
    elif is_hugging_face(folder):
        _hub()
        check_importable(folder)
    else:
        raise ValueError(
            f"A `preset` must be a folder with {_CONFIG} and {' or '.join(_WEIGHTS)}, as `save_to_preset` "
            "writes it, or with the files of a model of Hugging Face: config.json and model.safetensors. "
            f"Received: {str(preset)!r}."
        )
    models = _hub().models
    cls = models.CausalLM if cls is None else cls
    strategy = current_strategy()
    if strategy is None:
        with _one_line_errors(folder):
            if weights is not None:
                return cls.from_preset(str(folder), **kwargs)
            model = cls.from_preset(str(folder), load_weights=False, **kwargs)
            import_weights(getattr(model, "backbone", model), folder)
            return model
    is_task = issubclass(cls, models.Task)
    # An optimizer's variables cannot be deferred.
    compiles = is_task and kwargs.pop("compile", True)
    if is_task:
        kwargs["compile"] = False
    with _one_line_errors(folder), deferred_weights():
        model = cls.from_preset(str(folder), load_weights=False, **kwargs)
    mesh = strategy.mesh
    if strategy.group(*mesh.weight_axes).size > 1 or find_experts(model):
        parallelize(model, plan)
    backbone = getattr(model, "backbone", model)
    with _one_line_errors(folder):
        if weights is None:
            import_weights(backbone, folder)
        else:
            if backbone is not model and (folder / _TASK_WEIGHTS).is_file():
                model.load_task_weights(str(folder / _TASK_WEIGHTS))
            backbone.load_weights(str(weights))
    if strategy.group(*mesh.stage_axes).size == 1:
        initialize_weights(model.variables)
    elif is_task:
        override(model, "generate", _refuse_to_generate(model.name))
    if compiles:
        model.compile()
    return model


def local_folder(preset: str | os.PathLike[str]) -> Path:
    """The folder of a preset, which is downloaded from Hugging Face if it has an address there.

    Raises:
        ImportError: The package `huggingface_hub` is not installed.
        ValueError: The files cannot be downloaded.
    """
    address = os.fspath(preset) if isinstance(preset, str | os.PathLike) else preset
    if not isinstance(address, str) or not address.startswith(HUB):
        return Path(checks.path("preset", preset))
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{address!r} requires the package huggingface_hub, which is not installed. Run: pip install "
            "'tfdist[hub]'."
        ) from error
    try:
        # Ranks of a host wait for each other's downloads.
        found = huggingface_hub.snapshot_download(
            address.removeprefix(HUB), allow_patterns=_FILES, ignore_patterns="original/*"
        )
    except Exception as error:
        # The package has errors of its own for names, of its HTTP library, and of the operating system.
        raise ValueError(
            f"{address!r} must be a model of Hugging Face that can be downloaded. Received: {_words(error)}"
        ) from error
    return Path(found)


def _refuse_to_generate(name: str) -> Callable:
    """A replacement for `generate`, until a `PipelineModel` is made of the model."""

    def generate(*args, **kwargs):
        raise ValueError(
            f"`generate` requires weights with values. Received: `{name}`, loaded on a pipeline axis, "
            "where a rank reads those of its stages when a `tfdist.pipeline.PipelineModel` is made of the "
            "model. Make one, or load the preset without a pipeline axis."
        )

    return generate


@contextlib.contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Converts errors of Keras to one line that names the preset."""
    try:
        yield
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"The preset {str(folder)!r} cannot be loaded. Its files must belong to one model, as "
            f"`save_to_preset` writes them. Received: {_words(error)}"
        ) from error


def _words(error: Exception) -> str:
    """The message of another package in one line, not too long."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."


def _hub():
    try:
        import keras_hub
    except ImportError as error:
        raise ImportError(
            "Presets require KerasHub, which is not installed. Run: pip install keras-hub."
        ) from error
    return keras_hub
