"""Names of variables that are the same on any mesh, in any process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras

__all__ = ["model_names", "optimizer_names"]


def model_names(variables: Sequence[keras.Variable]) -> list[str]:
    """A name for each variable of a model, by its path.

    Keras numbers layers by how many of a kind a process has made before (`dense_7`); here they are
    numbered by their order in the model.
    """
    found: list[str] = []
    layers: dict[str, str] = {}
    used: set[str] = set()
    for variable in variables:
        layer, _, name = variable.path.rpartition("/")
        if layer not in layers:
            plain = "/".join(re.sub(r"_\d+$", "", part) for part in layer.split("/"))
            layers[layer] = _numbered(plain, used)
        found.append("/".join(filter(None, (layers[layer], name))))
    repeated: set[str] = set()
    return [_numbered(name, repeated) for name in found]


def optimizer_names(
    optimizer: Any, parameters: Sequence[tuple[keras.Variable, str]]
) -> list[tuple[keras.Variable, str]]:
    """The variables of an optimizer and a name for each.

    Args:
        optimizer: The optimizer; one that wraps another has that one's variables, too.
        parameters: The variables that it may keep a state for, and their names.
    """
    # Keras names a slot by the path of its parameter; the longest that fits is the right one.
    prefixes = sorted(
        ((variable.path.replace("/", "_") + "_", name) for variable, name in parameters),
        key=lambda pair: -len(pair[0]),
    )
    found: list[tuple[keras.Variable, str]] = []
    used: set[str] = set()
    depth: list[Any] = [optimizer]
    while getattr(depth[-1], "inner_optimizer", None) is not None:
        depth.append(depth[-1].inner_optimizer)
    for level, each in enumerate(depth):
        kind = (
            "optimizer"
            if each is depth[-1]
            else "/".join(["optimizer"] + ["wrapper"] * (level + 1))
        )
        for variable in each._variables:
            name = f"{kind}/{variable.name}"
            for prefix, parameter in prefixes:
                if variable.name.startswith(prefix):
                    name = f"{kind}/{variable.name[len(prefix) :]}/{parameter}"
                    break
            found.append((variable, _numbered(name, used)))
    return found


def _numbered(name: str, used: set[str]) -> str:
    """The name, with a number behind it where it is used already."""
    number, found = 0, name
    while found in used:
        number += 1
        found = f"{name}_{number}"
    used.add(found)
    return found
