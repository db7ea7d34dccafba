"""Names of variables that are the same on any mesh and in any process.

A name is the path from the model through its layers to the variable. Names that the user has chosen are
kept. A layer with a name by Keras gets the name of the attribute that holds it, as in Keras' own files of
weights. A Sequential or functional model has no such attributes: there layers of the same class are
numbered in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.backend.keras.attributes import own_variables, sublayers
from tfdist.backend.keras.layer_names import is_made_up, plain_name
from tfdist.backend.keras.private import Functional, all_layers

Named = Sequence[tuple[keras.Variable, str]]

#: Layers that name other layers, possibly after one with a name by Keras.
_NAMING = (keras.layers.Bidirectional,)
_GRAPHS = (keras.Sequential, Functional)
#: How deep lists and dicts are searched, which may contain themselves.
_MAX_DEPTH = 8


def model_names(model: keras.Model, variables: Sequence[keras.Variable]) -> list[str]:
    """A name for each of the variables, in the order of the model whose layers contain them."""
    known: dict[int, str] = {}
    _visit(model, (), known, set())
    used = set(known.values())
    # A variable outside the model's layers is named by its path.
    return [
        known.get(id(v)) or numbered("/".join(map(_without_number, v.path.split("/"))), used)
        for v in variables
    ]


def _visit(layer, path: tuple[str, ...], known: dict[int, str], seen: set[int]) -> None:
    """Names the variables of a layer and its sublayers; shared ones after their first occurrence."""
    seen.add(id(layer))
    below = list(all_layers(layer, include_self=False, recursive=False))
    theirs = {id(variable) for each in below for variable in each.variables}
    used: set[str] = set()
    for variable in layer.variables:
        if id(variable) not in theirs and id(variable) not in known:
            # Keras calls weights without a name "variable" or "variable_1".
            plain = re.sub(r"^variable_\d+$", "variable", variable.name)
            known[id(variable)] = numbered("/".join((*path, plain)), used)
    for child, name in zip(below, _names_of(layer, below), strict=True):
        if id(child) not in seen:
            _visit(child, (*path, name), known, seen)


def _names_of(parent, layers: Sequence) -> list[str]:
    """Distinct names for the sublayers of a layer."""
    held = {} if isinstance(parent, _GRAPHS) else _attributes(parent, layers)
    used: set[str] = set()
    # The names that users have chosen first, so that no other layer gets one of them.
    found = {
        id(each): numbered(each.name, used)
        for each in layers
        if not isinstance(parent, _NAMING) and not is_made_up(each)
    }
    counts: dict[str, int] = {}
    for each in layers:
        if id(each) not in found:
            name = held.get(id(each))
            if name is None:
                plain = plain_name(type(each))
                counts[plain] = counts.get(plain, -1) + 1
                # With a dot, so that it cannot be confused with a name by a user.
                name = f"{plain}.{counts[plain]}"
            found[id(each)] = numbered(name, used)
    return [found[id(each)] for each in layers]


def _attributes(parent, layers: Sequence) -> dict[int, str]:
    """The attribute of the parent that holds each layer, directly or in a list or dict."""
    wanted = {id(each) for each in layers}
    found: dict[int, str] = {}
    # Of two attributes with the same layer, a public one comes first, then alphabetical order.
    for name, value in sorted(vars(parent).items(), key=lambda item: (item[0][0] == "_", item[0])):
        if name != sublayers.name:  # Keras' own list of all sublayers.
            for path, each in _leaves(value, name):
                if id(each) in wanted:
                    found.setdefault(id(each), path)
    return found


def _leaves(value, path: str, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, Any]]:
    """The content of nested lists and dicts, with a path for each value."""
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs if depth > 1 else ():
            yield from _leaves(item, f"{path}_{str(key).replace('/', '_')}", depth - 1)
    else:
        yield path, value


def metric_names(variables: Sequence[keras.Variable]) -> list[str]:
    """A name for each variable of a model's metrics.

    Keras does not record who named a metric: a name in the form of Keras' own is treated as one.
    """
    own = {plain_name(kind) for kind in _subclasses(keras.metrics.Metric)}
    scopes: dict[str, str] = {}
    used: set[str] = set()
    found: list[str] = []
    for variable in variables:
        metric, _, name = variable.path.rpartition("/")
        if metric not in scopes:
            plain = _without_number(metric)
            scopes[metric] = numbered(plain if plain in own else metric, used)
        found.append("/".join(filter(None, (scopes[metric], name))))
    repeated: set[str] = set()
    return [numbered(name, repeated) for name in found]


def optimizer_names(optimizer: Any, parameters: Named) -> list[tuple[keras.Variable, str]]:
    """The variables of an optimizer and of those that it wraps, with a name for each.

    Args:
        optimizer: The optimizer.
        parameters: The variables that it may have slots for, in its order, with their names.
    """
    # Keras names a slot after the path of its parameter; of several prefixes the longest is right.
    # Parameters with equal paths are listed in the order of their slots.
    prefixes: dict[str, list[str]] = {}
    for variable, name in parameters:
        prefixes.setdefault(variable.path.replace("/", "_") + "_", []).append(name)
    longest = sorted(prefixes, key=len, reverse=True)
    found: list[tuple[keras.Variable, str]] = []
    used: set[str] = set()
    for kind, each in _parts_of(optimizer):
        seen: dict[str, int] = {}
        for variable in own_variables(each):
            name = variable.name
            prefix = next((one for one in longest if name.startswith(one)), None)
            if prefix is not None:
                place = seen[name] = seen.get(name, -1) + 1
                names = prefixes[prefix]
                name = f"{name[len(prefix) :]}/{names[min(place, len(names) - 1)]}"
            found.append((variable, numbered(f"{kind}/{name}", used)))
    return found


def _parts_of(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The wrappers and inner optimizers of an optimizer, with a name for each."""
    wrapper = "optimizer/wrapper"
    while getattr(optimizer, "inner_optimizer", None) is not None:
        yield wrapper, optimizer
        wrapper, optimizer = f"{wrapper}/wrapper", optimizer.inner_optimizer
    yield "optimizer", optimizer
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        for number, each in enumerate(optimizer.optimizers):
            yield f"optimizer/{number}", each


def _subclasses(kind: type) -> Iterable[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield from _subclasses(each)


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def numbered(name: str, used: set[str]) -> str:
    """The name, with a number appended if it is already used."""
    number, found = 0, name
    while found in used:
        number += 1
        found = f"{name}_{number}"
    used.add(found)
    return found
