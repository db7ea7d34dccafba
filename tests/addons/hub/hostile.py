"""Presets that are broken, each in one way, and what `load_preset` says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import keras

from tests.tensor_parallel.families import scope

__all__ = ["BROKEN", "break_preset", "generate_without_values", "refused"]


def _cut(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        file = folder / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return cut


def _written(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(content)

    return write


def _configured(**changes) -> Callable[[Path], None]:
    """With another configuration; that of the task would hold the old one again."""

    def change(folder: Path) -> None:
        (folder / "task.json").unlink()
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["config"] |= changes
        file.write_text(json.dumps(config))

    return change


def _of_another_class(folder: Path) -> None:
    (folder / "task.json").unlink()
    file = folder / "config.json"
    file.write_text(file.read_text().replace("LlamaBackbone", "NoBackbone"))


#: By name: whether the weights lie in parts, how it is broken, and what the message holds.
BROKEN: dict[str, tuple[bool, Callable[[Path], object], tuple[str, ...]]] = {
    "a missing part": (
        True,
        lambda folder: (folder / "model_00001.weights.h5").unlink(),
        ("1 of 3 files", "no model_00001.weights.h5", "Copy the preset again"),
    ),
    "a part that is cut off": (
        True,
        _cut("model_00001.weights.h5"),
        ("model_00001.weights.h5' is not a complete file", "truncated", "Copy the preset again"),
    ),
    "weights that are cut off": (
        False,
        _cut("model.weights.h5"),
        ("model.weights.h5' is not a complete file", "truncated"),
    ),
    "empty weights": (
        False,
        _written("model.weights.h5", ""),
        ("is not a complete file of weights",),
    ),
    "a list of parts that is none": (
        True,
        _written("model.weights.json", "{}"),
        ("model.weights.json' does not list files", "`weight_map`"),
    ),
    "a configuration that is no JSON": (
        False,
        _written("config.json", "not { json"),
        ("config.json' cannot be read as JSON", "line 1"),
    ),
    "a configuration of nothing": (
        False,
        _written("config.json", "[1]"),
        ("config.json' does not describe a model",),
    ),
    "an unknown class": (False, _of_another_class, ("cannot be loaded", "NoBackbone")),
    "a model of another width": (
        False,
        _configured(hidden_dim=16),
        ("must belong to one model", "could not be loaded", "token_embedding"),
    ),
    "a model with more layers": (
        False,
        _configured(num_layers=3),
        ("must belong to one model", "could not be loaded"),
    ),
}


def break_preset(whole: str, folder: Path, name: str) -> None:
    """Copies a preset, and breaks it."""
    shutil.copytree(whole, folder)
    BROKEN[name][1](folder)


def refused(folders: dict[str, str], options: dict | None) -> dict[str, str]:
    """What is said of each folder."""
    import tfdist

    said = {}
    for name, folder in folders.items():
        keras.backend.clear_session()
        try:
            with scope(options):
                tfdist.load_preset(folder, preprocessor=None)
        except ValueError as error:
            said[name] = str(error)
        else:
            said[name] = "accepted"
    return said


def generate_without_values(folder: str) -> str:
    """What is said of `generate` right after a preset is loaded on a pipeline axis."""
    import tfdist

    keras.backend.clear_session()
    with scope({"mesh": {"data": 1, "pipeline": 2}}):
        model = tfdist.load_preset(folder, preprocessor=None)
    try:
        model.generate("Once", max_length=4)
    except ValueError as error:
        return str(error)
    return "accepted"
