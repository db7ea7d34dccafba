"""The versions of Keras and TensorFlow that tfdist was tested with; `make matrix` determines them.

tfdist patches functions of Keras, and derives from a private class of TensorFlow, so another minor
version may train incorrectly without an error. It is rejected with one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from tfdist.utils.errors import TfdistError

_Version = tuple[int, int]
#: The tested pairs of TensorFlow and Keras, by their minor versions, the newest first.
TESTED: tuple[tuple[_Version, _Version], ...] = (
    ((2, 21), (3, 15)),
    ((2, 21), (3, 14)),
    ((2, 20), (3, 13)),
    ((2, 20), (3, 12)),
    ((2, 19), (3, 12)),
    ((2, 18), (3, 12)),
)


def _range(versions: Iterable[_Version]) -> tuple[_Version, _Version]:
    found = sorted(versions)
    return found[0], (found[-1][0], found[-1][1] + 1)


#: By distribution: the first version in the range, and the first after it. `setup.cfg` has the same.
RANGES = {
    "tensorflow": _range(tensorflow for tensorflow, _ in TESTED),
    "keras": _range(keras for _, keras in TESTED),
}
#: A variable that allows other versions, such as nightly builds.
ANY_VERSION = "TFDIST_ANY_VERSION"
_NAMES = {"tensorflow": "TensorFlow", "keras": "Keras"}


#: The last TensorFlow that has a build for TPUs, in the package `tensorflow-tpu`.
_LAST_TPU = (2, 20)


class VersionError(TfdistError, ImportError):
    """The installed version of a library is not supported; reported in one line."""


def minor_version(version: str) -> _Version:
    """The first two numbers of a version."""
    major, minor, *_ = (*map(int, re.findall(r"\d+", version)), 0, 0)
    return major, minor


def why_no_tpu(version: str) -> str:
    """Why a version of TensorFlow has no TPUs; "" if there is a build for them."""
    if minor_version(version) <= _LAST_TPU:
        return ""
    last = ".".join(map(str, _LAST_TPU))
    return (
        f"TensorFlow {version} has no build for TPUs, and the package tensorflow-tpu ends at {last}. Install "
        f"tensorflow-tpu {last}, or use Keras on JAX"
    )


def range_of(name: str) -> str:
    """The version range of a distribution, in the syntax of pip."""
    first, end = RANGES[name]
    return f">={'.'.join(map(str, first))},<{'.'.join(map(str, end))}"


def check_version(name: str, version: str) -> None:
    """Rejects a version of a distribution that tfdist was not tested with.

    Args:
        name: "tensorflow" or "keras".
        version: The installed version.

    Raises:
        VersionError: The version is out of the range, and `TFDIST_ANY_VERSION` is not 1.
    """
    first, end = RANGES[name]
    # A nightly build precedes its version, with changes since the last release.
    is_supported = first <= minor_version(version) < end and "dev" not in version
    if not is_supported and os.environ.get(ANY_VERSION) != "1":
        raise VersionError(
            f"tfdist requires {_NAMES[name]} {range_of(name)}. Received: {_NAMES[name]} {version}. "
            f"pip install '{name}{range_of(name)}', or set {ANY_VERSION}=1 to try this one."
        )
