"""What was measured of a machine, as a file."""

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
    """Writes a machine as JSON, which `read_machine` reads.

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
    """The machine of a file that `write_machine` wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such file, or a figure in it is wrong.
    """
    path = Path(checks.path("path", path))
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
        raise ValueError(
            f"A machine is a JSON file of `tfdist-plan calibrate`. Received: {str(path)!r}."
        )
    return machine_of(found)


def machine_of(found: dict[str, Any]) -> Machine:
    """The machine of the figures that `dataclasses.asdict` made of one.

    Raises:
        ValueError: A figure is unknown or wrong.
    """
    known = {field.name for field in dataclasses.fields(Machine)}
    if foreign := found.keys() - known:
        raise ValueError(
            f"A machine has no figure of that name. Received: {', '.join(sorted(foreign))}."
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
        raise ValueError(f"A figure of the machine is wrong. Received: {error}") from None
