"""Names of variables that are the same on any mesh, in any process.

A name leads from the model through its layers to the variable. What the user named keeps its name.
A layer that Keras named is known by the attribute that holds it, as in Keras' own files of weights; in a
Sequential or functional model, where there is none, by its order among its like.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfdist.backend.keras.attributes import own_variables, sublayers
from tfdist.backend.keras.layer_names import is_made_up, plain_name
from tfdist.backend.keras.private import Functional, all_layers

#: They name a layer after another, which may be one that Keras named.
_NAMING = (keras.layers.Bidirectional,)
_GRAPHS = (keras.Sequential, Functional)


def model_names(model: keras.Model, variables: Sequence[keras.Variable]) -> list[str]:
    """A name for each of the variables, in the order of the model whose layers lead to them."""
    known: dict[int, str] = {}
    _visit(model, (), known, set())
    used = set(known.values())
    # What no layer of the model leads to, it has from elsewhere.
    return [
        known.get(id(v)) or numbered("/".join(map(_without_number, v.path.split("/"))), used)
        for v in variables
    ]


def _visit(layer, path: tuple[str, ...], known: dict[int, str], seen: set[int]) -> None:
    """Names the variables of a layer and of those below it; what is shared, where it is first."""
    seen.add(id(layer))
    below = list(all_layers(layer, include_self=False, recursive=False))
    theirs = {id(variable) for each in below for variable in each.variables}
    used: set[str] = set()
    for variable in layer.variables:
        if id(variable) not in theirs and id(variable) not in known:
            name = variable.name
            # What Keras calls a weight that has no name.
            plain = "variable" if re.fullmatch(r"variable(_\d+)?", name) else name
            known[id(variable)] = numbered("/".join((*path, plain)), used)
    for child, name in zip(below, _names_of(layer, below), strict=True):
        if id(child) not in seen:
            _visit(child, (*path, name), known, seen)


def _names_of(parent, layers: Sequence) -> list[str]:
    """The names of the layers in a layer, each another."""
    held = {} if isinstance(parent, _GRAPHS) else _attributes(parent, layers)
    found: dict[int, str] = {}
    used: set[str] = set()
    # First those with a name of their own, which no other takes from them.
    given = [each for each in layers if not isinstance(parent, _NAMING) and not is_made_up(each)]
    for each in given:
        found[id(each)] = numbered(each.name, used)
    counts: dict[str, int] = {}
    for each in layers:
        if id(each) in found:
            continue
        name = held.get(id(each))
        if name is None:
            plain = plain_name(type(each))
            counts[plain] = counts.get(plain, -1) + 1
            # Not as Keras does it: what is counted is never taken for what a user has named.
            name = f"{plain}.{counts[plain]}"
        found[id(each)] = numbered(name, used)
    return [found[id(each)] for each in layers]


def _attributes(parent, layers: Sequence) -> dict[int, str]:
    """By layer, the attribute of the parent that holds it, be it in a list or in a dict."""
    asked = {id(each) for each in layers}
    found: dict[int, str] = {}
    # Where two attributes hold the same, a public one counts, and then the alphabet.
    for name, value in sorted(vars(parent).items(), key=lambda item: (item[0][0] == "_", item[0])):
        if name == sublayers.name:  # Keras' own list of all.
            continue
        for path, each in _leaves(value, name):
            if id(each) in asked:
                found.setdefault(id(each), path)
    return found


def _leaves(value, path: str, depth: int = 8) -> Iterator[tuple[str, Any]]:
    """What lies in lists and dicts, which may hold themselves."""
    if not depth:
        return
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}_{str(key).replace('/', '_')}", depth - 1)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}_{number}", depth - 1)
    else:
        yield path, value


def metric_names(variables: Sequence[keras.Variable]) -> list[str]:
    """A name for each variable of a model's metrics.

    Keras does not keep who named a metric: a name that looks like one of its own counts as one.
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


def optimizer_names(
    optimizer: Any, parameters: Sequence[tuple[keras.Variable, str]]
) -> list[tuple[keras.Variable, str]]:
    """The variables of an optimizer and of those that it wraps, and a name for each.

    `parameters` are those that it may keep a state for, with their names, in its order.
    """
    # Keras names a slot by the path of its parameter; the longest that fits is the right one.
    # Parameters of equal paths lie behind it in the order in which they have their slots.
    prefixes: dict[str, list[str]] = {}
    for variable, name in parameters:
        prefixes.setdefault(variable.path.replace("/", "_") + "_", []).append(name)
    longest = sorted(prefixes, key=lambda prefix: -len(prefix))
    found: list[tuple[keras.Variable, str]] = []
    used: set[str] = set()
    for kind, each in _parts_of(optimizer):
        seen: dict[str, int] = {}
        for variable in own_variables(each):
            name = f"{kind}/{variable.name}"
            prefix = next((one for one in longest if variable.name.startswith(one)), None)
            if prefix is not None:
                place = seen[variable.name] = seen.get(variable.name, -1) + 1
                names = prefixes[prefix]
                slot = variable.name[len(prefix) :]
                name = f"{kind}/{slot}/{names[min(place, len(names) - 1)]}"
            found.append((variable, numbered(name, used)))
    return found


def _parts_of(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The optimizers that one consists of, each with a name: wrappers, and those inside."""
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
    """The name, with a number behind it where it is used already."""
    number, found = 0, name
    while found in used:
        number += 1
        found = f"{name}_{number}"
    used.add(found)
    return found
