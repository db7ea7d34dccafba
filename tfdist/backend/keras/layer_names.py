"""Which layers got their name from Keras, and which from the user.

Keras names a layer after its class and numbers it by how many of the class the process has made:
`dense_7`. Such a number says nothing to another process; a number that the user wrote does. Keras does
not keep which it was (`Operation.__new__` drops `name` from the arguments that it records), so the
constructor is watched from the import of tfdist on.
"""

from __future__ import annotations

import functools
import inspect
import re

from tfdist.backend.keras.patching import moved
from tfdist.backend.keras.private import Operation, to_snake_case

#: In what an object has: whether Keras made up its name. A copy of the object has it, too.
_MARK = "_tfdist_name_is_made_up"
_watches = False


def watch() -> None:
    """Watches the constructor of all layers from now on; a second call changes nothing.

    Raises:
        ImportError: The constructor of this Keras is another.
    """
    global _watches
    if _watches:
        return
    original = Operation.__init__
    if list(inspect.signature(original).parameters) != ["self", "name"]:
        raise moved("Operation.__init__(self, name)", inspect.signature(original))

    @functools.wraps(original)
    def watched(self, name=None):
        original(self, name=name)
        # Past what layers do with their attributes.
        vars(self)[_MARK] = name is None or (_looks_made_up(self) and _comes_from_a_config())

    Operation.__init__ = watched
    _watches = True


def is_made_up(layer) -> bool:
    """Whether Keras made up the name of a layer.

    Of one that was made before tfdist was imported, or from a config (`clone_model`, `load_model`),
    it is not known: then a name that looks like one of Keras' counts as one.
    """
    return _looks_made_up(layer) and vars(layer).get(_MARK, True)


def _looks_made_up(layer) -> bool:
    return re.sub(r"_\d+$", "", layer.name) == plain_name(type(layer))


def _comes_from_a_config() -> bool:
    """Whether an object is being made by a `from_config`, which passes on any name."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "from_config":
            return True
        frame = frame.f_back
    return False


def plain_name(kind: type) -> str:
    """The name that Keras makes up for the first object of a class."""
    return to_snake_case(kind.__name__)


watch()
