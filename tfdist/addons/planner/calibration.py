"""Files of calibrated machines."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from tfdist.addons.planner.machines import Link, Machine
from tfdist.utils import checks

_FORMAT = "tfdist machine 1"


def write_machine(path: str | os.PathLike[str], machine: Machine) -> None:
    """Write a machine as JSON, for `read_machine`.

    Raises:
        OSError: The file cannot be written.
    """
    checks.path("path", path)
    checks.instance("machine", machine, Machine, "a tfdist.addons.planner.Machine")
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(machine)}, indent=1)
    target = Path(path)
    whole = target.with_name(f".{target.name}.new")
    whole.write_text(text + "\n", encoding="utf-8")
    whole.replace(target)


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine from a file of `write_machine`.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a machine, or a figure in it is invalid.
    """
    path = Path(checks.path("path", path))
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
        raise ValueError(
            f"A machine must be a JSON file of `tfdist-plan calibrate`. Received: {str(path)!r}."
        )
    return machine_of(found)


def machine_of(found: dict[str, Any]) -> Machine:
    """Create a machine from the dict that `dataclasses.asdict` returns for one.

    Raises:
        ValueError: A figure is unknown or invalid.
    """
    known = {field.name for field in dataclasses.fields(Machine)}
    if foreign := found.keys() - known:
        raise ValueError(
            f"A figure of the machine is unknown. Received: {', '.join(sorted(foreign))}."
        )
    links = {}
    for name in ("inside", "between", "bulk"):
        if isinstance(found.get(name), dict):
            try:
                links[name] = Link(**found[name])
            except TypeError:
                raise checks.refuse(name, found[name], "a latency and a bandwidth") from None
    try:
        return Machine(**{**found, **links})
    except TypeError as error:
        raise ValueError(f"A figure of the machine is not valid. Received: {error}.") from None
