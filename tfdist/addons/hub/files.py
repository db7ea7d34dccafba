"""Checks that the files of a preset exist and are complete, before a model is created."""

from __future__ import annotations

import json
from pathlib import Path

_REMEDY = "Copy the preset again, or save it again with `save_to_preset`."


def check_files(config: Path, weights: Path) -> None:
    """Checks that no file is missing, truncated or of another kind.

    Args:
        config: The configuration.
        weights: The file of weights, or the list of several files.

    Raises:
        ValueError: A file is missing or not readable.
    """
    if not isinstance(_read_json(config), dict):
        raise ValueError(
            f"{str(config)!r} does not describe a model: expected a JSON object. {_REMEDY}"
        )
    for file in _parts(weights) if weights.suffix == ".json" else [weights]:
        _check_hdf5(file)


def _parts(weights: Path) -> list[Path]:
    found = _read_json(weights)
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not places:
        raise ValueError(
            f"{str(weights)!r} does not list files of weights: `weight_map` is missing. {_REMEDY}"
        )
    names = {
        str(name)
        for place in places.values()
        for name in (place if isinstance(place, list) else [place])
    }
    files = [weights.parent / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(files)} files of weights are missing in the preset "
            f"{str(weights.parent)!r}. Received: no {', '.join(missing[:5])}. {_REMEDY}"
        )
    return files


def _read_json(file: Path):
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} cannot be read as JSON: {error}. {_REMEDY}") from error


def _check_hdf5(file: Path) -> None:
    import h5py

    try:
        # HDF5 compares the length of the file with its length when it was written.
        with h5py.File(file, "r"):
            pass
    except OSError as error:
        raise ValueError(
            f"{str(file)!r} is not a complete file of weights (HDF5): {error}. {_REMEDY}"
        ) from error
