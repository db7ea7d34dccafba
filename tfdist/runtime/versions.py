"""The versions of Keras and TensorFlow that tfdist was tested with; `make matrix` finds them.

tfdist patches functions of Keras, and derives from a private class of TensorFlow, so another minor
version may train wrong numbers without an error. It is refused in one line.
"""

from __future__ import annotations

import os
import re

from tfdist.utils.errors import TfdistError

#: By distribution: the first version in the range, and the first behind it. `setup.cfg` has the same.
RANGES = {"tensorflow": ((2, 18), (2, 22)), "keras": ((3, 12), (3, 16))}
#: A variable that lets others in, such as nightly builds.
ANY_VERSION = "TFDIST_ANY_VERSION"
_NAMES = {"tensorflow": "TensorFlow", "keras": "Keras"}


class VersionError(TfdistError, ImportError):
    """A library is installed in a version that tfdist does not work with: one line says so."""


def range_of(name: str) -> str:
    """The range of a distribution, as pip takes it."""
    first, end = RANGES[name]
    return f">={'.'.join(map(str, first))},<{'.'.join(map(str, end))}"


def check_version(name: str, version: str) -> None:
    """Refuses a version of a distribution that tfdist was not tested with.

    Args:
        name: "tensorflow" or "keras".
        version: Its version.

    Raises:
        VersionError: It is out of the range, and `TFDIST_ANY_VERSION` is not 1.
    """
    first, end = RANGES[name]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    # A nightly build is what comes before its version, with the changes since the last one.
    is_nightly = "dev" in version
    if first <= numbers < end and not is_nightly:
        return
    if os.environ.get(ANY_VERSION) == "1":
        return
    raise VersionError(
        f"tfdist works with {_NAMES[name]} {range_of(name)}. Received: {_NAMES[name]} {version}. "
        f"pip install '{name}{range_of(name)}', or set {ANY_VERSION}=1 to try this one."
    )
