"""Distinguishes names of layers that Keras has generated from those that the user has chosen.

Keras names a layer after its class and the number of objects of that class in the process: `dense_7`. Such a
number has no meaning in another process; a number that the user has chosen does. Keras does not store the
difference (`Operation.__new__` drops `name` from the recorded arguments), so the constructor is patched when
tfdist is imported.
"""

from __future__ import annotations

import functools
import inspect
import re

from tfdist.backend.graph.loops import callers
from tfdist.backend.keras.patching import moved
from tfdist.backend.keras.private import Operation, to_snake_case

#: The attribute of an object, and of its copies: whether Keras has generated its name.
_MARK = "_tfdist_name_is_made_up"


def watch() -> None:
    """Patches the constructor of all layers.

    Raises:
        ImportError: The constructor of this Keras has a different signature.
    """
    original = Operation.__init__
    if list(inspect.signature(original).parameters) != ["self", "name"]:
        raise moved("Operation.__init__(self, name)", inspect.signature(original))

    @functools.wraps(original)
    def watched(self, name=None):
        original(self, name=name)
        # Bypasses the attribute tracking of layers.
        vars(self)[_MARK] = name is None or (_looks_made_up(self) and _comes_from_a_config())

    Operation.__init__ = watched


def is_made_up(layer) -> bool:
    """Whether Keras has generated the name of a layer.

    For a layer created before the import of tfdist, or from a config (`clone_model`, `load_model`), it is
    unknown: then a name in the form of Keras' names counts as generated.
    """
    return _looks_made_up(layer) and vars(layer).get(_MARK, True)


def _looks_made_up(layer) -> bool:
    return re.sub(r"_\d+$", "", layer.name) == plain_name(type(layer))


def _comes_from_a_config() -> bool:
    """Whether the caller is inside a `from_config`, which passes the name in any case."""
    return any(frame.f_code.co_name == "from_config" for frame in callers(inspect.currentframe()))


def plain_name(kind: type) -> str:
    """The name that Keras generates for the first object of a class."""
    return to_snake_case(kind.__name__)


watch()
