"""Bad values by the kind of what takes them: from a flag, or from an argument's annotation."""

from __future__ import annotations

import math
import random
from typing import Any


class _Odd:
    """An object that belongs nowhere, and that says so when it is shown."""

    def __repr__(self) -> str:
        return "<odd object>"


#: By a name that the table of legal values goes by.
EVERY: dict[str, Any] = {
    "none": None,
    "object": _Odd(),
    "class": _Odd,
    "nan": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "zero": 0,
    "minus one": -1,
    "zero point": 0.0,
    "minus half": -0.5,
    "fraction": 1.5,
    "huge": 10**20,
    "too large for a float": 10**400,
    "true": True,
    "empty text": "",
    "blank": " ",
    "zero byte": "\0",
    "newline": "a\nb",
    "number as text": "3",
    "word": "tfdist-no-such-thing",
    "bytes": b"\xff\xfe",
    "empty list": [],
    "list of text": ["a", "b"],
    "list of nan": [math.nan],
    "list of minus one": [-1],
    "list of object": [_Odd()],
    "dict": {"a": 1},
}

#: What is no bad value of a kind. All else in `EVERY` is.
_FITS: dict[str, set[str]] = {
    "int": set(),
    "float": {"fraction", "huge"},
    "str": set(),
    "bool": {"true"},
    "Sequence": set(),
    "Mapping": set(),
    "Callable": {"class"},
    "MakeEngine": {"class"},
    "None": {"none"},
    # What TensorFlow makes a tensor of.
    "Tensor": set(EVERY)
    - {"none", "object", "class", "huge", "too large for a float"}
    - {"list of object", "dict"},
    "Splits": set(),
    # An initializer of Keras, by name, or anything that can be called.
    "Initializer": set(),
    "Dtype": set(),
}


def bad_for(annotation: str) -> dict[str, Any]:
    """The values that no argument of an annotation takes, by their names in `EVERY`.

    Args:
        annotation: As it stands in the source, "int | None".
    """
    fits: set[str] = set()
    for part in annotation.split("|"):
        fits |= _FITS.get(part.strip().partition("[")[0].rpartition(".")[2], set())
    return {name: value for name, value in EVERY.items() if name not in fits}


def random_texts(count: int, seed: int) -> list[str]:
    """Texts of random characters, as no flag takes them but those of any text."""
    draw = random.Random(seed)
    alphabet = "aZ09-_.,:;/=+*#$()[]{}<>|&'\"\\ \t\n\0é\u2028\U0001f600"
    return ["".join(draw.choices(alphabet, k=draw.randint(1, 40))) for _ in range(count)]
