"""Exports beside the model that was exported: transformers must compute its logits from the files."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist.addons.hub.chief import Chief
from tfdist.addons.hub.merging import quantization_modes
from tfdist.backend.keras.private import all_layers
from tfdist.utils import checks

_PROGRAM = Path(__file__).with_name("transformers_logits.py")
_INPUTS = {"token_ids", "padding_mask"}
_PACKAGES = ("torch", "transformers")
_TOKENS = 16
#: The largest difference by the dtype of a model: its rounding in many layers. One of bfloat16 or of quantized weights
#: hides small faults.
_LIMITS = {"float32": 1e-3, "float16": 1e-2}
_ROUGHEST = 0.1
_MOST_SECONDS = 3600


def has_transformers() -> bool:
    """Whether this Python has transformers."""
    return all(importlib.util.find_spec(name) is not None for name in _PACKAGES)


def verify_export(
    model: keras.Model, path: str | os.PathLike[str], *, python: str | None = None
) -> float | None:
    """Checks that transformers computes the logits of a model from its export; every rank calls it.

    The chief runs transformers, on its CPUs in float32, in another process, which has the whole model in memory.

    Args:
        model: The causal language model of KerasHub that was exported, or a `PipelineModel` of it.
        path: The folder that `export_to_transformers` or `export_peft` has written.
        python: The interpreter of an environment with transformers, torch and, for an adapter, peft; None for this one.

    Returns:
        The difference of the logits of some tokens, divided by their size, both as roots of mean squares; None on other
        ranks than the chief.

    Raises:
        ImportError: The interpreter lacks a package.
        ValueError: transformers cannot read the folder, or computes something else.
    """
    checks.instance("model", model, keras.Model, "a model")
    if not isinstance(model.input, dict) or set(model.input) != _INPUTS:
        inputs = sorted(model.input) if isinstance(model.input, dict) else model.input
        raise checks.refuse(
            "model", inputs, f"a model with the inputs {' and '.join(sorted(_INPUTS))}"
        )
    folder = checks.path("path", path)
    interpreter = sys.executable if python is None else checks.path("python", python)
    if shutil.which(interpreter) is None:
        raise checks.refuse("python", python, "the interpreter of an environment")
    whole: Any = getattr(model, "chain_model", model)
    longest = getattr(getattr(whole, "backbone", whole), "max_sequence_length", None) or _TOKENS
    size = [1, min(_TOKENS, longest)]
    ids = np.random.default_rng(0).integers(0, model.outputs[0].shape[-1], size).astype("int32")
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    own = np.asarray(model.predict(inputs, verbose=0), "float32")
    dtypes = {layer.compute_dtype for layer in all_layers(whole) if layer.variables}
    limit = max(_LIMITS.get(dtype, _ROUGHEST) for dtype in dtypes)
    limit = _ROUGHEST if quantization_modes(whole) else limit

    def compared() -> float:
        found = _logits(interpreter, folder, ids)
        if found.shape != own.shape:
            raise ValueError(
                f"{folder} must have a vocabulary of {own.shape[-1]:,}. Received: {found.shape[-1]:,}."
            )
        apart = float(np.sqrt(np.mean((found - own) ** 2) / np.mean(own**2)))
        if not apart <= limit:
            raise ValueError(
                f"transformers must compute the logits of the exported model from {folder}. Received: logits "
                f"that differ by {apart:.2g} of their size."
            )
        return apart

    return Chief(model, "verify_export").run(compared)


def _logits(python: str, folder: str, ids: np.ndarray) -> np.ndarray:
    if not any((Path(folder) / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise checks.refuse("path", folder, "a folder of an exported model or adapter")
    with tempfile.TemporaryDirectory() as place:
        given, written = Path(place) / "ids.npy", Path(place) / "logits.npy"
        np.save(given, ids)
        done = subprocess.run(
            [python, "-P", str(_PROGRAM), folder, str(given), str(written)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
            if said[0].startswith(("ModuleNotFoundError", "ImportError")):
                raise ImportError(
                    "`verify_export` requires transformers, torch and, for an adapter, peft. Received: "
                    f"{python}, which says: {checks.one_line(said[0])}. Give `python` of an environment with them."
                )
            raise ValueError(
                f"`path` must be a folder that transformers reads. Received: path={checks.shown(folder)}, of which "
                f"{python} says: {checks.one_line(said[0])}"
            )
        return np.load(written)
